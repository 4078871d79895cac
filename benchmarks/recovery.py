"""Measures how soon the jobs of a dead worker begin elsewhere: `python -m benchmarks.recovery --help`.

Two workers run with the defaults of framework and bridge, but that native Celery has `acks_late`: without it
the jobs would be lost. Each is on a machine of its own, by all that it can see. All processes of one worker
are killed while it runs jobs; where its machine vanishes, no connection ends with them. A job's time ends as
its next attempt begins in the other worker; the killed one starts again only after that. Where the attempt
that died counts, the policy waits before the next one: that wait is known, since it has no jitter, and is
taken off. A job that comes back as the same attempt has not waited.

Lost is a job that has not begun again, and that the broker has no more; over, one that began more than twice;
early, one that began again before the kill, or before the policy's wait was over.
"""

from __future__ import annotations

import argparse
import math
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from tests.chaos.fates import READING, delay_before, fate_of
from tests.chaos.ledger import Line, Reader
from tests.chaos.settings import Settings
from tests.chaos.workers import Worker
from tests.servers import Postgres, Proxy, RabbitMQ, Server, Valkey, eventually

if TYPE_CHECKING:
    from tests.chaos.frameworks import Framework

BROKERS: dict[str, type[Valkey] | type[RabbitMQ]] = {"redis": Valkey, "rabbitmq": RabbitMQ}
STORES: dict[str, type[Valkey] | type[Postgres] | None] = {
    "native": None,
    "sqlite": None,
    "postgres": Postgres,
    "redis": Valkey,
}
#: A machine that vanishes has no file that another one reads.
FLEETS = [
    f"{framework}-{broker}-{store}{end}"
    for end, stores in (("", STORES), ("-vanishes", ("native", "postgres", "redis")))
    for framework in ("celery", "dramatiq")
    for broker in BROKERS
    for store in stores
]
#: Seconds, where a machine vanishes: RabbitMQ's heartbeat, and how long Redis with `tcp-keepalive 5` takes
#: to end a silent connection. Three probes follow, one a second; the way plays them.
HEARTBEAT, KEEPALIVE = 5, 8
PLACES = ("worker-1", "worker-2")
#: As many as one worker runs at a time: the worker that lives has room for all.
JOBS = 4
#: After so many kills of which no job came back in time, no more are tried.
HOPELESS = 2
#: Up to so many seconds the jobs run before the kill, which so comes anywhere between two heartbeats.
LONGEST_RUN = 5.0
#: Seconds for what takes no time: a start, or a job that is released.
SOON = 60
GOAL = 10
HEAD = ("fleet", "kills", "jobs", "p50, s", "p99, s", "longest, s", "goal", "lost", "over", "early")


def main() -> None:
    """Measure each fleet, print the table, and fail when the bridge broke a promise."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or the workers would outlive us
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery")
    parser.add_argument(
        "--only", nargs="+", choices=FLEETS, default=FLEETS, metavar="FLEET", help=", ".join(FLEETS)
    )
    parser.add_argument("--kills", type=int, default=50, help="workers that are killed in each fleet")
    parser.add_argument("--patience", type=float, default=130, help="seconds that a job is waited for")
    parser.add_argument("--together", action="store_true", help="run both workers on this one machine")
    parser.add_argument("--folder", type=Path, help="keep ledgers and logs here")
    asked = parser.parse_args()
    print(f"| {' | '.join(HEAD)} |\n|---|{'---:|' * (len(HEAD) - 1)}")
    is_broken = False
    for name in asked.only:
        counts = _measured(name, asked)
        print(f"| {' | '.join(counts.cells(name, asked.patience))} |", flush=True)
        is_broken |= "native" not in name and any((counts.lost, counts.over, counts.early))
    sys.exit(is_broken)


@dataclass
class Counts:
    """The seconds until each job began again, infinite where it did not; and broken promises, by job."""

    kills: int = 0
    seconds: list[float] = field(default_factory=list)
    lost: int = 0
    over: int = 0
    early: int = 0

    def cells(self, name: str, patience: float) -> Iterator[str]:
        """Yield the cells of the table's row."""
        yield from (name, f"{self.kills}", f"{len(self.seconds)}")
        ordered = sorted(self.seconds)
        for share in (0.5, 0.99, 1):
            found = ordered[math.ceil(share * len(ordered)) - 1]
            yield f"> {patience:g}" if math.isinf(found) else f"{found:.1f}"
        yield "" if "native" in name or "vanishes" in name else f"≤ {GOAL}"
        yield from (f"{self.lost}", f"{self.over}", f"{self.early}")


def _measured(name: str, asked: argparse.Namespace) -> Counts:
    # Not above: a worker imports this file before it has its settings, and the apps need them.
    from tests.chaos.frameworks import OnCelery, OnDramatiq

    framework, broker, store, *vanishes = name.split("-")
    of = OnCelery() if framework == "celery" else OnDramatiq()
    with ExitStack() as stack:
        folder = Path(asked.folder or stack.enter_context(tempfile.TemporaryDirectory())) / name
        queue: Server = stack.enter_context(BROKERS[broker]())
        kind = STORES[store]
        url = f"sqlite:///{folder}/ojs.db" if store == "sqlite" else None
        kept: Server | None = stack.enter_context(kind()) if kind else None
        settings = Settings(queue.url, kept.url if kept else url, str(folder), hasty=False)
        ways = [Proxy(server.port) for server in (queue, kept) if server for _ in PLACES if vanishes]
        for way in ways:
            stack.enter_context(way)
        fleet = stack.enter_context(_Fleet(of, settings, folder, ways, together=asked.together))
        while fleet.counts.kills < asked.kills and not fleet.is_hopeless:
            fleet.kill_one(asked.patience)
    return fleet.counts


