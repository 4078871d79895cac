"""A storm on one side: a dependency, a fleet, jobs at a steady pace, and what was counted."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.ledger import Reader
from tests.chaos.workers import Worker
from tests.servers import Postgres, Valkey, eventually
from tests.servers.ports import free_port
from tests.storm.dependency import OK
from tests.storm.settings import PHASES, TASK, VARIABLE, Settings

#: The seconds until the first job, in which the dependency starts.
STARTS = 10
#: How long is waited for jobs that do not end, in seconds, and how many run at a time in each worker.
PATIENCE, WIDTH = 240, 8
COMMANDS = {
    "celery": ["celery", "-A", "tests.storm.celery_app", "worker", "-c", str(WIDTH), "-l", "INFO"],
    "dramatiq": ["dramatiq", "tests.storm.dramatiq_app", "--processes", "1", "--threads", str(WIDTH)],
}
HEAD = (
    *("fleet", "calls in all", *(f"{phase}: calls, worst second" for phase in PHASES)),
    *(
        "first second after the outage",
        "exhausted",
        "of these, in the outage or just after",
        "lost",
        "doubled",
    ),
    *("done after, s", "of the ideal time", "of the plain ideal time"),
)


@dataclass(frozen=True)
class Call:
    """A call that the dependency has counted."""

    at: float
    status: int
    job: str


@dataclass(frozen=True)
class Verdict:
    """What the dependency counted, and what became of the jobs; `dead` has when each died."""

    settings: Settings
    calls: Sequence[Call]
    dead: dict[str, float]

    def a_second(self) -> list[int]:
        """Return the calls of each second until all jobs were done."""
        counted = Counter(int(call.at - self.settings.begun) for call in self.calls)
        return [counted[second] for second in range(int(self.seconds) + 1)]

    def of(self, phase: str) -> list[Call]:
        """Return the calls of a phase."""
        return [call for call in self.calls if self.settings.phase(call.at) == phase]

    def worst(self, phase: str) -> int:
        """Return the most calls of one second of a phase, by the seconds since the phase began."""
        begins = [0.0, *self.settings.ends][PHASES.index(phase)] + self.settings.begun
        return max(Counter(int(call.at - begins) for call in self.of(phase)).values(), default=0)

    @property
    def first_second(self) -> int:
        """The calls in the second after the outage."""
        ended = self.settings.begun + self.settings.ends[1]
        return sum(0 <= call.at - ended < 1 for call in self.calls)

    @property
    def successes(self) -> Counter[str]:
        """How often each job had its answer."""
        return Counter(call.job for call in self.calls if call.status == OK)

    @property
    def lost(self) -> int:
        """The jobs that neither have their answer nor died."""
        return self.settings.jobs - len({*self.successes, *self.dead})

    @property
    def dead_of_outage(self) -> int:
        """The jobs that died before the brown-out."""
        return sum(at < self.settings.begun + self.settings.ends[2] for at in self.dead.values())

    @property
    def seconds(self) -> float:
        """When the last job had its answer or died."""
        ends = [*self.dead.values(), *(call.at for call in self.calls if call.status == OK)]
        return max(ends) - self.settings.begun

    def cells(self) -> Iterator[str]:
        """Yield the cells of a table's row."""
        yield f"{len(self.calls):,}"
        yield from (f"{len(self.of(phase)):,}, {self.worst(phase):,}" for phase in PHASES)
        doubled = sum(times > 1 for times in self.successes.values())
        counted = self.first_second, len(self.dead), self.dead_of_outage, self.lost, doubled
        yield from (f"{number:,}" for number in counted)
        yield f"{self.seconds:.0f}"
        yield f"{self.seconds / self.settings.ideal:.2f}"
        yield f"{self.seconds / self.settings.plain_ideal:.2f}"


def run(settings: Settings, folder: Path, frameworks: Sequence[str]) -> Verdict:
    """Run a storm in a folder, on servers of its own."""
    (folder / "ledger").mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        store = None if settings.side == "native" else stack.enter_context(Postgres()).url
        broker = stack.enter_context(Valkey()).url
        settings = dataclasses.replace(
            settings, broker=broker, store=store, ledger=str(folder / "ledger"), port=free_port()
        )
        for name in frameworks:
            stack.enter_context(_worker(settings, name, folder / f"{name}.log"))
        senders = [stack.enter_context(_sender(settings, name)) for name in frameworks]
        settings = dataclasses.replace(settings, begun=time.time() + STARTS)
        (folder / "settings.json").write_text(settings.to_env()[VARIABLE])
        stack.enter_context(_dependency(settings, folder / "calls"))
        for n in range(settings.jobs):
            due = settings.begun + n / (settings.capacity * settings.load)
            time.sleep(max(0.0, due - time.time()))
            senders[n % len(senders)](f"job-{n}")
        until = time.time() + PATIENCE
        while verdict(folder).lost and time.time() < until:
            time.sleep(1)
        time.sleep(5)  # for calls that come too often
        return verdict(folder)


def verdict(folder: Path) -> Verdict:
    """Return what a storm's folder says."""
    settings = Settings(**json.loads((folder / "settings.json").read_text()))
    words = (line.split() for line in (folder / "calls").read_text().splitlines())
    calls = [Call(float(at), int(status), job) for at, status, job in words]
    reader = Reader(folder / "ledger")
    reader.refresh()
    dead = {job: lines[0].at for job in reader.jobs if (lines := reader.lines(job, "dead"))}
    return Verdict(settings, calls, dead)


@contextmanager
def _worker(settings: Settings, name: str, log: Path) -> Iterator[None]:
    worker = Worker(COMMANDS[name], settings.to_env(), log)
    try:
        eventually(lambda: " ready" in log.read_text(errors="replace"), seconds=60, what="a worker")
        yield
    finally:
        worker.ask_to_stop()
        worker.close()


@contextmanager
def _dependency(settings: Settings, notes: Path) -> Iterator[None]:
    notes.touch()
    environment = {**os.environ, **settings.to_env()}
    command = [sys.executable, "-m", "tests.storm.dependency", str(notes)]
    process = subprocess.Popen(command, env=environment)
    try:
        eventually(lambda: _listens(settings.port), seconds=STARTS, what="the dependency")
        yield
    finally:
        process.kill()
        process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def _sender(settings: Settings, name: str) -> Iterator[Callable[[str], object]]:
    """Yield what sends a job; the apps are imported late, since a worker imports them with its settings."""
    if name == "celery":
        from tests.storm.celery_app import make_app

        app = make_app(settings)
        yield lambda job: app.tasks[TASK].apply_async((job,), task_id=job)
        app.close()
        return
    from tests.storm.dramatiq_app import make_broker

    broker = make_broker(settings)
    actor = broker.get_actor(TASK)
    yield lambda job: broker.enqueue(dataclasses.replace(actor.message(job), message_id=job))
    broker.close()
