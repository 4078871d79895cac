"""Time limits and shutdown, kept away from what becomes of an actor's outcome."""

from __future__ import annotations

import threading
import time
from typing import Any

from dramatiq.broker import Broker
from dramatiq.middleware import Interrupt, ShutdownNotifications, TimeLimit

#: How long a time limit that has struck but not arrived yet is waited for, in seconds.
ARRIVAL_SECONDS = 0.25


def disarm(broker: Broker, exception: BaseException | None) -> None:
    """Have nothing interrupt this thread any more; it has run an actor, which raised `exception`.

    Dramatiq itself disarms after its retries, so that a time limit can strike while one is published.
    """
    struck = False
    for middleware in broker.middleware:
        if isinstance(middleware, TimeLimit):
            struck = struck or _has_struck(middleware.manager)
            middleware.manager.remove_timeout(threading.get_ident())
        elif isinstance(middleware, ShutdownNotifications):
            middleware.manager.remove_notification()
    if struck and not came_of_interrupt(exception):
        _let_arrive()


def came_of_interrupt(exception: BaseException | None) -> bool:
    """Return whether an exception is an interrupt or was raised because of one."""
    for _ in range(20):
        if exception is None or isinstance(exception, Interrupt):
            return exception is not None
        exception = exception.__cause__ or exception.__context__
    return False


def _has_struck(manager: Any) -> bool:
    """Return whether the manager has sent this thread its exception; gevent's sends and arrives at once."""
    deadlines = getattr(manager, "deadlines", None)
    if deadlines is None:
        return False
    with manager.mu:
        return deadlines.get(threading.get_ident(), 0) is None


def _let_arrive() -> None:
    try:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.005)
    except Interrupt:
        return
