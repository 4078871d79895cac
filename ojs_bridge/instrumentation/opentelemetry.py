"""OpenTelemetry: a span for each attempt and each sent job, and metrics, as the Open Job Spec names them."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from datetime import datetime
from typing import Any

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.trace import Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError as error:
    raise ImportError("OpenTelemetry's API is missing: pip install 'ojs-bridge[otel]'") from error

from ..bridge import Bridge
from ..engine.engine import Engine
from ..engine.events import Event
from ..engine.instruments import Instrument
from ..engine.runs import Refuse, Run
from ..spec.decision import Complete, Decision
from ..spec.failures import Failure
from ..spec.job import Job
from .measuring import STATES, of_end, of_event, of_sending, of_start
from .opentelemetry_metrics import Meters

_STEPS = {"ojs.retry.evaluate": SpanKind.INTERNAL}
_NOTHING = contexts.Context()
_TRACE_CONTEXT = TraceContextTextMapPropagator()
_OPT_IN = "OTEL_SEMCONV_STABILITY_OPT_IN"


def instrument(
    bridge: Bridge,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> None:
    """Have spans and metrics of a bridge's jobs made, by the global providers if none are given.

    With OTEL_SEMCONV_STABILITY_OPT_IN=messaging they have OpenTelemetry's names where it has any, with
    `messaging/dup` both. Where opentelemetry-instrumentation-celery is active, its spans get the attributes.
    """
    opted = {word.strip() for word in os.environ.get(_OPT_IN, "").split(",")}
    is_otel, both = "messaging" in opted, "messaging/dup" in opted
    tracer = trace.get_tracer("ojs_bridge", tracer_provider=tracer_provider)
    meter = metrics.get_meter("ojs_bridge", meter_provider=meter_provider)
    names = _Names(bridge.engine, is_otel=is_otel, both=both)
    meters = Meters(meter, names.any_system, is_otel=is_otel, both=both)
    bridge.engine.instrument(_Tracing(tracer, meters, names, bridge.engine.now))


class _Names:
    """The names of spans and attributes."""

    def __init__(self, engine: Engine, *, is_otel: bool, both: bool) -> None:
        self._engine = engine
        self._is_otel, self._both = is_otel, both
        self._systems: dict[str, str] = {}
        self._worker: tuple[int, str] = (0, "")

    def span(self, operation: str, queue: str) -> str:
        """Return the name of a span: `mail enqueue`, or OpenTelemetry's `send mail`."""
        if self._is_otel:
            return f"{'send' if operation == 'enqueue' else operation} {queue}"
        return f"{queue} {operation}"

    def attributes(self, operation: str, type_: str, queue: str, framework: str) -> dict[str, Any]:
        """Return the attributes that a span has from its beginning."""
        otels = "send" if operation == "enqueue" else operation
        kind = "publish" if operation == "enqueue" and not self._is_otel else otels
        told: dict[str, Any] = {
            "messaging.system": self.system(framework) if self._is_otel else "ojs",
            "messaging.operation.type": kind,
            "messaging.destination.name": queue,
            "ojs.job.type": type_,
            "ojs.backend.type": self.system(framework),
        }
        if self._is_otel or self._both:
            told["messaging.operation.name"] = otels
        return told

    def any_system(self) -> str:
        """Return the name of the broker of a process that has one framework."""
        return next(map(self.system, self._engine.context.publishers), "")

    def system(self, framework: str) -> str:
        """Return the name of the broker of a framework."""
        if framework not in self._systems:
            self._systems[framework] = self._engine.context.publishers[framework].system
        return self._systems[framework]

    def worker(self) -> str:
        """Return the name of this process, as events have it."""
        if self._worker[0] != os.getpid():
            self._worker = os.getpid(), f"{socket.gethostname()}:{os.getpid()}"
        return self._worker[1]


class _Running:
    """The span of a run: the bridge's own, or that of another instrumentation, and its job."""

    __slots__ = ("is_own", "job", "span", "state")

    def __init__(self, job: Job, span: Span, *, is_own: bool) -> None:
        self.job, self.span, self.is_own, self.state = job, span, is_own, ""

    def conclude(self, decision: Decision) -> None:
        """Write the outcome of the run into its span."""
        span, self.state = self.span, STATES[type(decision)]
        if not span.is_recording():
            return
        span.set_attribute("ojs.job.state", self.state)
        failure: Failure | None = getattr(decision, "failure", None)
        if failure is None:
            return
        told = {"error.type": failure.type, "error.message": failure.message}
        span.set_attributes({**told, "ojs.job.error.attempt": self.job.attempt})
        if self.is_own:
            event = {"exception.type": failure.type, "exception.message": failure.message}
            span.add_event("exception", {**event, "exception.stacktrace": "\n".join(failure.backtrace)})
            span.set_status(Status(StatusCode.ERROR, failure.message))


_running: ContextVar[_Running | None] = ContextVar("ojs_bridge_running", default=None)
#: The last run of a thread: a success is acknowledged when its span has ended.
_last: ContextVar[_Running | None] = ContextVar("ojs_bridge_last", default=None)


