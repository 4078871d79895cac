"""The Celery app of every side: native, bridged, with reservations, and in shadow mode."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from benchmarks.work import call_the_other_side
from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.migration import shadow

SIDE, KIND, URL = os.environ["BENCH_SIDE"], os.environ["BENCH_KIND"], os.environ["BENCH_URL"]
JOBS, STORE = int(os.environ["BENCH_JOBS"]), os.environ.get("BENCH_STORE")

app = Celery("bench", broker=URL)
app.conf.update(
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)
counters = redis.Redis.from_url(URL)


def cpu_seconds() -> float:
    """Return the CPU seconds that this child and its worker's main process have used."""
    ticks = 0
    for pid in (os.getpid(), os.getppid()):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def note(name: str) -> None:
    """Note the time and the CPU time under a name."""
    counters.hset("bench", mapping={f"{name}_wall": time.time(), f"{name}_cpu": cpu_seconds()})


@app.task(name="mark")
def mark(name: str) -> None:
    """Note where the measurement begins or ends."""
    note(name)


@app.task(name="bench.succeeds")
def succeeds() -> None:
    """Do nothing."""


class Ends(app.Task):  # type: ignore[misc, name-defined]
    """Counts the jobs that have ended."""

    abstract = True

    def on_failure(self, *args: Any, **kwargs: Any) -> None:
        """Note the end with the last job."""
        if counters.incr("failed") == JOBS:
            note("end")


native_retries = {
    "autoretry_for": (ValueError,),
    "max_retries": 3,
    "retry_backoff": 1,
    "retry_backoff_max": 1,
    "retry_jitter": False,
}


@app.task(name="bench.fails", base=Ends, **(native_retries if SIDE in ("native", "shadowed") else {}))
def fails() -> None:
    """Fail, every time."""
    call_the_other_side()


policy = {"max_attempts": 4, "initial_interval": "PT1S", "backoff_strategy": "none", "jitter": False}
if SIDE == "shadowed":
    shadow(app, Bridge(STORE), policies={"bench.*": policy})
elif SIDE != "native":
    install(app, Bridge(STORE if SIDE == "reserved" else None), policies={"bench.*": policy})
