"""The metrics of the Open Job Spec, what they are made of, and the gauges of what a store knows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeAlias

from ..bridge import Bridge
from ..engine.events import Event
from ..engine.runs import Refuse, Run
from ..errors import StoreError
from ..operations.health import Check
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.faults import LIVE
from ..rules.job import Job, parse_time

_BY_JOB = ("queue", "type")


# Metrics are keys: each job looks some up, and the hash of an equal value would cost more than all else.
@dataclass(frozen=True, eq=False)
class Metric:
    """A counter, or a histogram of seconds if it has buckets."""

    name: str
    description: str
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
CANCELLED = Metric("ojs.job.cancelled", "Jobs in the store that an operator has cancelled")
ADDED = Metric("ojs.dead_letter.added_total", "Jobs that have become dead letters")
REPLAYED = Metric("ojs.dead_letter.retried_total", "Dead letters that were sent back")
COMPLETED = Metric("ojs.job.completed", "Jobs that have succeeded")
FAILED = Metric("ojs.job.failed", "Jobs that have ended without success")
RETRIED = Metric("ojs.job.retried", "Failed attempts that are followed by another one")
OPENED = Metric(
    "ojs.breaker.opened", "Openings of a breaker, and probes that have failed since", ("dependency",)
)
_OF_EVENTS = {"job.cancelled": CANCELLED, "dead_letter.retried": REPLAYED, "dead_letter.replayed": REPLAYED}
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
    *(COMPLETED, FAILED, RETRIED, CANCELLED, ADDED, REPLAYED, PRUNED, OPENED),
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
    """Yield what an event adds that is about no run: an operator's, retention's, or a breaker's."""
    if event.type == "dead_letter.pruned":
        yield PRUNED, event.data["count"], ()
    elif event.type == "breaker.opened":
        yield OPENED, 1, (event.data["dependency"],)
    elif metric := _OF_EVENTS.get(event.type):
        yield metric, 1, (event.data["queue"], event.data["job_type"])


#: The gauges: what they say, and their labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ojs_store_up": ("Whether the store answers", ()),
    "ojs_broker_up": ("Whether a framework's broker answers", ("framework",)),
    "ojs_workers_seen": ("Worker processes that wrote to the store lately that they live", ()),
    "ojs_queue_workers": ("Those that take jobs of a queue; 0 where all have died", ("framework", "queue")),
    "ojs_host_workers": ("Those of a host; 0 where all have died", ("framework", "host")),
    "ojs_queue_backlog": ("Jobs in a queue of the broker that no worker has", ("framework", "queue")),
    "ojs_queue_oldest_seconds": (
        "For how long the oldest of them is due; only Redis knows it",
        ("framework", "queue"),
    ),
    "ojs_retries_parked": ("Retries that wait in the store", ()),
    "ojs_retries_in_broker": ("Retries that wait in the broker until they are due", ()),
    "ojs_jobs_scheduled": ("Jobs that their users have delayed, and that wait in the store", ()),
    "ojs_jobs_held": ("Jobs that a hold keeps from their begin, and that wait in the store", ()),
    "ojs_holds": ("Holds that are on, such as pauses", ()),
    "ojs_breaker_open": (
        "Whether the breaker of a dependency is open, also while probes run",
        ("dependency",),
    ),
    "ojs_waiting_overdue_seconds": ("For how long the oldest job in the store is due", ()),
    "ojs_dead_letter_total": ("Dead letters by job type", ("type",)),
    "ojs_dead_letter_fullness": (
        "Dead letters as a share of their max_count; * are the queues without one of their own",
        ("queue",),
    ),
    "ojs_dead_letter_overflow": ("Dead letters that max_count has deleted in the last day", ()),
    "ojs_dead_letter_depth": ("Dead letters by queue", ("queue",)),
    "ojs_groups_live": (
        "Groups of errors of the last hour by their state (new, came_back or growing) and first job type",
        ("state", "type"),
    ),
}
Sample: TypeAlias = tuple[str, tuple[str, ...], float]


