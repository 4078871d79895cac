"""The app of three workers that all get each broadcast."""

from __future__ import annotations

import os

from celery import Celery, Task
from kombu.common import Broadcast

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from tests.contract.notes import client

name = os.environ["APP_NAME"]
app = Celery(name, broker=os.environ["APP_BROKER"], set_as_current=True)
app.conf.update(
    task_queues=[Broadcast(name)],
    task_routes={"told": {"queue": name, "exchange": name, "routing_key": "celery"}},
    task_acks_late=True,
    worker_prefetch_multiplier=4,
    broker_connection_retry_on_startup=True,
)


@app.task(name="told", bind=True, autoretry_for=(OSError,), max_retries=1, default_retry_delay=0.2)
def told(self: Task, seconds: float) -> None:
    """Note the run, and fail at the first."""
    notes = client(os.environ["APP_NOTES"])
    notes.rpush(f"{name}:runs", f"{self.request.hostname} {self.request.retries}")
    if self.request.retries == 0 and seconds:
        raise OSError


install(app, Bridge(os.environ["APP_STORE"]), policies={"*": {"max_attempts": 5}})
