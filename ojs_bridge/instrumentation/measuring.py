"""The metrics of the Open Job Spec, and what they are made of, for every exporter."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TypeAlias

from ..engine.events import Event
from ..engine.runs import Refuse, Run
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.job import Job

_BY_JOB = ("queue", "type")


# Metrics are keys: each job looks some up, and the hash of an equal value would cost more than all else.
@dataclass(frozen=True, eq=False)
class Metric:
    """A counter, or a histogram of seconds if it has buckets."""

    name: str
    told: str
    labels: tuple[str, ...] = _BY_JOB
    buckets: tuple[float, ...] = ()


_LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_WAITS = (0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 300, 600, 1800, 3600)

ENQUEUED = Metric("ojs.job.enqueued", "Jobs that this process has sent")
ENQUEUE_DURATION = Metric("ojs.job.enqueue_duration", "Time to send a job", buckets=_LONG)
DURATION = Metric(
    "ojs.job.duration", "Time of a run, until its outcome has a place", (*_BY_JOB, "state"), _LONG
)
QUEUE_TIME = Metric("ojs.job.queue_time", "Time from when a job was sent or due to its run", buckets=_WAITS)
PRUNED = Metric("ojs.dead_letter.pruned_total", "Dead letters that retention or an operator has deleted", ())
CANCELLED = Metric("ojs.job.cancelled", "Parked retries that an operator has cancelled")
ADDED = Metric("ojs.dead_letter.added_total", "Jobs that have become dead letters")
REPLAYED = Metric("ojs.dead_letter.retried_total", "Dead letters that were sent back")
COMPLETED = Metric("ojs.job.completed", "Jobs that have succeeded")
FAILED = Metric("ojs.job.failed", "Jobs that have ended without success")
RETRIED = Metric("ojs.job.retried", "Failed attempts that are followed by another one")
_OF_EVENTS = {
    "job.cancelled": CANCELLED,
    "dead_letter.retried": REPLAYED,
    "dead_letter.replayed": REPLAYED,
}
_OF_DECISIONS: dict[type, tuple[Metric, ...]] = {
    Complete: (COMPLETED,),
    RetryAt: (RETRIED,),
    Discarded: (FAILED,),
    DeadLettered: (FAILED, ADDED),
    SnoozeUntil: (),
    GiveBack: (),
}
#: The spec's states of a job, by the decision about its run.
STATES: dict[type, str] = {
    Complete: "completed",
    RetryAt: "retryable",
    Discarded: "discarded",
    DeadLettered: "discarded",
    SnoozeUntil: "scheduled",
    GiveBack: "available",
}
METRICS = (
    *(ENQUEUED, ENQUEUE_DURATION, DURATION, QUEUE_TIME),
    *(COMPLETED, FAILED, RETRIED, CANCELLED, ADDED, REPLAYED, PRUNED),
)

#: A metric, its value, and its labels in their order.
Measured: TypeAlias = tuple[Metric, float, tuple[str, ...]]


def of_sending(type_: str, queue: str, seconds: float) -> Iterator[Measured]:
    """Yield what a job that was sent adds to which metrics."""
    yield ENQUEUED, 1, (queue, type_)
    yield ENQUEUE_DURATION, seconds, (queue, type_)


def of_start(job: Job, now: datetime) -> Iterator[Measured]:
    """Yield what a run that begins adds; when a job was sent is not always known."""
    if (due := job.due_at) is not None:
        yield QUEUE_TIME, max((now - due).total_seconds(), 0), (job.queue, job.type)


def of_end(run: Run | Refuse, decision: Decision, seconds: float) -> Iterator[Measured]:
    """Yield what a decision that was carried out adds."""
    job, kind = run.job, type(decision)
    for metric in _OF_DECISIONS[kind]:
        yield metric, 1, (job.queue, job.type)
    if isinstance(run, Run):
        yield DURATION, seconds, (job.queue, job.type, STATES[kind])


def of_event(event: Event) -> Iterator[Measured]:
    """Yield what an operator's or retention's event adds."""
    if event.type == "dead_letter.pruned":
        yield PRUNED, event.data["count"], ()
    elif metric := _OF_EVENTS.get(event.type):
        yield metric, 1, (event.data["queue"], event.data["job_type"])
