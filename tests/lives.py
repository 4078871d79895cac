"""A job's life under a bridge without a framework: delivered, failed, carried on in its header, buried."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ojs_bridge import Bridge, Letter
from ojs_bridge.engine.runs import Backlog, Override, Run
from ojs_bridge.rules.decision import DeadLettered, Decision, RetryAt
from ojs_bridge.rules.job import Header, Job, decode
from ojs_bridge.store import Parked, Reservation, to_ms

FRAMEWORK = "outbox"
#: Kept when exhausted.
KEEP = {"on_exhaustion": "dead_letter", "jitter": False}


@dataclass
class Outbox:
    """A publisher that keeps its messages; `raises` stands for a broker that is out of reach."""

    published: list[tuple[Letter, Header]] = field(default_factory=list)
    retried: list[tuple[Parked, dict[str, Any]]] = field(default_factory=list)
    delayed: dict[str, datetime] = field(default_factory=dict)
    raises: BaseException | None = None
    refuses: dict[str, BaseException] = field(default_factory=dict)
    refused: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    oldest_at: datetime | None = None
    strangers: set[str] = field(default_factory=set)
    overrides: list[Override] = field(default_factory=list)

    def knows(self, type_: str) -> bool:
        """Know all job types but some."""
        return type_ not in self.strangers

    def backlog(self, queues: Collection[str]) -> Sequence[Backlog]:
        """Answer, unless the broker is out of reach."""
        if self.raises:
            raise self.raises
        names = sorted({*queues, *self.waiting})
        return [Backlog(name, self.waiting.get(name, 0), self.oldest_at) for name in names]

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Take a dead letter's message."""
        if error := self.refuses.get(letter.id) or self.raises:
            raise error
        self.overrides.append(override)
        self.published.append((letter, header))

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Take a parked retry's message."""
        if error := self.refuses.get(parked.id) or self.raises:
            self.refused += 1
            raise error
        if due is not None:
            self.delayed[parked.id] = due
        self.retried.append((parked, dict(state)))


def bridge_with_outbox(store: str, **options: Any) -> tuple[Bridge, Outbox]:
    """Make a bridge that serves a framework."""
    bridge = Bridge(store, options.pop("retry", KEEP), **options)
    outbox = bridge.engine.context.publishers[FRAMEWORK] = Outbox()
    return bridge, outbox


def delivered(job_id: str, attempt: int = 1, state: str | None = None) -> tuple[Job, Job]:
    """Return the job of a message, and the job as the framework alone describes it."""
    bare = Job(job_id, "billing.charge", "default", attempt, fence=attempt - 1)
    return bare if state is None else decode(state, bare), bare


def attempt(bridge: Bridge, job: Job, raised: BaseException) -> tuple[Job, Run, Decision]:
    """Run a job that fails; return it as it goes on, its run, and the decision."""
    run = bridge.engine.admit(job, job, bridge.engine.task())
    assert isinstance(run, Run)
    decision = bridge.engine.judge(run, raised)
    return bridge.engine.carrying.after(run.job, decision), run, decision


def live_and_die(bridge: Bridge, job_id: str, message: str = "down", *, state: str | None = None) -> str:
    """Have a job fail until it ends, its state travelling from header to header; return the last header.

    The message of each error ends with the attempt.
    """
    job, _bare = delivered(job_id, 1, state)
    last = state or ""
    while True:
        job, run, decision = attempt(bridge, job, ConnectionError(f"{message} {job.attempt}"))
        if isinstance(decision, DeadLettered):
            bridge.engine.storing.bury(run, job, decision, FRAMEWORK, {"args": [job_id]})
        if isinstance(decision, RetryAt):
            last = bridge.engine.storing.header(job).text
        bridge.engine.settling.settle(run, decision)
        if not isinstance(decision, RetryAt):
            return last
        job, _bare = delivered(job_id, job.attempt, last)


def reserve_and_die(bridge: Bridge, job_id: str, *, seconds: float) -> float:
    """Reserve a job for a worker that is dead already, and return when its time ends."""
    store, now = bridge.store, bridge.engine.now()
    assert store is not None
    until = now + timedelta(seconds=seconds)
    mark = f"{to_ms(now)}:0"
    store.reservations.reserve(
        Reservation(job_id, 0), publication="", holder="dead", mark=mark, now=now, until=until
    )
    return until.timestamp()
