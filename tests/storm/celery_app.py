"""The Celery app of a storm; natively it retries as a user writes it, with an exponential backoff."""

from __future__ import annotations

import os
from typing import Any

import requests
from celery import Celery, Task

from ojs_bridge import Jitter
from ojs_bridge.celery import install
from tests.chaos.ledger import Ledger
from tests.storm.settings import TASK, VARIABLE, Settings

QUEUE = "storm-celery"


def make_app(settings: Settings) -> Celery:
    """Build the app."""
    app = Celery("storm", broker=settings.broker, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        task_acks_late=True,
        task_default_queue=QUEUE,
        task_ignore_result=True,
    )
    is_native = settings.side == "native"
    ledger = Ledger(settings.ledger)

    def call(self: Task, job: str) -> None:
        """Call the dependency; note the last failure of a native job."""
        try:
            requests.get(f"{settings.url}/{job}", timeout=10).raise_for_status()
        except requests.RequestException:
            if is_native and self.request.retries + 1 == settings.attempts:
                ledger.note("dead", job, settings.attempts)
            raise

    native: dict[str, Any] = {
        "autoretry_for": (requests.RequestException,),
        "max_retries": settings.attempts - 1,
        "retry_backoff": True,
        "retry_backoff_max": settings.longest,
    }
    app.task(name=TASK, bind=True, shared=False, **(native if is_native else {}))(call)
    if not is_native:
        install(app, settings.bridge(Jitter(0, 1)))
    return app


if VARIABLE in os.environ:
    app = make_app(Settings.from_env())
    app.set_current()
