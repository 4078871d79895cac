"""The Celery app of the shop."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery
from kombu import Queue

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.instrumentation import prometheus
from tests.night.settings import CELERY, WORKER, Settings, work


def make_app(settings: Settings, bridge: Bridge) -> Celery:
    """Build the app."""
    app = Celery("night", broker=settings.broker, set_as_current=False)
    app.conf.update(
        broker_connection_max_retries=None,
        broker_connection_retry_on_startup=True,
        broker_transport_options={"socket_timeout": 5, "socket_connect_timeout": 2},
        task_acks_late=True,
        task_queues=[Queue(queue) for queue in CELERY.values()],
        task_default_queue="billing",
        task_routes={type_: {"queue": queue} for type_, queue in CELERY.items()},
        task_ignore_result=True,
        worker_prefetch_multiplier=2,
    )
    install(app, bridge)
    for type_ in CELERY:
        _define(app, settings, type_)
    return app


def _define(app: Celery, settings: Settings, type_: str) -> None:
    def run(job: str, order: dict[str, Any]) -> None:
        work(settings, type_, job, order)

    app.task(name=type_, shared=False)(run)


if WORKER in os.environ:
    _settings = Settings.from_env()
    _bridge = _settings.bridge()
    prometheus.instrument(_bridge)
    app = make_app(_settings, _bridge)
    app.set_current()
