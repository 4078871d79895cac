"""The Celery app that is measured: the framework's defaults, but that a job is acknowledged after its run."""

from __future__ import annotations

from celery import Celery
from kombu import Queue

from benchmarks.side import Counts, Side
from benchmarks.work import call_the_other_side
from ojs_bridge.celery import install

side = Side.from_env()
counts = Counts(side.counts)

app = Celery("bench", broker=side.broker)
app.conf.update(
    broker_connection_retry_on_startup=True,
    task_acks_late=True,
    task_ignore_result=True,
    task_queues=[Queue(name) for name in side.queue_names],
)


@app.task(name="succeeds")
def succeeds() -> None:
    """Do nothing."""
    counts.note()


native_retries = {
    "autoretry_for": (ValueError,),
    "max_retries": side.runs - 1,
    "retry_backoff": 1,
    "retry_backoff_max": 1,
    "retry_jitter": False,
}


@app.task(name="fails", **({} if side.bridged else native_retries))
def fails() -> None:
    """Fail, every time."""
    counts.note()
    call_the_other_side()


if side.bridged:
    policy = {
        "max_attempts": side.runs, "initial_interval": "PT1S", "backoff_strategy": "none", "jitter": False,
    }  # fmt: skip
    install(app, side.bridge(), policies={"*": policy})
