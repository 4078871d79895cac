"""The metrics of a bridge's jobs for OpenTelemetry."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation

from ..engine.forks import BetweenForks
from .measuring import DURATION, ENQUEUE_DURATION, ENQUEUED, METRICS, Measured, Metric

#: The most sets of labels that are kept.
_KINDS = 1024
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
#: OpenTelemetry's own metrics, by those of the Open Job Spec that say the same.
_OTELS = {
    ENQUEUED: Metric("messaging.client.sent.messages", "Messages that were sent"),
    ENQUEUE_DURATION: Metric("messaging.client.operation.duration", "Time to send", buckets=_SECONDS),
    DURATION: Metric("messaging.process.duration", "Time of a run", buckets=_SECONDS),
}


class Meters:
    """Counts, and measures seconds.

    A count costs a job no more than an addition: the SDK asks for the sums when it exports them.
    """

    def __init__(
        self, meter: metrics.Meter, system: Callable[[], str], *, is_otel: bool = False, both: bool = False
    ) -> None:
        self._system = system
        self._add: dict[Metric, list[Callable[[float, tuple[str, ...], str | None], None]]] = {}
        #: The runs of this process.
        self.busy: dict[int, None] = {}
        for metric in METRICS:
            otels = _OTELS.get(metric)
            both_or_own = both or not (is_otel and otels)
            self._add[metric] = [self._adder(meter, metric, _labels_of(metric))] if both_or_own else []
            if otels and (is_otel or both):
                self._add[metric].append(self._adder(meter, otels, self._otels_labels))
        meter.create_observable_gauge("ojs.workers.active", [_always], description="Processes that run jobs")
        meter.create_observable_gauge("ojs.workers.busy", [self._busy], description="Jobs that run now")

    def add(self, found: Iterable[Measured], error: str | None = None) -> None:
        """Add what was measured; `error` is the type of a run's failure."""
        for metric, value, labels in found:
            for add in self._add[metric]:
                add(value, labels, error)

    def _adder(
        self, meter: metrics.Meter, metric: Metric, named: Callable[..., dict[str, str]]
    ) -> Callable[[float, tuple[str, ...], str | None], None]:
        if not metric.buckets:
            return _Counter(meter, metric, named).add
        histogram = meter.create_histogram(
            metric.name, "s", metric.told, explicit_bucket_boundaries_advisory=metric.buckets
        )
        return lambda value, labels, error: histogram.record(value, named(labels, error))

    def _otels_labels(self, labels: tuple[str, ...], error: str | None) -> dict[str, str]:
        operation = "process" if len(labels) == len(DURATION.labels) else "send"
        told = {"messaging.operation.name": operation, "messaging.destination.name": labels[0]}
        told["messaging.system"] = self._system()
        return {**told, "error.type": error} if error else told

    def _busy(self, _: CallbackOptions) -> Iterable[Observation]:
        return [Observation(len(self.busy))]


class _Counter:
    """Sums, by their labels. A forked child begins with none."""

    def __init__(self, meter: metrics.Meter, metric: Metric, named: Callable[..., dict[str, str]]) -> None:
        self._sums: dict[tuple[str, ...], float] = {}
        self._named = named
        self._forks = BetweenForks()
        self._pid = os.getpid()
        meter.create_observable_counter(metric.name, [self._observe], description=metric.told)

    def add(self, value: float, labels: tuple[str, ...], _error: str | None) -> None:
        with self._forks.lock:
            self._forget_parent()
            self._sums[labels] = self._sums.get(labels, 0) + value

    def _forget_parent(self) -> None:
        if self._pid != os.getpid():
            self._pid, self._sums = os.getpid(), {}

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        with self._forks.lock:
            self._forget_parent()
            sums = tuple(self._sums.items())
        return [Observation(value, self._named(labels, None)) for labels, value in sums]


def _always(_: CallbackOptions) -> Iterable[Observation]:
    return [Observation(1)]


def _labels_of(metric: Metric) -> Callable[..., dict[str, str]]:
    names = metric.labels

    @functools.lru_cache(_KINDS)
    def named(labels: tuple[str, ...], _error: Any) -> dict[str, str]:
        return dict(zip(names, labels, strict=True))

    return named
