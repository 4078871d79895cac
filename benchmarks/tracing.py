"""The bridge of a side; on the side "traced" OpenTelemetry's SDK samples one run in a hundred."""

from __future__ import annotations

from ojs_bridge import Bridge, PartialPolicy


def bridge_of(side: str, store: str | None, retry: PartialPolicy | None = None) -> Bridge:
    """Make the bridge of a side."""
    bridge = Bridge(store if side in ("reserved", "traced") else None, retry)
    if side == "traced":
        _trace(bridge)
    return bridge


def _trace(bridge: Bridge) -> None:
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    from ojs_bridge.instrumentation.opentelemetry import instrument

    traces = TracerProvider(sampler=ParentBased(TraceIdRatioBased(0.01)))
    traces.add_span_processor(BatchSpanProcessor(InMemorySpanExporter()))
    instrument(bridge, traces, MeterProvider([InMemoryMetricReader()]))
