"""A worker's start: what is checked, what is said in the log, and what runs beside Celery's own."""

from __future__ import annotations

import logging
from typing import Any

from celery import Celery, bootsteps

from ..bridge import Bridge
from ..errors import ConfigurationError
from .attach import attach, is_bridged, policies_of, task_policy
from .canary import check_canary
from .on_redis import take_safely
from .sending import visibility_timeout

logger = logging.getLogger("ojs_bridge")

#: How many tasks a line names.
NAMED = 5


class StartUp(bootsteps.StartStopStep):  # type: ignore[misc]
    """Checks an app's bridge when its worker starts, which what cannot work stops; runs its threads."""

    # After the pool, whose processes are better forked before there are threads.
    requires = ("celery.worker.components:Pool",)

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        check(worker.app)
        take_safely(worker.app)

    def start(self, worker: Any) -> None:
        """Begin to publish parked retries."""
        attach(worker.app).start()

    def stop(self, worker: Any) -> None:
        """End the bridge's threads."""
        attach(worker.app).stop()


def check(app: Celery) -> None:
    """Raise ConfigurationError for what cannot work, and say in the log what goes without a store."""
    policies_of(app).check(app.tasks, f"task of the app {app.main!r}")
    for task in app.tasks.values():
        task_policy(app, task).retry_on.resolve()
    check_canary(app)
    bridge = attach(app)
    say_caveats(app, bridge)
    bridge.engine.try_store("`<queue>.dead` on the broker")


def say_caveats(app: Celery, bridge: Bridge) -> None:
    """Log what an app's settings take from the promises; raises ConfigurationError for what cannot work."""
    _check_acknowledgements(app)
    _check_visibility(app, bridge)


def _check_acknowledgements(app: Celery) -> None:
    early = sorted(name for name, task in app.tasks.items() if is_bridged(task) and not task.acks_late)
    if early:
        more = f" and {len(early) - NAMED} more" if len(early) > NAMED else ""
        logger.warning(
            "acks_late is off for %s%s: a job whose worker dies is lost, and one whose outcome finds neither "
            "broker nor store",
            ", ".join(early[:NAMED]),
            more,
        )


def _check_visibility(app: Celery, bridge: Bridge) -> None:
    connection = app.connection_for_read()
    if connection.transport.driver_type != "redis":
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