class _Fleet:
    """Workers, of which one is killed at a time; each has every second of the ways to the servers, if any."""

    def __init__(
        self, framework: Framework, settings: Settings, folder: Path, ways: Sequence[Proxy], *, together: bool
    ) -> None:
        self._framework, self._together, self._ways = framework, together, ways
        self._places = [folder / name for name in PLACES]
        for place in self._places:
            place.mkdir(parents=True)
        #: What each worker's jobs note.
        self._ledgers = [Reader(place) for place in self._places]
        self._logs = [place.with_suffix(".log") for place in self._places]
        self._settings = replace(settings, heartbeat=HEARTBEAT if ways else None)
        #: The jobs that were killed, with the time.
        self._killed: dict[str, float] = {}
        self._rng = random.Random(1)
        self.counts = Counts()

    def __enter__(self) -> _Fleet:
        self._framework.declare(self._settings)
        self._workers = [
            Worker(
                self._framework.command(),
                self._settings_of(n).to_env(),
                self._logs[n],
                machine="" if self._together else PLACES[n],
            )
            for n in range(len(PLACES))
        ]
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for worker in self._workers:
            worker.ask_to_stop()
        for worker in self._workers:
            worker.close()
        if kind is None:
            self._count()

    def _settings_of(self, n: int) -> Settings:
        broker, store = self._settings.broker, self._settings.store
        for way in self._ways[n :: len(PLACES)]:
            broker, store = way.to(broker), store and way.to(store)
        return replace(self._settings, broker=broker, store=store, ledger=str(self._places[n]))

    @property
    def is_hopeless(self) -> bool:
        """Whether no job has come back, after some kills."""
        return self.counts.kills >= HOPELESS and all(self._next(job) is None for job in self._killed)

    def kill_one(self, patience: float) -> None:
        """Have the workers begin jobs, kill the worker that has the most, and wait for the next attempts."""
        self._await(self._are_ready, what="two workers")
        jobs = [f"held-{self.counts.kills}-{n}" for n in range(JOBS)]
        self._framework.enqueue(self._settings, jobs)
        self._await(lambda: all(map(self._starts, jobs)), what="the jobs' first attempts")
        of_each = [[job for job in jobs if ledger.lines(job, "start")] for ledger in self._ledgers]
        hit = max(of_each, key=len)
        time.sleep(self._rng.uniform(0, LONGEST_RUN))
        victim = self._workers[of_each.index(hit)]
        starts = victim.starts
        self._killed.update(dict.fromkeys(hit, time.time()))
        for way in self._ways[of_each.index(hit) :: len(PLACES)]:
            way.silence()
            if self._settings.on_redis:
                threading.Timer(KEEPALIVE, way.end_silenced).start()
        victim.kill_all()
        self.counts.kills += 1
        with suppress(TimeoutError):
            self._await(lambda: all(map(self._next, hit)), seconds=patience)
        running = [job for job in jobs if job not in hit or self._next(job)]
        for job, ledger in product(jobs, self._ledgers):
            ledger.release(job)
        self._await(lambda: all(self._lines(job, "done") for job in running), what="the jobs' ends")
        # Its end may be known a moment later.
        self._await(lambda: _tended(victim).starts > starts, what="the killed worker")

    def _await(self, condition: Callable[[], bool], *, seconds: float = SOON, what: str = "it") -> None:
        def holds() -> bool:
            for ledger in self._ledgers:
                ledger.refresh()
            return condition()

        eventually(holds, seconds=seconds, what=what)

    def _are_ready(self) -> bool:
        says = [log.read_text().count(" ready") for log in self._logs]
        return all(n >= worker.starts for n, worker in zip(says, self._workers, strict=True))

    def _lines(self, job: str, what: str) -> Sequence[Line]:
        found = [line for ledger in self._ledgers for line in ledger.lines(job, what)]
        return sorted(found, key=attrgetter("at"))

    def _starts(self, job: str) -> Sequence[Line]:
        return self._lines(job, "start")

    def _next(self, job: str) -> Line | None:
        """Return the line of a job's second start."""
        return next(iter(self._starts(job)[1:]), None)

    def _count(self) -> None:
        """Count the jobs that were killed, now that no worker runs."""
        missing = []
        for job, killed in self._killed.items():
            found = self._next(job)
            if found is None:
                missing.append(job)
                self.counts.seconds.append(math.inf)
                continue
            wait = delay_before(found.attempt) if found.attempt > 1 else 0.0
            self.counts.seconds.append(found.at - killed - wait)
            self.counts.early += found.at - killed < wait - READING
            self.counts.over += len(self._starts(job)) > fate_of(job).max_attempts
        if missing:
            alive, _ = self._framework.held(self._settings)
            self.counts.lost = len(set(missing) - alive)


def _tended(worker: Worker) -> Worker:
    worker.tend()
    return worker


if __name__ == "__main__":
    main()
