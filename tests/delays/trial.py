"""A trial: delayed jobs, workers that are started again when they end, deploys meanwhile, and a verdict."""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.ledger import Reader
from tests.chaos.workers import Worker
from tests.delays.fleets import FLEETS, Sent
from tests.delays.settings import Settings
from tests.servers import Postgres, RabbitMQ, Server, Valkey, eventually

#: Seconds by which a due time may be cut: a message has whole milliseconds.
READING = 0.001
#: Seconds that a worker may take to end in good order in a deploy.
GRACE = 30
#: What RabbitMQ says when it closes a channel.
TIMED_OUT = "delivery acknowledgement on channel"


@dataclass(frozen=True)
class Trial:
    """A fleet, its jobs and what happens to it.

    The jobs are due `soonest` to `latest` seconds after the workers are up. Each of the `deploys`, at so many
    seconds, stops one worker and starts it again; of `killed` ones, no process ends in good order. The trial
    waits `patience` seconds for jobs that are due and do not run. It ends when all have run, and for `quiet`
    seconds none has run again.
    """

    name: str
    framework: str
    broker: str
    soonest: float
    latest: float
    jobs: int = 100
    workers: int = 1
    park_after: str = "PT2S"
    visibility: int | None = None
    consumer_timeout: int | None = None
    deploys: tuple[float, ...] = ()
    killed: tuple[float, ...] = ()
    patience: float = 60
    quiet: float = 10

    def run(self, folder: Path, *, store: str | None) -> Verdict:
        """Run it with the bridge on a kind of store, or without; workers that hang are killed."""
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            broker = stack.enter_context(self._broker())
            url = stack.enter_context(Postgres()).url if store == "postgres" else None
            if store == "valkey":
                url = stack.enter_context(Valkey()).url
            if store == "sqlite":
                url = f"sqlite:///{folder}/ojs.db"
            settings = Settings(broker.url, url, str(folder / "ledger"), self.park_after, self.visibility)
            verdict = _Run(self, settings, folder).play()
            verdict.closed = (broker.folder / "log").read_text(errors="replace").count(TIMED_OUT)
            return verdict

    def _broker(self) -> Server:
        if self.broker == "valkey":
            return Valkey()
        if self.consumer_timeout is None:
            return RabbitMQ()
        # How often RabbitMQ looks is no part of the timeout: its default would make that up to twice as long.
        return RabbitMQ(consumer_timeout=self.consumer_timeout * 1000, channel_tick_interval=5000)


@dataclass
class Verdict:
    """What became of the jobs: how often each started, and how late its first start was, in seconds."""

    jobs: int
    starts: list[int]
    early: list[str]
    lateness: list[float]
    #: How often a worker ended by itself, deploys apart, and how often RabbitMQ closed a channel.
    ended: int = 0
    closed: int = 0
    log: str = field(default="", repr=False)

    @property
    def missing(self) -> int:
        """The number of jobs that never started."""
        return self.starts.count(0)

    @property
    def repeated(self) -> int:
        """The number of jobs that started more than once."""
        return sum(count > 1 for count in self.starts)

    @property
    def is_kept(self) -> bool:
        """Whether each job ran once, and not early."""
        return not (self.missing or self.repeated or self.early)

    def cells(self) -> Iterator[str]:
        """Yield the cells of a table's row."""
        yield f"{self.jobs:,}"
        yield f"{min(self.starts)}, {statistics.median(self.starts):g}, {max(self.starts)}"
        yield from (
            f"{count:,}" for count in (self.missing, self.repeated, len(self.early), self.closed, self.ended)
        )
        late = sorted(self.lateness)
        yield ", ".join(f"{late[math.ceil(share * len(late)) - 1]:.1f}" for share in (0.5, 1)) if late else ""


HEAD = (
    *("fleet", "jobs", "starts of a job: least, median, most", "never ran", "ran again", "early"),
    *("closed channels", "workers that ended", "late, s: median, most"),
)


class _Run:
    def __init__(self, trial: Trial, settings: Settings, folder: Path) -> None:
        self._trial, self._settings = trial, settings
        self._fleet = FLEETS[trial.framework]()
        Path(settings.ledger).mkdir(parents=True, exist_ok=True)
        self._ledger = Reader(Path(settings.ledger))
        self._logs = [folder / f"worker-{n}.log" for n in range(trial.workers)]
        self._deploys = sorted([*((at, False) for at in trial.deploys), *((at, True) for at in trial.killed)])
        self._deployed = self._starts = 0

    def play(self) -> Verdict:
        """Return what became of the jobs."""
        environment = self._settings.to_env()
        workers = [Worker(self._fleet.command(4, log.stem), environment, log) for log in self._logs]
        try:
            eventually(lambda: self._are_ready(workers), seconds=60, what="the workers")
            begun = time.time()
            step = (self._trial.latest - self._trial.soonest) / max(self._trial.jobs - 1, 1)
            jobs = [Sent(f"job-{n}", begun + self._trial.soonest + n * step) for n in range(self._trial.jobs)]
            self._fleet.send(self._settings, jobs)
            self._watch(workers, begun, jobs)
            verdict = self._verdict(jobs)
            verdict.ended = sum(worker.starts - 1 for worker in workers) - self._deployed
            return verdict
        finally:
            for worker in workers:
                worker.ask_to_stop()
            for worker in workers:
                worker.close()

    def _are_ready(self, workers: Sequence[Worker]) -> bool:
        says = [log.read_text(errors="replace").count(" ready") for log in self._logs]
        return all(n >= worker.starts for n, worker in zip(says, workers, strict=True))

    def _watch(self, workers: Sequence[Worker], begun: float, jobs: Sequence[Sent]) -> None:
        due = begun + self._trial.latest
        while time.time() < due + self._trial.patience:
            for worker in workers:
                worker.tend()
            if self._deploys and time.time() - begun >= self._deploys[0][0]:
                self._deploy(workers[self._deployed % len(workers)], is_killed=self._deploys.pop(0)[1])
            self._ledger.refresh()
            are_all = all(self._ledger.lines(job.id, "start") for job in jobs)
            if are_all and time.time() > max(due, self._ledger.newest) + self._trial.quiet:
                return
            time.sleep(0.1)

    def _deploy(self, worker: Worker, *, is_killed: bool) -> None:
        self._deployed += 1
        starts = worker.starts
        if is_killed:
            worker.kill_all()
        else:
            worker.ask_to_stop()
        until = time.time() + GRACE
        while worker.starts == starts:
            if time.time() > until:
                worker.kill_all()
            time.sleep(0.05)
            worker.tend()

    def _verdict(self, jobs: Sequence[Sent]) -> Verdict:
        self._ledger.refresh()
        starts = {job: self._ledger.lines(job.id, "start") for job in jobs}
        late = {job.id: lines[0].at - (job.due or 0) for job, lines in starts.items() if lines}
        early = [job for job, seconds in late.items() if seconds < -READING]
        counts = Counter({job.id: len(lines) for job, lines in starts.items()})
        log = "".join(log.read_text(errors="replace") for log in self._logs)
        return Verdict(len(jobs), [*counts.values()], early, [*late.values()], log=log)
