"""One fleet under one load while its workers, its broker and its store are killed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from ojs_bridge import Bridge, open_store
from ojs_bridge.store import Filter
from tests.chaos.fates import BANK, RESERVATION, fate_of
from tests.chaos.frameworks import Framework, waiting
from tests.chaos.ledger import Reader
from tests.chaos.settings import Settings
from tests.chaos.workers import Worker
from tests.servers import Proxy, RabbitMQ, Server, eventually

WORKERS = 2
#: Seconds without a line after which nothing comes any more: a lost attempt is found, and its retry comes.
QUIET = RESERVATION + 4.0


@dataclass(frozen=True)
class Outage:
    """A server is killed, or frozen, and comes back with its data after some seconds.

    The "worker" can only be frozen: for longer than its reservations, it is a zombie when it wakes. The "way"
    to the store goes silent: packets vanish on the connections of that moment, and new ones work.
    """

    at: float
    server: str
    seconds: float = 0.0
    frozen: bool = False


@dataclass(frozen=True)
class Pause:
    """Jobs of a type are paused for some seconds, and go on at a rate."""

    at: float
    type: str
    seconds: float
    rate: str | None = None


@dataclass(frozen=True)
class Storm:
    """The length of the killing, its pace, and the servers that go away meanwhile; all in seconds.

    With `pauses` jobs have a rate, slots and a breaker, too.
    """

    seconds: float
    kill_every: float
    outages: Sequence[Outage]
    patience: float
    pauses: Sequence[Pause] = ()
    #: When the bank is down.
    bank: tuple[float, float] | None = None


@dataclass
class Outcome:
    """The records at the end of a trial."""

    ledger: Reader
    alive: set[str]
    dead: set[str]
    #: The last attempt of each dead letter in the store.
    letters: dict[str, int]
    #: When a worker was killed, by the clock of the ledger, and which processes of it.
    kills: list[tuple[float, Sequence[int]]]
    #: When a server was away, by the same clock.
    outages: list[tuple[float, float]]
    starts: int
    seconds: float
    #: The jobs that are held at the end, though nothing holds them.
    held: set[str] = field(default_factory=set)


class Trial:
    """A fleet, its load and its storm; without a store the fleet is the framework alone."""

    def __init__(
        self,
        framework: Framework,
        broker: Server,
        store: Server | None,
        jobs: Sequence[str],
        folder: Path,
        way: Proxy | None = None,
        *,
        limited: bool = False,
    ) -> None:
        self._framework, self._broker, self._store, self._jobs = framework, broker, store, jobs
        lines = folder / "ledger"
        lines.mkdir(parents=True)
        self._way = way
        url = store and (way.to(store.url) if way else store.url)
        # A connection may be made just when its way goes silent: that takes no longer than its URL says.
        url = url and url.replace("connect_timeout=60", "connect_timeout=10")
        self._settings = Settings(broker.url, url, str(lines), limited=limited)
        self._ledger = Reader(lines)
        self._log = folder / "workers.log"
        self._rng = random.Random(len(jobs))
        self._kills: list[tuple[float, Sequence[int]]] = []
        self._turns = 0
        self._looked = 0.0

    def run(self, storm: Storm) -> Outcome:
        """Enqueue the load, then let workers and the storm at it until every job has ended, or patience."""
        self._feed()
        command, environment = self._framework.command(), self._settings.to_env()
        self._workers = [Worker(command, environment, self._log) for _ in range(WORKERS)]
        self._began = time.monotonic()
        actions = self._actions(storm)
        try:
            eventually(lambda: self._tick(storm, actions), seconds=storm.patience)
        except TimeoutError:
            pass
        finally:
            for worker in self._workers:
                worker.ask_to_stop()
            for worker in self._workers:
                worker.close()
        return self._outcome(storm)

    def _feed(self) -> None:
        self._framework.declare(self._settings)
        if isinstance(self._broker, RabbitMQ):
            for queue in self._framework.queues:
                self._broker.await_declared(queue)
        self._framework.enqueue(self._settings, self._jobs)

    def _actions(self, storm: Storm) -> list[tuple[float, Callable[[], object]]]:
        actions: list[tuple[float, Callable[[], object]]] = []
        for outage in storm.outages:
            begin, end = self._steps(outage)
            actions += [(outage.at, begin), (outage.at + outage.seconds, end)]
        if storm.bank:
            begin, end = partial(self._ledger.release, BANK), partial(self._ledger.take_back, BANK)
            actions += [(storm.bank[0], begin), (storm.bank[1], end)]
        for pause in storm.pauses:
            begin, end = self._pausing(pause)
            actions += [(pause.at, begin), (pause.at + pause.seconds, end)]
        kills = int(storm.seconds / storm.kill_every)
        actions += [((n + 1) * storm.kill_every, self._kill) for n in range(kills)]
        return sorted(actions, key=lambda action: action[0], reverse=True)

    def _steps(self, outage: Outage) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return the two functions by which an outage begins and ends."""
        match outage.server:
            case "worker":
                return self._workers[0].freeze, self._workers[0].thaw
            case "way":
                return (self._way.silence if self._way else _nothing), _nothing
        server = self._broker if outage.server == "broker" else self._store
        if server is None:
            return _nothing, _nothing
        if outage.frozen:
            return partial(_freeze, server), partial(_thaw, server)
        return server.kill, server.start

    def _pausing(self, pause: Pause) -> tuple[Callable[[], object], Callable[[], object]]:
        """Return the two functions by which a pause begins and ends, past the way that goes silent."""
        bridge = Bridge(self._store and self._store.url)
        return partial(bridge.pause, pause.type), partial(bridge.resume, pause.type, rate=pause.rate)

    def _kill(self) -> None:
        """Kill the next worker, but never a frozen one, which is to wake."""
        self._turns += 1
        chosen = self._workers[self._turns % WORKERS]
        if not chosen.is_frozen:
            self._kills.append((time.time(), chosen.kill(self._rng)))

    def _tick(self, storm: Storm, actions: list[tuple[float, Callable[[], object]]]) -> bool:
        """Do all that is due, and return whether the trial is over."""
        now = time.monotonic() - self._began
        while actions and actions[-1][0] <= now:
            actions.pop()[1]()
        for worker in self._workers:
            worker.tend()
        if actions or now - self._looked < 1:
            return False
        self._looked = now
        self._ledger.refresh()
        quiet = time.time() - self._ledger.newest > QUIET
        return quiet and not self._pending() and not self._copies()

    def _copies(self) -> bool:
        """Return whether a copy of an ended job is on its way, because its worker died too early."""
        if self._store is None:
            return False
        if self._settings.on_redis:
            return bool(self._framework.held(self._settings)[0])
        return any(waiting(self._settings.broker, queue) for queue in self._framework.served)

    def _pending(self) -> list[str]:
        """Return the jobs that have not ended, and may: without the bridge, poison never does."""
        dead = self._letters()
        return [job for job in self._jobs if job not in dead and not self._has_ended(job)]

    def _has_ended(self, job: str) -> bool:
        fate = fate_of(job)
        if self._ledger.lines(job, "done", "job.discarded"):
            return True
        if self._store is not None:
            return False
        return fate.name == "poison" or any(
            line.attempt >= fate.max_attempts for line in self._ledger.lines(job, "failed")
        )

    def _letters(self) -> dict[str, int]:
        if self._settings.store is None:
            return {}
        store, found, cursor = open_store(self._settings.store), dict[str, int](), None
        while True:
            page = store.letters.list(Filter(), limit=1000, cursor=cursor)
            found |= {letter.id: letter.attempt for letter in page.letters}
            cursor = page.next_cursor
            if cursor is None:
                store.close()
                return found

    def _outcome(self, storm: Storm) -> Outcome:
        self._ledger.refresh()
        seconds = time.monotonic() - self._began
        alive, dead = self._framework.held(self._settings)
        letters = self._letters()
        held = self._held() if self._store else set()
        starts = sum(worker.starts for worker in self._workers)
        began = time.time() - seconds
        outages = [
            (began + outage.at, began + outage.at + outage.seconds)
            for outage in storm.outages
            if outage.server in ("broker", "store")
        ]
        ends = alive, dead | {*letters}, letters
        return Outcome(self._ledger, *ends, self._kills, outages, starts, seconds, held)

    def _held(self) -> set[str]:
        waiting = Bridge(self._store and self._store.url).waiting
        return {job.id for job in waiting.list(kind="held", limit=1000).jobs}


def _nothing() -> None:
    """Do nothing."""


def _freeze(server: Server) -> None:
    os.kill(server.pid, signal.SIGSTOP)


def _thaw(server: Server) -> None:
    os.kill(server.pid, signal.SIGCONT)
