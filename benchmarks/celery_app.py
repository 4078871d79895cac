"""The Celery app of every side: native, bridged, and with reservations; a queue for each."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from benchmarks.tracing import bridge_of
from benchmarks.work import call_the_other_side
from ojs_bridge.celery import install

SIDE, URL, STORE = os.environ["BENCH_SIDE"], os.environ["BENCH_URL"], os.environ.get("BENCH_STORE")

app = Celery("bench", broker=URL)
app.conf.update(
    task_acks_late=True,
    task_default_queue=SIDE,
    task_ignore_result=True,
    worker_prefetch_multiplier=64,
    broker_connection_retry_on_startup=True,
    worker_hijack_root_logger=False,
)
notes = redis.Redis.from_url(URL)


def cpu_seconds() -> float:
    """Return the CPU seconds that the worker's main process and its children have used, in all threads."""
    main = os.getppid()
    children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
    threads = (path for pid in (main, *children) for path in Path(f"/proc/{pid}/task").iterdir())
    return sum(int((path / "schedstat").read_text().split()[0]) for path in threads) / 1e9


def note(name: str) -> None:
    """Note the time and the CPU time under a name."""
    notes.rpush(f"{SIDE}.{name}", json.dumps([time.time(), cpu_seconds()]))


@app.task(name="mark")
def mark(name: str) -> None:
    """Note the beginning or the end of a slice."""
    note(name)


@app.task(name="bench.succeeds")
def succeeds() -> None:
    """Do nothing."""


class Ends(app.Task):  # type: ignore[misc, name-defined]
    """Counts the jobs that have ended."""

    abstract = True

    def on_failure(self, *args: Any, **kwargs: Any) -> None:
        """Note the end with a slice's last job."""
        if notes.decr(f"{SIDE}.left") == 0:
            note("end")


native_retries = {
    "autoretry_for": (ValueError,),
    "max_retries": 3,
    "retry_backoff": 1,
    "retry_backoff_max": 1,
    "retry_jitter": False,
}


@app.task(name="bench.fails", base=Ends, **(native_retries if SIDE == "native" else {}))
def fails() -> None:
    """Fail, every time."""
    call_the_other_side()


policy = {"max_attempts": 4, "initial_interval": "PT1S", "backoff_strategy": "none", "jitter": False}
if SIDE != "native":
    install(app, bridge_of(SIDE, STORE), policies={"bench.*": policy})
