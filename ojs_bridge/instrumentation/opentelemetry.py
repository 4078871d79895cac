"""OpenTelemetry: a span for each attempt and each sent job, and metrics, as the Open Job Spec names them."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from ..bridge import Bridge
from ..engine.events import Event, worker_id
from ..engine.instruments import Instrument
from ..engine.runs import Refuse, Run
from ..engine.threads import BetweenForks
from ..rules.decision import Complete, Decision
from ..rules.failures import Failure
from ..rules.job import Job
from .metrics import (
    DURATION,
    ENQUEUE_DURATION,
    ENQUEUED,
    METRICS,
    STATES,
    Measured,
    Metric,
    of_end,
    of_event,
    of_sending,
    of_start,
)

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError("OpenTelemetry's API is missing: pip install 'ojs-bridge[otel]'") from error


_STEPS = {"ojs.retry.evaluate": SpanKind.INTERNAL}
_NOTHING = contexts.Context()
#: The most kinds of jobs whose names, attributes and labels are kept.
_KINDS = 1024
_TRACE_CONTEXT = TraceContextTextMapPropagator()
_OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"


def instrument(
    bridge: Bridge,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Make spans and metrics of a bridge's jobs, by the global providers if none are given.

    With OTEL_SEMCONV_STABILITY_OPT_IN=messaging they have OpenTelemetry's names where it has any, with
    `messaging/dup` both. Where opentelemetry-instrumentation-celery is active, its spans get the attributes.
    """
    opted = {word.strip() for word in os.environ.get(_OPT_IN, "").split(",")}
    is_otel, both = "messaging" in opted, "messaging/dup" in opted
    tracer = trace.get_tracer("ojs_bridge", tracer_provider=tracer_provider)
    meter = metrics.get_meter("ojs_bridge", meter_provider=meter_provider)
    names = _Names(bridge, is_otel=is_otel, both=both)
    meters = Meters(meter, names.any_system, is_otel=is_otel, both=both)
    hides = bool(bridge.engine.context.redactor)
    bridge.engine.instrument(_Tracing(tracer, meters, names, bridge, hides=hides))


class _Names:
    """The names of spans and attributes."""

    def __init__(self, bridge: Bridge, *, is_otel: bool, both: bool) -> None:
        self._bridge = bridge
        self._is_otel, self._both = is_otel, both
        self._systems: dict[str, str] = {}
        #: Every job asks for them.
        self.named = functools.lru_cache(_KINDS)(self._named)

    def _named(self, operation: str, type_: str, queue: str, framework: str) -> tuple[str, dict[str, Any]]:
        """Return a span's name, and the attributes that it has from its beginning."""
        otels = "send" if operation == "enqueue" else operation
        kind = "publish" if operation == "enqueue" and not self._is_otel else otels
        attributes: dict[str, Any] = {
            "messaging.system": self.system(framework) if self._is_otel else "ojs",
            "messaging.operation.type": kind,
            "messaging.destination.name": queue,
            "ojs.job.type": type_,
            "ojs.backend.type": self.system(framework),
        }
        if self._is_otel or self._both:
            attributes["messaging.operation.name"] = otels
        return f"{otels} {queue}" if self._is_otel else f"{queue} {operation}", attributes

    def any_system(self) -> str:
        """Return the name of the broker of a process that has one framework."""
        return next(map(self.system, self._bridge.engine.context.publishers), "")

    def system(self, framework: str) -> str:
        """Return the name of the broker of a framework."""
        if framework not in self._systems:
            self._systems[framework] = self._bridge.engine.context.publishers[framework].system
        return self._systems[framework]


