"""The start of a worker: it checks the app, its settings and the frameworks, and starts the threads."""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, bootsteps
from celery.apps.worker import Worker

from ..bridge import Bridge
from ..config.settings import fetches_reliably
from ..errors import ConfigurationError
from . import compat
from .attach import attach, is_bridged, policies_of, task_policy
from .canary import check_canary
from .on_redis import take_safely
from .sending import visibility_timeout

logger = logging.getLogger("ojs_bridge")

#: The most tasks that a log line names.
_NAMED = 5


class StartUp(bootsteps.StartStopStep):  # type: ignore[misc]
    """Checks an app when its worker starts, and stops a worker that cannot work; runs the threads."""

    # After the pool, whose processes are better forked before there are threads.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        check_app(worker.app, is_program=isinstance(worker, Worker))
        fit_frameworks(worker.app)

    def start(self, worker: Any) -> None:
        """Begin to publish parked retries."""
        app = worker.app
        attach(app).start("celery", lambda: [*app.amqp.queues.consume_from])

    def stop(self, worker: Any) -> None:
        """End the bridge's threads."""
        attach(worker.app).stop()


def check_app(app: Celery, *, is_program: bool = False) -> None:
    """Raise ConfigurationError for settings that cannot work, and log the promises that others weaken.

    The worker of `celery worker` is a program; that of a test is not.
    """
    policies_of(app).check(app.tasks, f"task of the app {app.main!r}")
    for task in app.tasks.values():
        task_policy(app, task).layers.retries.resolve()
    check_canary(app)
    bridge = attach(app)
    _check_acknowledgements(app)
    _check_visibility(app, bridge)
    bridge.engine.try_store("`<queue>.dead` on the broker", is_program=is_program)


def fit_frameworks(app: Celery) -> None:
    """Check the frameworks' private names, and have the worker take messages from Redis in the bridge's way.

    Raises ConfigurationError for a missing name without which jobs may be lost.
    """
    uses = _uses(app)
    compat.check_names(uses)
    if compat.FETCH in uses:
        take_safely(app)
    elif compat.REDIS in uses:
        logger.warning("reliable_fetch is off: a killed worker may lose a job that Redis has just given it")


def _uses(app: Celery) -> set[str]:
    uses = set()
    if _consumes_from_redis(app):
        uses |= {compat.REDIS, compat.FETCH} if fetches_reliably() else {compat.REDIS}
    if str(app.conf.result_backend or "").startswith(("redis", "sentinel")):
        uses.add(compat.RESULTS)
    return uses


def _consumes_from_redis(app: Celery) -> bool:
    return bool(app.connection_for_read().transport.driver_type == "redis")


def _check_acknowledgements(app: Celery) -> None:
    early = sorted(name for name, task in app.tasks.items() if is_bridged(task) and not task.acks_late)
    if early:
        more = f" and {len(early) - _NAMED} more" if len(early) > _NAMED else ""
        logger.warning(
            "acks_late is off for %s%s: a job whose worker dies is lost, and one whose outcome finds neither "
            "broker nor store",
            ", ".join(early[:_NAMED]),
            more,
        )


def _check_visibility(app: Celery, bridge: Bridge) -> None:
    if not _consumes_from_redis(app):
        return
    seconds = visibility_timeout(app)
    if seconds <= 0:
        raise ConfigurationError(f"visibility_timeout: {seconds!r} must be greater than zero seconds")
    longest = bridge.settings.park_after.total_seconds()
    if bridge.store is not None and seconds < longest:
        logger.warning(
            "visibility_timeout is %g s, less than park_after, %g s: retries wait in Redis for longer than "
            "it lets them, and travel in hops; set park_after below it",
            seconds,
            longest,
        )
