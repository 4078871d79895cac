"""The Celery app of a chaos fleet, with the bridge or without."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from celery import Celery, Task
from kombu import Queue

from ojs_bridge.celery import install, ojs_task
from tests.chaos.fates import FATES, FIRST_DELAY, Fate, play
from tests.chaos.ledger import Ledger
from tests.chaos.settings import QUEUE, QUORUM, VARIABLE, Settings

#: Seconds after which Redis delivers again what a dead worker had; kombu's other settings here let it look
#: every second, and soon again when a worker was killed while it looked (300 s without).
VISIBILITY_TIMEOUT = 6


def make_app(settings: Settings) -> Celery:
    """Build the app; with a store its tasks are under the bridge, without one they retry as Celery does."""
    app = Celery("chaos", broker=settings.broker, set_as_current=False)
    redis = {
        "visibility_timeout": VISIBILITY_TIMEOUT,
        "unacked_mutex_expire": 3,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    app.conf.update(
        broker_connection_max_retries=None,
        broker_heartbeat=settings.heartbeat or 120,
        broker_connection_retry_on_startup=True,
        task_acks_late=True,
        task_default_queue=QUEUE,
        task_ignore_result=True,
        worker_enable_remote_control=False,
    )
    if settings.hasty:
        app.conf.update(
            broker_transport_options=redis if settings.on_redis else {"confirm_publish": True},
            task_queues=[Queue(QUEUE, queue_arguments=None if settings.on_redis else QUORUM)],
            worker_prefetch_multiplier=2,
        )
    ledger = Ledger(settings.ledger)
    if settings.store is not None:
        install(app, settings.bridge(ledger), policies={})
    for fate in FATES.values():
        _define(app, fate, ledger, bridged=settings.store is not None)
    return app


def _define(app: Celery, fate: Fate, ledger: Ledger, *, bridged: bool) -> None:
    def run(self: Task, job: str) -> None:
        play(ledger, job, self.request.retries + 1, _victims)

    options: dict[str, Any] = {"name": fate.name, "bind": True, "shared": False}
    if bridged:
        ojs_task(app, retry=fate.policy, **options)(run)
    else:
        app.task(
            autoretry_for=(Exception,),
            default_retry_delay=FIRST_DELAY,
            max_retries=fate.max_attempts - 1,
            reject_on_worker_lost=True,
            **options,
        )(run)


def _victims(number: int) -> Iterable[int]:
    """Return the victims of a poison: every other one kills the worker's main process, too."""
    return (os.getppid(), os.getpid()) if number % 2 else (os.getpid(),)


if VARIABLE in os.environ:
    app = make_app(Settings.from_env())
    app.set_current()
