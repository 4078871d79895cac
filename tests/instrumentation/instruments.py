"""The instruments of a fleet's bridge: what they report is noted for the tests."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import sentry_sdk
import sentry_sdk.envelope
import sentry_sdk.transport
from celery.signals import worker_process_init
from opentelemetry import metrics, trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import (
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
)
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from redis.exceptions import RedisError
from sentry_sdk.integrations.celery import CeleryIntegration
from sentry_sdk.integrations.dramatiq import DramatiqIntegration

from ojs_bridge import Bridge
from ojs_bridge.instrumentation import opentelemetry
from ojs_bridge.instrumentation import prometheus as prometheus_exporter
from ojs_bridge.instrumentation.sentry import instrument as instrument_sentry
from tests.contract.notes import Noting, Settings
from tests.instrumentation.snippets import snippet

#: The environment of a worker whose log raises at times has this variable, with the file that says when.
BROKEN_LOG = "OJS_TEST_BROKEN_LOG"


class Lines(logging.Handler):
    """Notes each line of the log as the formatter of the docs writes it."""

    def __init__(self, noting: Noting) -> None:
        super().__init__()
        self._noting = noting
        self.setFormatter(snippet("json_logs.py")["Json"]())

    def emit(self, record: logging.LogRecord) -> None:
        """Note a line."""
        told: dict[str, Any] = json.loads(self.format(record))
        self._noting.note("lines", told.get("job_id", ""), told)


def logs(bridge: Bridge, settings: Settings) -> None:
    """Note the log."""
    logging.getLogger("ojs_bridge").addHandler(Lines(Noting(settings.backend)))


class Transport(sentry_sdk.transport.Transport):
    """Notes each event that Sentry would be sent, under its job or its queue."""

    def __init__(self, options: dict[str, Any]) -> None:
        super().__init__(options)
        self.noting, self.queue = Noting(""), ""

    def capture_envelope(self, envelope: sentry_sdk.envelope.Envelope) -> None:
        """Note the event of an envelope."""
        event = envelope.get_event()
        if event is not None:
            self.noting.note("sentry", event.get("tags", {}).get("ojs.job_id", self.queue), event)


def sentry(bridge: Bridge, settings: Settings) -> None:
    """Report to a Sentry that notes, in workers: it changes the frameworks for a whole process."""
    if multiprocessing.parent_process() is not None:
        sentry_alone(bridge, settings)
        instrument_sentry(bridge)


def sentry_alone(bridge: Bridge, settings: Settings) -> None:
    """Report as a worker does whose owner has not told Sentry of the bridge."""
    if multiprocessing.parent_process() is None:
        return
    sentry_sdk.init(
        "http://key@localhost/1",
        transport=Transport,
        auto_enabling_integrations=False,
        integrations=[CeleryIntegration(), DramatiqIntegration()],
    )
    transport = sentry_sdk.get_client().transport
    transport.noting, transport.queue = Noting(settings.backend), settings.queue


class Spans(SpanExporter):
    """Notes spans."""

    def __init__(self, settings: Settings) -> None:
        self._noting, self._queue = Noting(settings.backend), settings.queue

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Note spans."""
        for span in spans:
            self._noting.note("spans", self._queue, json.loads(span.to_json()))
        return SpanExportResult.SUCCESS


class Metrics(MetricExporter):
    """Notes metrics."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._noting, self._queue = Noting(settings.backend), settings.queue

    def export(self, metrics_data: MetricsData, timeout_millis: float = 0, **_: Any) -> MetricExportResult:
        """Note metrics."""
        with suppress(RedisError):  # after the test, in the process that sends
            self._noting.note("metrics", f"{self._queue}:{os.getpid()}", json.loads(metrics_data.to_json()))
        return MetricExportResult.SUCCESS

    def force_flush(self, timeout_millis: float = 0) -> bool:
        """Have nothing to flush."""
        return True

    def shutdown(self, timeout_millis: float = 0, **_: Any) -> None:
        """Have nothing to close."""


def otel(bridge: Bridge, settings: Settings) -> None:
    """Note all spans and metrics; a child of Celery's pool sets the SDK up for itself."""

    def providers() -> tuple[TracerProvider, MeterProvider]:
        traces = TracerProvider()
        traces.add_span_processor(SimpleSpanProcessor(Spans(settings)))
        reader = PeriodicExportingMetricReader(Metrics(settings), export_interval_millis=300)
        return traces, MeterProvider([reader])

    def provide(**_: Any) -> None:
        traces, meters = providers()
        trace.set_tracer_provider(traces)
        metrics.set_meter_provider(meters)

    if "tests.on_celery.worker" in sys.modules:
        worker_process_init.connect(provide, weak=False)
        opentelemetry.instrument(bridge)
    else:
        opentelemetry.instrument(bridge, *providers())


def celerys_own(bridge: Bridge, settings: Settings) -> None:
    """Have OpenTelemetry's own instrumentation of Celery note its spans."""
    traces = TracerProvider()
    traces.add_span_processor(SimpleSpanProcessor(Spans(settings)))
    CeleryInstrumentor().instrument(tracer_provider=traces)


def prometheus(bridge: Bridge, settings: Settings) -> None:
    """Count, and serve the counts."""
    prometheus_exporter.instrument(bridge)


def mark_the_span() -> None:
    """Mark the span in which this is called."""
    trace.get_current_span().set_attribute("own", 1)


class BreakingLog(logging.Handler):
    """Raises at each line for as long as a file is there."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = Path(file)

    def emit(self, record: logging.LogRecord) -> None:
        """Raise, perhaps."""
        if self._file.exists():
            raise OSError("no line can be written")


def breaking_log(_bridge: Bridge, _settings: Settings) -> None:
    """Let the log of a worker raise, where its environment names the file that says when."""
    if BROKEN_LOG in os.environ:
        logging.getLogger("ojs_bridge").addHandler(BreakingLog(os.environ[BROKEN_LOG]))
