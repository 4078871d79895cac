"""Time limits and shutdown, kept away from what becomes of an actor's outcome."""

from __future__ import annotations

import threading
import time
from typing import Any

from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Interrupt, ShutdownNotifications, TimeLimit

#: How long a time limit that has struck but not arrived yet is waited for, in seconds.
ARRIVAL_SECONDS = 0.25


class Interrupts:
    """What may interrupt the actors of a broker: its time limits and shutdown notifications."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        limits = [m for m in broker.middleware if isinstance(m, TimeLimit)]
        shutdowns = [m for m in broker.middleware if isinstance(m, ShutdownNotifications)]
        self._arming: list[TimeLimit | ShutdownNotifications] = [*limits, *shutdowns]
        self._limits = [m.manager for m in limits]
        self._shutdowns = [m.manager for m in shutdowns]

    def arm(self, message: MessageProxy) -> None:
        """Have this thread, which was disarmed, interrupted as if its message had come just now."""
        for middleware in self._arming:
            middleware.before_process_message(self._broker, message)

    def disarm(self, exception: BaseException | None) -> None:
        """Have nothing interrupt this thread any more; if it has run an actor, that raised `exception`.

        Dramatiq itself disarms after its retries, so that a time limit can strike while one is published.
        """
        thread = threading.get_ident()
        struck = False
        for limit in self._limits:
            struck = struck or _has_struck(limit, thread)
            limit.remove_timeout(thread)
        for shutdown in self._shutdowns:
            shutdown.remove_notification()
        if struck and not came_of_interrupt(exception):
            _let_arrive()


def came_of_interrupt(exception: BaseException | None) -> bool:
    """Return whether an exception is an interrupt or was raised because of one."""
    for _ in range(20):
        if exception is None or isinstance(exception, Interrupt):
            return exception is not None
        exception = exception.__cause__ or exception.__context__
    return False


def _has_struck(manager: Any, thread: int) -> bool:
    """Return whether the manager has sent this thread its exception; gevent's sends and arrives at once."""
    deadlines = getattr(manager, "deadlines", None)
    return deadlines is not None and deadlines.get(thread, 0) is None


def _let_arrive() -> None:
    try:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.005)
    except Interrupt:
        return