class _Running:
    """A run's span: the bridge's own, with its context, or that of another instrumentation.

    With `hides` it has no texts of errors.
    """

    __slots__ = ("_before", "_context", "_hides", "_meters", "_token", "is_recorded", "job", "span", "state")

    def __init__(
        self, meters: Meters, job: Job, span: Span, context: contexts.Context | None = None, *, hides: bool
    ) -> None:
        self._meters, self._context, self._hides = meters, context, hides
        self.job, self.span, self.state = job, span, ""
        self.is_recorded = span.is_recording()

    def __enter__(self) -> None:
        """Make the span the current one."""
        if self._context is not None:
            self._token = contexts.attach(self._context)
        self._before = _running.set(self)
        self._meters.busy[id(self)] = None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End the span."""
        self._meters.busy.pop(id(self), None)
        _running.reset(self._before)
        _last.set(self)
        if self.is_recorded and not self.state and kind is None:
            self.conclude(Complete())
        if self._context is not None:
            contexts.detach(self._token)
            self.span.end()

    def conclude(self, decision: Decision) -> None:
        """Write the outcome of the run into its span, which is recorded."""
        span, self.state = self.span, STATES[type(decision)]
        span.set_attribute("ojs.job.state", self.state)
        failure: Failure | None = getattr(decision, "failure", None)
        if failure is None:
            return
        span.set_attributes({"error.type": failure.type, "ojs.job.error.attempt": self.job.attempt})
        if not self._hides:
            span.set_attribute("error.message", failure.message)
        if self._context is None:
            return
        span.set_status(Status(StatusCode.ERROR, None if self._hides else failure.message))
        if not self._hides:
            event = {"exception.type": failure.type, "exception.message": failure.message}
            span.add_event("exception", {**event, "exception.stacktrace": "\n".join(failure.backtrace)})


_running: ContextVar[_Running | None] = ContextVar("ojs_bridge_running", default=None)
#: The last run of a thread: a success is acknowledged when its span has ended.
_last: ContextVar[_Running | None] = ContextVar("ojs_bridge_last", default=None)


class _Tracing(Instrument):
    """Makes the spans."""

    def __init__(
        self, tracer: trace.Tracer, meters: Meters, names: _Names, bridge: Bridge, *, hides: bool
    ) -> None:
        self._tracer, self._meters, self._names, self._bridge = tracer, meters, names, bridge
        #: Whether the bridge redacts: the text of an error may quote what it hides.
        self._hides = hides

    @contextmanager
    def sending(
        self, framework: str, type_: str, queue: str, carrier: MutableMapping[str, Any]
    ) -> Iterator[None]:
        """Make the span of a job that is sent, and write its context into the message."""
        began, span = time.monotonic(), None
        if not (_is_doubled(framework) or "traceparent" in carrier):
            name, attributes = self._names.named("enqueue", type_, queue, framework)
            span = self._tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)
            propagate.inject(carrier, trace.set_span_in_context(span))
        try:
            yield
        except BaseException as error:
            if span is not None:
                span.set_attribute("error.type", type(error).__qualname__)
                span.set_status(Status(StatusCode.ERROR, None if self._hides else repr(error)))
                if not self._hides:
                    span.record_exception(error)
            raise
        finally:
            if span is not None:
                span.end()
        self._meters.add(of_sending(type_, queue, time.monotonic() - began))

    def running(self, framework: str, run: Run, carrier: Mapping[str, Any]) -> _Running:
        """Return the span of a run, active while its handler runs and its outcome is carried out."""
        job = run.job
        self._meters.add(of_start(job, self._bridge.engine.now()))
        other = trace.get_current_span() if _is_doubled(framework) else None
        if other is not None and other.get_span_context().is_valid:
            running = _Running(self._meters, job, other, hides=self._hides)
        else:
            name, attributes = self._names.named("process", job.type, job.queue, framework)
            # A trace of its own, which is sampled for itself.
            span = self._tracer.start_span(name, _NOTHING, SpanKind.CONSUMER, attributes)
            is_recorded = span.is_recording()
            # Reading costs more than all else here, and most runs have no baggage, and are not sampled.
            came = propagate.extract(carrier) if is_recorded or "baggage" in carrier else _NOTHING
            if is_recorded and (sent := _span_context(came)):
                span.add_link(sent)
            within = trace.set_span_in_context(span, came)
            running = _Running(self._meters, job, span, within, hides=self._hides)
        if running.is_recorded:
            _join(running.span, job)
            breakers = self._bridge.engine.breakers
            if breakers and (dependency := breakers.probed_by(job)):
                running.span.set_attribute("ojs.breaker.probe", dependency)
        return running

    def step(self, name: str, job: Job) -> AbstractContextManager[Any] | None:
        """Make the span of a step after the handler, within that of the run."""
        running = _running.get() or _last.get()
        if running is None or not running.is_recorded or running.job.key != job.key:
            return None
        return self._tracer.start_as_current_span(
            name,
            context=trace.set_span_in_context(running.span),
            kind=_STEPS.get(name, SpanKind.CLIENT),
            attributes={"ojs.job.id": job.id},
            record_exception=not self._hides,
            set_status_on_exception=not self._hides,
        )

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Measure the run, and write the outcome into its span, if it is still there."""
        failure: Failure | None = getattr(decision, "failure", None)
        self._meters.add(of_end(run, decision, seconds), failure.type if failure else None)
        running = _running.get()
        if running is not None and running.is_recorded and running.job.key == run.job.key:
            running.conclude(decision)

    def heard(self, event: Event) -> None:
        """Measure what an operator or retention did."""
        self._meters.add(of_event(event))

    def traceparent(self) -> str | None:
        """Return the context of the span of the run, for the attempt after it."""
        running = _running.get()
        if running is None:
            return None
        carrier: dict[str, str] = {}
        _TRACE_CONTEXT.inject(carrier, trace.set_span_in_context(running.span))
        return carrier.get("traceparent")


