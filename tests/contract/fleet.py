"""A fleet as the contract sees it: it sends jobs, starts workers, and reads the notes of its workers."""

from __future__ import annotations

import itertools
import json
import signal
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, ClassVar, Protocol

from ojs_bridge import Bridge
from ojs_bridge.rules.job import parse_time
from tests.contract.notes import Noting, Settings
from tests.contract.steps import Step
from tests.servers import eventually

ENDS = ("job.completed", "job.discarded")


@dataclass(frozen=True)
class Run:
    """One run of a job: when it began, the framework's count of retries, and the state of its message."""

    at: float
    retries: int
    ojs: dict[str, Any]
    pid: int

    @property
    def attempt(self) -> int:
        """The attempt that the message says it is."""
        return int(self.ojs.get("attempt", 1))

    @property
    def due(self) -> float:
        """The time that the message names for it."""
        return parse_time(self.ojs["next_retry_at"]).timestamp()


@dataclass(frozen=True)
class Told:
    """One event of a job, as a listener heard it."""

    type: str
    data: dict[str, Any]


@dataclass(frozen=True)
class Wishes:
    """The options of a job: its policy, its retry state, its headers, its id; its delay and life in seconds.

    A job that is sent `within` a connection is a part of the transaction of that connection.

    A job that is followed keeps its result, and hands it to a next job, which notes it under a word.
    The first worker that would send a deadly next job dies instead. An `account` is an argument of its own.
    """

    policy: dict[str, Any] | None = None
    state: dict[str, Any] | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    id: str | None = None
    delay: float | None = None
    lives: float | None = None
    within: Any = None
    followed_by: str = ""
    deadly: bool = False
    account: str | None = None


class Worker(Protocol):
    """A worker of either framework."""

    process: Any

    @property
    def log(self) -> str:
        """The log of the fleet's workers so far."""

    @property
    def processes(self) -> list[int]:
        """The ids of its processes, or of their group as a negative number."""

    def await_ready(self) -> None:
        """Wait until the worker consumes."""

    def ask_to_stop(self) -> None:
        """Ask the worker to end the jobs that it runs, and itself."""

    def stop(self) -> int:
        """Stop the worker in good order, and return its exit status."""

    def kill(self) -> None:
        """Kill every process of the worker with signal 9."""

    def say_where_it_stands(self) -> str:
        """Return the end of the log, with the stacks of the worker where it can tell them."""