def gauges_text(bridge: Bridge) -> bytes:
    """Return a store's gauges in Prometheus' text form; raises ImportError without Prometheus' client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import GaugeMetricFamily
    except ImportError as error:
        raise ImportError("Prometheus' client is missing: pip install 'ojs-bridge[prometheus]'") from error

    class Stored:
        def collect(self) -> Iterator[Any]:
            families = {
                name: GaugeMetricFamily(name, description, labels=names)
                for name, (description, names) in GAUGES.items()
            }
            for name, labels, value in _samples(bridge):
                families[name].add_metric(labels, value)
            yield from (family for family in families.values() if family.samples)

    registry = CollectorRegistry()
    registry.register(Stored())
    return bytes(generate_latest(registry))


def _samples(bridge: Bridge) -> list[Sample]:
    checks, now = bridge.health.check().checks, bridge.engine.now()
    samples = [*_of_brokers(checks, now)]
    if checks["store"].status != "ok":
        return [("ojs_store_up", (), 0.0), *samples]
    try:
        stats = bridge.dead_letters.stats()
        parked, scheduled = bridge.retries.count(), bridge.scheduled.count()
    except StoreError:
        return [("ojs_store_up", (), 0.0), *samples]
    due, short = _fact(checks, "waiting", "oldest_due_at"), _fact(checks, "waiting", "in_broker")
    samples += [
        ("ojs_store_up", (), 1.0),
        ("ojs_workers_seen", (), _fact(checks, "workers", "seen") or 0),
        ("ojs_retries_parked", (), parked),
        ("ojs_retries_in_broker", (), short["count"]),
        ("ojs_jobs_scheduled", (), scheduled),
        ("ojs_jobs_held", (), _fact(checks, "holds", "held")),
        ("ojs_holds", (), _fact(checks, "holds", "on")),
        ("ojs_waiting_overdue_seconds", (), max((now - parse_time(due)).total_seconds(), 0) if due else 0),
    ]
    breakers = (_fact(checks, "holds", "breakers") or {}).items()
    samples += [("ojs_breaker_open", (name,), float(state == "open")) for name, state in breakers]
    for place in ("queue", "host"):
        rows = _fact(checks, "workers", f"{place}s") or ()
        samples += [(f"ojs_{place}_workers", (row["framework"], row[place]), row["seen"]) for row in rows]
    samples += [("ojs_dead_letter_overflow", (), stats.retention["overflow"])]
    fullness = stats.retention["fullness"].items()
    samples += [("ojs_dead_letter_fullness", (queue,), share) for queue, share in fullness]
    samples += [("ojs_dead_letter_total", (type_,), count) for type_, count in stats.by_type.items()]
    live = Counter(
        (group.state, (group.group.types or ("",))[0])
        for group in bridge.now().known.groups
        if group.state in LIVE
    )
    samples += [("ojs_groups_live", labels, count) for labels, count in live.items()]
    return samples + [("ojs_dead_letter_depth", (queue,), count) for queue, count in stats.by_queue.items()]


def _of_brokers(checks: Mapping[str, Check], now: datetime) -> Iterator[Sample]:
    for framework, status in (_fact(checks, "broker", "frameworks") or {}).items():
        if status != "unknown":
            yield "ojs_broker_up", (framework,), float(status == "ok")
    for row in _fact(checks, "backlog", "queues") or ():
        labels = row["framework"], row["queue"]
        yield "ojs_queue_backlog", labels, row["depth"]
        if row["oldest_at"]:
            waited = (now - parse_time(row["oldest_at"])).total_seconds()
            yield "ojs_queue_oldest_seconds", labels, max(waited, 0)


def _fact(checks: Mapping[str, Check], name: str, fact: str) -> Any:
    return checks[name].facts.get(fact)