def _join(span: Span, job: Job) -> None:
    """Give a span the facts of the job that it is about, and a link to the attempt before."""
    facts = {"ojs.job.id": job.id, "ojs.job.type": job.type, "messaging.message.id": job.id}
    span.set_attributes({**facts, "ojs.worker.id": worker_id(), "ojs.job.state": "active"})
    span.set_attribute("ojs.job.attempt", job.attempt)
    if job.next_retry_at is not None:
        span.set_attribute("ojs.job.scheduled_at", job.next_retry_at.isoformat())
    before = job.errors[-1].get("traceparent") if job.errors else None
    if isinstance(before, str) and (
        earlier := _span_context(_TRACE_CONTEXT.extract({"traceparent": before}))
    ):
        span.add_link(earlier)


def _span_context(context: contexts.Context) -> trace.SpanContext | None:
    within = trace.get_current_span(context).get_span_context()
    return within if within.is_valid else None


def _is_doubled(framework: str) -> bool:
    """Return whether OpenTelemetry's own instrumentation of the framework makes the spans of its jobs."""
    module = sys.modules.get(f"opentelemetry.instrumentation.{framework}")
    instrumentor = getattr(module, f"{framework.title()}Instrumentor", None)
    return instrumentor is not None and bool(instrumentor().is_instrumented_by_opentelemetry)


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
        gauge = meter.create_observable_gauge
        gauge("ojs.workers.active", [lambda _: [Observation(1)]], description="Processes that run jobs")
        busy = self.busy
        gauge("ojs.workers.busy", [lambda _: [Observation(len(busy))]], description="Jobs that run now")

    def add(self, measured: Iterable[Measured], error: str | None = None) -> None:
        """Add what was measured; `error` is the type of a run's failure."""
        for metric, value, labels in measured:
            for add in self._add[metric]:
                add(value, labels, error)

    def _adder(
        self, meter: metrics.Meter, metric: Metric, named: Callable[..., dict[str, str]]
    ) -> Callable[[float, tuple[str, ...], str | None], None]:
        if not metric.buckets:
            return _Counter(meter, metric, named).add
        histogram = meter.create_histogram(
            metric.name, "s", metric.description, explicit_bucket_boundaries_advisory=metric.buckets
        )
        return lambda value, labels, error: histogram.record(value, named(labels, error))

    def _otels_labels(self, labels: tuple[str, ...], error: str | None) -> dict[str, str]:
        operation = "process" if len(labels) == len(DURATION.labels) else "send"
        named = {"messaging.operation.name": operation, "messaging.destination.name": labels[0]}
        named["messaging.system"] = self._system()
        return {**named, "error.type": error} if error else named


class _Counter:
    """Sums, by their labels. A forked child begins with none."""

    def __init__(self, meter: metrics.Meter, metric: Metric, named: Callable[..., dict[str, str]]) -> None:
        self._sums: dict[tuple[str, ...], float] = {}
        self._named = named
        self._forks = BetweenForks()
        self._pid = os.getpid()
        meter.create_observable_counter(metric.name, [self._observe], description=metric.description)

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


def _labels_of(metric: Metric) -> Callable[..., dict[str, str]]:
    names = metric.labels

    @functools.lru_cache(_KINDS)
    def named(labels: tuple[str, ...], _error: Any) -> dict[str, str]:
        return dict(zip(names, labels, strict=True))

    return named
