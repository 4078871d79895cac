"""Prometheus: the metrics of the Open Job Spec in Prometheus' names, counted and served by the workers."""

from __future__ import annotations

import functools
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import prometheus_client as prometheus
    from prometheus_client.multiprocess import MultiProcessCollector
except ImportError as error:
    raise ImportError("Prometheus' client is missing: pip install 'ojs-bridge[prometheus]'") from error

from ..bridge import Bridge
from ..engine.heartbeat import has_ended
from ..engine.instruments import Instrument
from ..engine.runs import Refuse, Run
from ..engine.threads import keep_going
from ..errors import ConfigurationError
from ..rules.decision import Decision
from .metrics import METRICS, Measured, Metric, of_end, of_event, of_sending, of_start

logger = logging.getLogger("ojs_bridge")

PORT, FOLDER = "OJS_BRIDGE_METRICS_PORT", "PROMETHEUS_MULTIPROC_DIR"
#: The seconds after which a process looks again whether the port has become free.
_AGAIN = 5.0


def instrument(bridge: Bridge, port: int | str | None = None) -> None:
    """Count a bridge's jobs; its workers serve the counts at a port, `9191` or `0.0.0.0:9191`.

    Without a port OJS_BRIDGE_METRICS_PORT counts, and without both nothing is served. Where a worker has
    several processes, PROMETHEUS_MULTIPROC_DIR names a folder in which they add up; it must be set before
    Python starts. Raises ConfigurationError for a port that is none.
    """
    if folder := os.environ.get(FOLDER):
        Path(folder).mkdir(parents=True, exist_ok=True)
    address = _address(os.environ.get(PORT) if port is None else port)
    bridge.engine.instrument(_Prometheus(bridge, _Server(*address) if address else None))


def name_of(metric: Metric) -> str:
    """Return the name of a metric as Prometheus shows it."""
    name = metric.name.replace(".", "_").removesuffix("_total")
    return f"{name}_seconds" if metric.buckets else f"{name}_total"


class _Meters:
    """The metrics of this process; several bridges share them, as Prometheus knows a name once."""

    def __init__(self) -> None:
        self._of = {metric: _made(metric) for metric in METRICS}
        self.busy = prometheus.Gauge("ojs_workers_busy", "Jobs that run now", multiprocess_mode="livesum")
        self.active = prometheus.Gauge(
            "ojs_workers_active", "Processes that work", multiprocess_mode="livesum"
        )

    def add(self, measured: Iterable[Measured]) -> None:
        """Add what was measured."""
        for metric, value, labels in measured:
            made = self._of[metric].labels(*labels) if labels else self._of[metric]
            made.observe(value) if metric.buckets else made.inc(value)


_meters = functools.cache(_Meters)


def _made(metric: Metric) -> Any:
    name = name_of(metric)
    if metric.buckets:
        return prometheus.Histogram(name, metric.description, metric.labels, buckets=metric.buckets)
    return prometheus.Counter(name, metric.description, metric.labels)


class _Prometheus(Instrument):
    """Counts in the threads that run and send jobs."""

    def __init__(self, bridge: Bridge, server: _Server | None) -> None:
        self._bridge, self._server, self._meters = bridge, server, _meters()

    def started(self) -> None:
        """Serve what the worker's processes have counted."""
        self._meters.active.set(1)
        if self._server is not None:
            self._server.start()

    def stopped(self) -> None:
        """Free the port for the worker after this one."""
        self._meters.active.set(0)
        if self._server is not None:
            self._server.stop()

    @contextmanager
    def sending(self, framework: str, type_: str, queue: str, carrier: Any) -> Iterator[None]:  # noqa: ARG002
        """Count a job that is sent."""
        began = time.monotonic()
        yield
        self._meters.add(of_sending(type_, queue, time.monotonic() - began))

    @contextmanager
    def running(self, framework: str, run: Run, carrier: Any) -> Iterator[None]:  # noqa: ARG002
        """Count a run among those that run now."""
        self._meters.add(of_start(run.job, self._bridge.engine.now()))
        with self._meters.busy.track_inprogress():
            yield

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Count a run that has ended."""
        self._meters.add(of_end(run, decision, seconds))

    def heard(self, event: Any) -> None:
        """Count what an operator or retention did."""
        self._meters.add(of_event(event))


class _Server:
    """Serves at a port, in the first process that asks for it; when that ends, another one takes over."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._stops = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to serve, once."""
        if self._thread is None:
            if FOLDER not in os.environ:
                logger.warning(
                    "metrics: only those of this process are served; "
                    "where a worker has several, %s names a folder in which they add up", FOLDER,
                )  # fmt: skip
            self._stops.clear()
            self._thread = keep_going("ojs-metrics", self._round)

    def stop(self) -> None:
        """Serve no more."""
        self._stops.set()
        if self._thread is not None:
            self._thread.join(timeout=1)
            self._thread = None

    def _round(self) -> bool:
        try:
            server, _ = prometheus.start_http_server(self._port, self._host, _registry())
        except OSError as taken:
            logger.debug("metrics: port %d is not free: %s", self._port, taken)
            return not self._stops.wait(_AGAIN)
        try:
            logger.info("metrics are served at http://%s:%d/metrics", self._host, self._port)
            self._stops.wait()
        finally:
            server.shutdown()
            server.server_close()
        return False


class _Living:
    """Adds up the metrics of all processes, without the gauges of dead ones."""

    def __init__(self) -> None:
        collector: Any = MultiProcessCollector
        self._all = collector(None)

    def collect(self) -> Any:
        """Collect."""
        for path in Path(os.environ[FOLDER]).glob("gauge_live*.db"):
            process = path.stem.rpartition("_")[2]
            if process.isdecimal() and has_ended(int(process)):
                path.unlink(missing_ok=True)
        return self._all.collect()


def _registry() -> Any:
    if FOLDER not in os.environ:
        return prometheus.REGISTRY
    registry = prometheus.CollectorRegistry()
    registry.register(_Living())
    return registry


def _address(text: int | str | None) -> tuple[str, int] | None:
    if text is None or text == "":
        return None
    host, _, port = str(text).rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigurationError(f"{PORT}: {text!r} is neither a port nor an address with a port")
    return host or "127.0.0.1", int(port)
