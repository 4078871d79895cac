"""Settings under which a promise is not kept, each said in one line when a worker starts."""

from __future__ import annotations

import logging

from celery import Celery

from ..bridge import Bridge
from ..errors import ConfigurationError
from .attach import is_bridged
from .sending import visibility_timeout

logger = logging.getLogger("ojs_bridge")

#: How many tasks a line names.
NAMED = 5


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