class Fleet(ABC):
    """An app or a broker under a bridge, its queue, and its workers.

    Its tasks do what the arguments of their jobs say: `act`; `act_kept`, which has two attempts and is kept;
    `interruptible`, whose runs hear of a shutdown. Its bridge waits for PT0.1S before a retry, no jitter.
    """

    framework: ClassVar[str]
    #: How late a run may be on a loaded machine, in seconds.
    late: ClassVar[float]
    #: The signal at which a worker ends in good order, but does not wait for its jobs.
    hurry: ClassVar[signal.Signals]
    bridge: Bridge

    def __init__(self, settings: Settings) -> None:
        self.settings, self.queue, self.store = settings, settings.queue, settings.store or ""
        self.workers: list[Worker] = []
        self._notes = Noting(settings.backend)

    @property
    def worker(self) -> Worker:
        """The worker that was started last."""
        return self.workers[-1]

    @property
    def queues(self) -> list[str]:
        """The queues that RabbitMQ must keep if it is killed."""
        return [self.queue]

    @property
    @abstractmethod
    def other_queue(self) -> str:
        """Another queue of the workers."""

    @abstractmethod
    def start(self, threads: int = 4, *options: str, **env: str) -> Worker:
        """Start a worker, which runs so many jobs side by side."""

    def send(self, task: str, *steps: Step, **wishes: Any) -> str:
        """Send a job with the wishes of `Wishes`, and return its id."""
        return self._send(task, steps, Wishes(**wishes))

    @abstractmethod
    def _send(self, task: str, steps: tuple[Step, ...], wishes: Wishes) -> str: ...

    @abstractmethod
    def put(self, step: Step = "ok", *, body: bytes = b"", **differs: Any) -> tuple[str, bytes]:
        """Put a job of `act` into the queue past the framework's own producer; return its id and its body.

        Its message differs from a good one by headers on Celery, by fields on Dramatiq, or has another body.
        """

    @abstractmethod
    def put_delayed(self, at: datetime) -> str:
        """Put a job of `act` that is due at a time, as a producer without the bridge does; return its id."""

    @abstractmethod
    def dead_bodies(self) -> list[bytes]:
        """Return the bodies of what the broker's dead queue has; on RabbitMQ they may be gone from there."""

    @abstractmethod
    def result(self, job: str) -> Any:
        """Return the result of a job that is followed."""

    def followed(self, word: str) -> list[Any]:
        """Return what the next job of a word was given, at each of its runs."""
        return self._notes.read("followed", word)

    def calls(self, job: str, name: str) -> int:
        """Count the calls of a handler of a name for a job; `after_publish` is one."""
        return self._notes.read("calls", job).count([name])

    @abstractmethod
    def left(self) -> int:
        """Count the messages that the queue has; on RabbitMQ without those that a worker has."""

    @abstractmethod
    def give_out_again(self) -> None:
        """Have Redis give out again what workers have, as if they were dead."""

    def replace(self, threads: int = 4) -> Worker:
        """Kill the worker and start another one."""
        self.worker.kill()
        return self.start(threads)

    def runs(self, job: str) -> list[Run]:
        """Every run of a job so far."""
        notes = self._notes.read("runs", job)
        return [Run(note["at"], note["retries"], _loaded(note["state"]), note["pid"]) for note in notes]

    def events(self, job: str) -> list[Told]:
        """The events of a job so far."""
        return [Told(event["type"], event["data"]) for event in self._notes.read("events", job)]

    def types(self, job: str) -> list[str]:
        """The types of the events of a job so far."""
        return [event.type for event in self.events(job)]

    def dead(self) -> set[str]:
        """The jobs in the broker's dead queue."""
        return {letter.id for letter in self.bridge.broker_letters.list().letters}

    def close(self, *, badly: bool = False) -> None:
        """Kill the workers, after a failed test with a word on where they stand."""
        for worker in self.workers:
            if badly:
                print(worker.say_where_it_stands())
            worker.kill()


def _loaded(state: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(state) if isinstance(state, str) else state or {}
    return found


def end(fleet: Fleet, job: str, *, nth: int = 1, seconds: float = 60) -> Told:
    """Wait until a job has ended for the nth time, and return the event that says how."""

    def ends() -> list[Told]:
        return [event for event in fleet.events(job) if event.type in ENDS]

    try:
        eventually(lambda: len(ends()) >= nth, seconds=seconds)
    except TimeoutError:
        log = fleet.worker.say_where_it_stands()
        told = f"{job} has not ended: {fleet.types(job)}, {len(fleet.runs(job))} runs"
        raise AssertionError(f"{told}\n{log}") from None
    return ends()[nth - 1]


def await_runs(fleet: Fleet, *jobs: str, runs: int = 1) -> None:
    """Wait until each job has begun so many runs."""
    for job in jobs:
        eventually(lambda job=job: len(fleet.runs(job)) >= runs, seconds=60, what=f"run {runs} of {job}")


def attempts(fleet: Fleet, job: str) -> list[int]:
    """The attempt of each run of a job."""
    return [run.attempt for run in fleet.runs(job)]


def retries(fleet: Fleet, job: str) -> list[dict[str, Any]]:
    """The data of the event of each retry, in the order of the attempts.

    Each attempt is told of by its own process, and an early one may be told of late.
    """

    def told() -> list[dict[str, Any]]:
        return [event.data for event in fleet.events(job) if event.type == "job.retrying"]

    eventually(lambda: len(told()) >= len(fleet.runs(job)) - 1, what="the event of every retry")
    return sorted(told(), key=lambda data: data["attempt"])


def gaps(fleet: Fleet, job: str) -> list[float]:
    """Seconds from each run of a job to the next."""
    return [b.at - a.at for a, b in itertools.pairwise(fleet.runs(job))]
