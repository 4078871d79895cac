"""What the contract asks of a fleet, and how each framework's fleet answers."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ojs_bridge import Bridge
from ojs_bridge.spec.job import parse_time
from tests.contract.steps import ERRORS, KEEP, step
from tests.on_celery import fleet as celery_fleet
from tests.on_dramatiq import fleet as dramatiq_fleet
from tests.servers import eventually

Fields: TypeAlias = dict[str, Any]
ENDS = ("job.completed", "job.discarded")


@dataclass(frozen=True)
class Run:
    """One run of a job: when it began, the framework's count of retries, and the state of its message."""

    at: float
    retries: int
    ojs: dict[str, Any]

    @property
    def attempt(self) -> int:
        """The attempt that the message says it is."""
        return int(self.ojs.get("attempt", 1))

    @property
    def due(self) -> float:
        """When it was due."""
        return parse_time(self.ojs["next_retry_at"]).timestamp()


@dataclass(frozen=True)
class Told:
    """One event of a job, as a listener heard it."""

    type: str
    data: dict[str, Any]


class Fleet(Protocol):
    """An app or a broker under a bridge, with a worker.

    It has two tasks, whose jobs do what their arguments say: `act`, and `act_kept`, which has two attempts
    and is kept. Its bridge waits for PT0.1S before a retry, without jitter.
    """

    framework: str
    bridge: Bridge
    #: The store's URL, if there is one.
    store: str
    queue: str
    #: How late a run may be on a loaded machine, in seconds.
    late: float

    def send(
        self,
        task: str,
        *steps: str,
        policy: Fields | None = None,
        state: Fields | None = None,
        meta: Fields | None = None,
    ) -> str:
        """Send a job with a policy, a retry state and headers of its own, and return its id."""

    def runs(self, job: str) -> list[Run]:
        """Every run of a job so far."""

    def events(self, job: str) -> list[Told]:
        """The events of a job so far."""


class OnCelery:
    """A Celery fleet: its worker is another process."""

    framework = "celery"
    late = celery_fleet.LATE

    def __init__(self, fleet: celery_fleet.Fleet) -> None:
        self._fleet = fleet
        self.bridge, self.queue = fleet.bridge, fleet.settings.queue
        self.store = fleet.settings.store or ""

    def send(
        self,
        task: str,
        *steps: str,
        policy: Fields | None = None,
        state: Fields | None = None,
        meta: Fields | None = None,
    ) -> str:
        """Send a job."""
        options: Fields = {"headers": dict(meta or {})}
        if policy:
            options["ojs_retry"] = policy
        if state:
            options["headers"]["ojs"] = json.dumps(state)
            options["retries"] = state["attempt"] - 1
        return str(self._fleet.send(task, *steps, **options).id)

    def runs(self, job: str) -> list[Run]:
        """What the worker's process has noted."""
        return [Run(run.at, run.retries, run.ojs) for run in self._fleet.runs(self._result(job))]

    def events(self, job: str) -> list[Told]:
        """What the worker's listener has noted."""
        return [Told(event["type"], event["data"]) for event in self._fleet.events(self._result(job))]

    def _result(self, job: str) -> Any:
        return self._fleet.app.AsyncResult(job)


class OnDramatiq:
    """A Dramatiq fleet: its worker is threads of this process."""

    framework = "dramatiq"
    late = 6.0

    def __init__(self, fleet: dramatiq_fleet.Fleet, store: str | None) -> None:
        self._fleet = fleet
        self.store = store or ""
        self._sent: dict[str, dramatiq_fleet.Sent] = {}
        self.bridge, self.queue = fleet.bridge, fleet.queue
        kept = {"max_attempts": 2, **KEEP}
        self._actors = {
            "act": fleet.actor(_act, name=f"{fleet.queue}.act", ojs_errors=ERRORS),
            "act_kept": fleet.actor(_act, name=f"{fleet.queue}.act_kept", ojs_errors=ERRORS, ojs_retry=kept),
        }

    def send(
        self,
        task: str,
        *steps: str,
        policy: Fields | None = None,
        state: Fields | None = None,
        meta: Fields | None = None,
    ) -> str:
        """Send a job."""
        options = dict(meta or {})
        if policy:
            options["ojs_retry"] = policy
        if state:
            options |= {"ojs": state, "retries": state["attempt"] - 1}
        sent = self._fleet.send(self._actors[task], *steps, **options)
        self._sent[sent.id] = sent
        return sent.id

    def runs(self, job: str) -> list[Run]:
        """What the actor has noted."""
        return [Run(run.at, run.options.get("retries", 0), run.ojs) for run in list(self._sent[job].runs)]

    def events(self, job: str) -> list[Told]:
        """What the listener has heard."""
        return [Told(event.type, dict(event.data)) for event in list(self._fleet.heard.events[job])]


def _act(n: int, *steps: str) -> None:
    step(n, steps)


def end(fleet: Fleet, job: str, *, nth: int = 1, seconds: float = 60) -> Told:
    """Wait until a job has ended for the nth time, and return the event that says how."""

    def ends() -> list[Told]:
        return [event for event in fleet.events(job) if event.type in ENDS]

    try:
        eventually(lambda: len(ends()) >= nth, seconds=seconds)
    except TimeoutError:
        types = [event.type for event in fleet.events(job)]
        raise AssertionError(f"{job} has not ended: {types}, {len(fleet.runs(job))} runs") from None
    return ends()[nth - 1]


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