class _Tracing(Instrument):
    """Makes the spans."""

    def __init__(
        self, tracer: trace.Tracer, meters: Meters, names: _Names, now: Callable[[], datetime]
    ) -> None:
        self._tracer, self._meters, self._names, self._now = tracer, meters, names, now

    @contextmanager
    def sending(
        self, framework: str, type_: str, queue: str, carrier: MutableMapping[str, Any]
    ) -> Iterator[None]:
        """Make the span of a job that is sent, and write its context into the message."""
        began, span = time.monotonic(), None
        if not (_is_doubled(framework) or "traceparent" in carrier):
            attributes = self._names.attributes("enqueue", type_, queue, framework)
            name = self._names.span("enqueue", queue)
            span = self._tracer.start_span(name, kind=SpanKind.PRODUCER, attributes=attributes)
            propagate.inject(carrier, trace.set_span_in_context(span))
        try:
            yield
        except BaseException as error:
            if span is not None:
                span.record_exception(error)
                span.set_status(Status(StatusCode.ERROR, repr(error)))
            raise
        finally:
            if span is not None:
                span.end()
        self._meters.add(of_sending(type_, queue, time.monotonic() - began))

    @contextmanager
    def running(self, framework: str, run: Run, carrier: Mapping[str, Any]) -> Iterator[None]:
        """Have the span of a run active while its handler runs and its outcome is carried out."""
        job, other = run.job, trace.get_current_span()
        is_own = not (other.get_span_context().is_valid and _is_doubled(framework))
        if is_own:
            span = self._start(job, framework)
            # Reading costs more than all else here, and most runs have no baggage, and are not sampled.
            came = propagate.extract(carrier) if span.is_recording() or "baggage" in carrier else _NOTHING
            token = contexts.attach(trace.set_span_in_context(span, came))
            if span.is_recording() and (sent := _found(came)):
                span.add_link(sent)
        else:
            span = other
        _join(span, job, self._names.worker())
        running = _Running(job, span, is_own=is_own)
        before = _running.set(running)
        self._meters.busy[id(running)] = None
        self._meters.add(of_start(job, self._now()))
        try:
            yield
        finally:
            self._meters.busy.pop(id(running), None)
            _running.reset(before)
            _last.set(running)
            if not running.state and sys.exc_info()[1] is None:
                running.conclude(Complete())
            if is_own:
                contexts.detach(token)
                span.end()

    def _start(self, job: Job, framework: str) -> Span:
        attributes = self._names.attributes("process", job.type, job.queue, framework)
        # A trace of its own, which is sampled for itself.
        return self._tracer.start_span(
            self._names.span("process", job.queue), _NOTHING, SpanKind.CONSUMER, attributes
        )

    def step(self, name: str, job: Job) -> AbstractContextManager[Any]:
        """Make the span of a step after the handler, within that of the run."""
        running = _running.get() or _last.get()
        if (
            running is None
            or running.job.key != job.key
            or not running.span.get_span_context().trace_flags.sampled
        ):
            return nullcontext()
        return self._tracer.start_as_current_span(
            name,
            context=trace.set_span_in_context(running.span),
            kind=_STEPS.get(name, SpanKind.CLIENT),
            attributes={"ojs.job.id": job.id},
        )

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Measure the run, and write the outcome into its span, if it is still there."""
        failure: Failure | None = getattr(decision, "failure", None)
        self._meters.add(of_end(run, decision, seconds), failure.type if failure else None)
        running = _running.get()
        if running is not None and running.job.key == run.job.key:
            running.conclude(decision)

    def heard(self, event: Event) -> None:
        """Measure what an operator or retention did."""
        self._meters.add(of_event(event))

    def traceparent(self) -> str | None:
        """Return the context of the span of the run, for the attempt after it."""
        running = _running.get()
        if running is None:
            return None
        found: dict[str, str] = {}
        _TRACE_CONTEXT.inject(found, trace.set_span_in_context(running.span))
        return found.get("traceparent")


def _join(span: Span, job: Job, worker: str) -> None:
    """Give a span the facts of the job that it is about, and a link to the attempt before."""
    if not span.is_recording():
        return
    told = {"ojs.job.id": job.id, "ojs.job.type": job.type, "messaging.message.id": job.id}
    span.set_attributes({**told, "ojs.worker.id": worker, "ojs.job.state": "active"})
    span.set_attribute("ojs.job.attempt", job.attempt)
    if job.next_retry_at is not None:
        span.set_attribute("ojs.job.scheduled_at", job.next_retry_at.isoformat())
    before = job.errors[-1].get("traceparent") if job.errors else None
    if isinstance(before, str) and (found := _found(_TRACE_CONTEXT.extract({"traceparent": before}))):
        span.add_link(found)


def _found(context: contexts.Context) -> trace.SpanContext | None:
    found = trace.get_current_span(context).get_span_context()
    return found if found.is_valid else None


def _is_doubled(framework: str) -> bool:
    """Return whether OpenTelemetry's own instrumentation of Celery makes the spans of its jobs."""
    if framework != "celery":
        return False
    module = sys.modules.get("opentelemetry.instrumentation.celery")
    return module is not None and bool(module.CeleryInstrumentor().is_instrumented_by_opentelemetry)
