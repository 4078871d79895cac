"""What a worker that is measured is told: one environment variable carries it to all its processes."""

from __future__ import annotations

import json
import mmap
import os
import struct
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from ojs_bridge import Bridge, PartialPolicy

VARIABLE = "OJS_BENCH"
#: The processes that can count runs: one has its place by its id, and a worker has few.
PLACES = 1024


@dataclass(frozen=True)
class Side:
    """One side of a row: a framework, alone or with the bridge, with which servers and which jobs.

    `broker` and `store` are URLs; without a `broker` Dramatiq has its queues in memory. A job `fails` every
    time, in four runs, or does nothing. `width` is Dramatiq's threads, or Celery's children.
    """

    framework: str
    width: int
    counts: str
    broker: str | None = None
    store: str | None = None
    bridged: bool = False
    traced: bool = False
    fails: bool = False
    queues: int = 1

    @property
    def runs(self) -> int:
        """The runs of a job."""
        return 4 if self.fails else 1

    @property
    def queue_names(self) -> list[str]:
        """The names of the queues."""
        return [f"work{n}" for n in range(self.queues)]

    def to_env(self) -> dict[str, str]:
        """Return the variable that carries it."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_env(cls) -> Side:
        """Read it."""
        return cls(**json.loads(os.environ[VARIABLE]))

    def bridge(self, retry: PartialPolicy | None = None) -> Bridge:
        """Make the bridge."""
        bridge = Bridge(self.store, retry)
        if self.traced:
            _trace(bridge)
        return bridge


class Counts:
    """The runs that have begun, of all processes of a worker, in a file that they share."""

    def __init__(self, path: str) -> None:
        with Path(path).open("r+b") as file:
            self._places = mmap.mmap(file.fileno(), PLACES * 8)
        self._lock = threading.Lock()
        self._pid, self._runs = 0, 0

    @staticmethod
    def create(path: Path) -> None:
        """Make the file."""
        path.write_bytes(bytes(PLACES * 8))

    def total(self) -> int:
        """Return the runs of all processes."""
        return sum(struct.unpack(f"{PLACES}Q", self._places[:]))

    def note(self) -> None:
        """Count a run of this process."""
        with self._lock:
            if not self._pid:
                self._pid = os.getpid()
            self._runs += 1
            struct.pack_into("Q", self._places, self._pid % PLACES * 8, self._runs)


def _trace(bridge: Bridge) -> None:
    """Have OpenTelemetry's SDK sample one run in a hundred."""
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
