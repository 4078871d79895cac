"""The gauges of what a store knows, for Prometheus; `ojs-bridge serve` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, TypeAlias

from ..bridge import Bridge
from ..errors import StoreError
from ..operations.health import Check
from ..rules.job import parse_time

#: The gauges: what they say, and their labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ojs_store_up": ("Whether the store answers", ()),
    "ojs_broker_up": ("Whether a framework's broker answers", ("framework",)),
    "ojs_workers_seen": ("Worker processes that told the store lately that they live", ()),
    "ojs_queue_workers": ("Those that take jobs of a queue; 0 where all have died", ("framework", "queue")),
    "ojs_host_workers": ("Those of a host; 0 where all have died", ("framework", "host")),
    "ojs_queue_backlog": ("Jobs in a queue of the broker that no worker has", ("framework", "queue")),
    "ojs_queue_oldest_seconds": (
        "For how long the oldest of them is due; only Redis knows it",
        ("framework", "queue"),
    ),
    "ojs_retries_parked": ("Retries that wait in the store", ()),
    "ojs_retry_overdue_seconds": ("For how long the oldest parked retry is due", ()),
    "ojs_dead_letter_total": ("Dead letters by job type", ("type",)),
    "ojs_dead_letter_fullness": (
        "Dead letters as a share of their max_count; * are the queues without one of their own",
        ("queue",),
    ),
    "ojs_dead_letter_overflow": ("Dead letters that max_count has deleted in the last day", ()),
    "ojs_queue_depth": ("Dead letters by queue", ("queue", "state")),
}
Sample: TypeAlias = tuple[str, tuple[str, ...], float]


def text(bridge: Bridge) -> bytes:
    """Return the gauges in Prometheus' text form; raises ImportError without Prometheus' client."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest
        from prometheus_client.core import GaugeMetricFamily
    except ImportError as error:
        raise ImportError("Prometheus' client is missing: pip install 'ojs-bridge[prometheus]'") from error

    class Stored:
        def collect(self) -> Iterator[Any]:
            found = {
                name: GaugeMetricFamily(name, told, labels=names) for name, (told, names) in GAUGES.items()
            }
            for name, labels, value in _samples(bridge):
                found[name].add_metric(labels, value)
            yield from (family for family in found.values() if family.samples)

    registry = CollectorRegistry()
    registry.register(Stored())
    found: bytes = generate_latest(registry)
    return found


def _samples(bridge: Bridge) -> list[Sample]:
    checks, now = bridge.health.check().checks, bridge.engine.now()
    found = [*_of_brokers(checks, now)]
    if checks["store"].status != "ok":
        return [("ojs_store_up", (), 0.0), *found]
    try:
        stats, parked = bridge.dead_letters.stats(), bridge.retries.count()
    except StoreError:
        return [("ojs_store_up", (), 0.0), *found]
    found += [
        ("ojs_store_up", (), 1.0),
        ("ojs_workers_seen", (), _fact(checks, "workers", "seen") or 0),
        ("ojs_retries_parked", (), parked),
        ("ojs_retry_overdue_seconds", (), _overdue(checks, now)),
    ]
    for place in ("queue", "host"):
        rows = _fact(checks, "workers", f"{place}s") or ()
        found += [(f"ojs_{place}_workers", (row["framework"], row[place]), row["seen"]) for row in rows]
    found += [("ojs_dead_letter_overflow", (), stats.retention["overflow"])]
    fullness = stats.retention["fullness"].items()
    found += [("ojs_dead_letter_fullness", (queue,), share) for queue, share in fullness]
    found += [("ojs_dead_letter_total", (type_,), count) for type_, count in stats.by_type.items()]
    return found + [
        ("ojs_queue_depth", (queue, "discarded"), count) for queue, count in stats.by_queue.items()
    ]


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


def _overdue(checks: Mapping[str, Check], now: datetime) -> float:
    due = _fact(checks, "retries", "oldest_due_at")
    return max((now - parse_time(due)).total_seconds(), 0) if due else 0
