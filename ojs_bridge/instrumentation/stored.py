"""The gauges of what a store knows, for Prometheus; `ojs-bridge serve` shows them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, TypeAlias

from ..bridge import Bridge
from ..errors import StoreError
from ..operations.health import Check
from ..spec.job import parse_time

#: The gauges: what they say, and their labels.
GAUGES: dict[str, tuple[str, tuple[str, ...]]] = {
    "ojs_store_up": ("Whether the store answers", ()),
    "ojs_workers_seen": ("Worker processes that told the store lately that they live", ()),
    "ojs_retries_parked": ("Retries that wait in the store", ()),
    "ojs_retry_overdue_seconds": ("For how long the oldest parked retry is due", ()),
    "ojs_dead_letter_total": ("Dead letters by job type", ("type",)),
    "ojs_queue_depth": ("Dead letters by queue", ("queue", "state")),
}
Samples: TypeAlias = list[tuple[str, tuple[str, ...], float]]


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


def _samples(bridge: Bridge) -> Samples:
    checks = bridge.operations.health.check().checks
    up = checks["store"].status == "ok"
    found: Samples = [("ojs_store_up", (), float(up))]
    if not up:
        return found
    try:
        stats, parked = bridge.dead_letters.stats(), bridge.retries.count()
    except StoreError:
        return [("ojs_store_up", (), 0.0)]
    found += [
        ("ojs_workers_seen", (), _fact(checks, "workers", "seen") or 0),
        ("ojs_retries_parked", (), parked),
        ("ojs_retry_overdue_seconds", (), _overdue(checks, bridge.engine.now())),
    ]
    found += [("ojs_dead_letter_total", (type_,), count) for type_, count in stats.by_type.items()]
    return found + [
        ("ojs_queue_depth", (queue, "discarded"), count) for queue, count in stats.by_queue.items()
    ]


def _fact(checks: Mapping[str, Check], name: str, fact: str) -> Any:
    return checks[name].facts.get(fact)


def _overdue(checks: Mapping[str, Check], now: datetime) -> float:
    due = _fact(checks, "retries", "oldest_due_at")
    return max((now - parse_time(due)).total_seconds(), 0) if due else 0
