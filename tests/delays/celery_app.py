"""The Celery app of a fleet whose jobs are delayed; a job is acknowledged after its run."""

from __future__ import annotations

import os

from celery import Celery, Task

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from tests.chaos.ledger import Ledger
from tests.delays.settings import QUEUE, TASK, VARIABLE, Settings


def make_app(settings: Settings, bridge: Bridge | None = None) -> Celery:
    """Build the app, with the bridge if it has a store."""
    app = Celery("delays", broker=settings.broker, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_transport_options={} if settings.visibility is None else _short(settings.visibility),
        task_acks_late=True,
        task_default_queue=QUEUE,
        task_ignore_result=True,
    )
    ledger = Ledger(settings.ledger)

    def mark(self: Task, job: str, retry_in: float | None = None) -> None:
        """Note this run; the first one asks for another one, if told so."""
        attempt = self.request.retries + 1
        if retry_in is not None and attempt == 1:
            ledger.note("failed", job, attempt)
            raise self.retry(countdown=retry_in)
        ledger.note("start", job, attempt)

    app.task(name=TASK, bind=True, max_retries=1, default_retry_delay=1, shared=False)(mark)
    if settings.store is not None:
        install(app, bridge or settings.bridge())
    return app


def _short(visibility: int) -> dict[str, int]:
    """Return a short visibility timeout; kombu looks every 100 s by default, as fits one of an hour."""
    looks = {"unacked_restore_interval": 1, "unacked_restore_throttle": 1}
    return {"visibility_timeout": visibility, **looks}


if VARIABLE in os.environ:
    app = make_app(Settings.from_env())
    app.set_current()
