"""A worker thread holds a delivery that cannot be begun or ended yet, and nothing interrupts it meanwhile.

Where a queue of RabbitMQ has a limit, it drops a message that went back too often. So the thread waits and
tries again, and the prefetch bounds how many messages a worker holds.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Interrupt, ShutdownNotifications, TimeLimit

from ..engine.engine import Engine
from ..engine.reservations import Unanswered
from ..engine.storage_retry import Outage
from ..engine.threads import let_through
from ..errors import StoreError
from . import compat
from .delivery import delivery_of

#: How long a delivery from RabbitMQ is held at most, in seconds. It is half of RabbitMQ's own
#: `consumer_timeout`, after which RabbitMQ closes the channel and delivers all of its messages again.
HELD_AT_MOST = 900.0

#: How long a thread waits for a time limit that has struck and not arrived yet, in seconds.
ARRIVAL_SECONDS = 0.25


def is_old(message: MessageProxy) -> bool:
    """Return whether a delivery was held for as long as it may be held."""
    since = delivery_of(message).received
    return since is not None and time.monotonic() - since > HELD_AT_MOST


class GiveUp(Exception):
    """A delivery goes back to its queue unbegun, because its worker shuts down."""


class Holding:
    """Holds deliveries of one broker until they can go on."""

    def __init__(self, outage: Outage) -> None:
        #: Keeps a thread from its delivery, or from a decision that has no place.
        self.outage = outage
        self._limits: list[TimeLimit] = []
        self._shutdowns: list[ShutdownNotifications] = []
        self._stopping: list[Any] = []
        #: Whether some worker shuts down.
        self.is_stopping = False

    def boot(self, broker: Broker) -> None:
        """Find the middleware that interrupts the actors of this broker."""
        self._limits = [m for m in broker.middleware if isinstance(m, TimeLimit)]
        self._shutdowns = [m for m in broker.middleware if isinstance(m, ShutdownNotifications)]

    def stop(self, worker: Any) -> None:
        """End the waits of a worker's threads: it shuts down."""
        self._stopping.append(worker)
        self.is_stopping = True

    def stopped(self, worker: Any) -> None:
        """Forget a worker that has shut down."""
        self._stopping.remove(worker)
        self.is_stopping = bool(self._stopping)

    def stops(self) -> bool:
        """Return whether this thread's worker shuts down."""
        return any(threading.current_thread() in compat.worker_threads(worker) for worker in self._stopping)

    def disarm(self, exception: BaseException | None) -> None:
        """Let nothing interrupt this thread any more; its actor, if it ran, raised `exception`.

        Dramatiq itself disarms later, so that a time limit could strike while a retry is published.
        """
        thread = threading.get_ident()
        struck = False
        for limit in self._limits:
            manager = compat.limit_manager_of(limit)
            deadlines = getattr(manager, compat.deadlines.name, None)
            # A limit that has struck and not arrived yet has no deadline. gevent's arrives as it strikes.
            struck = struck or (deadlines is not None and deadlines.get(thread, 0) is None)
            compat.remove_timeout_of(manager)(thread)
        for shutdown in self._shutdowns:
            compat.remove_notification_of(compat.shutdown_manager_of(shutdown))()
        if struck and not came_of_interrupt(exception):
            _let_arrive()

    def keep_unbegun(self, error: Exception) -> bool:
        """Wait before a delivery is tried again; False if this thread's worker shuts down."""
        self.disarm(None)
        return self.outage.wait(error, self.stops)

    def begins(self, broker: Broker, message: MessageProxy) -> None:
        """Arm the interrupts of this thread as if its message had come just now: a job had to wait."""
        self.outage.over()
        for middleware in (*self._limits, *self._shutdowns):
            middleware.before_process_message(broker, message)

    def keep_unended(self, error: BaseException) -> bool:
        """Wait before a decision is tried again; False if this thread's worker shuts down."""
        return self.outage.wait(error, self.stops)

    def await_answer(self, engine: Engine, run: Any, error: Exception) -> None:
        """Wait until the store says whether a run counts; raises TakenOver if not, or if it stops here."""
        self.disarm(None)
        while self.keep_unended(error):
            try:
                engine.settling.check(run)
            except StoreError as again:
                error = again
            else:
                self.outage.over()
                return
        engine.reservations.expire(run)
        raise Unanswered(run.job) from None


def came_of_interrupt(exception: BaseException | None) -> bool:
    """Return whether an exception is an interrupt or was raised because of one."""
    for _ in range(20):
        if exception is None or isinstance(exception, Interrupt):
            return exception is not None
        cause = exception.__cause__
        exception = exception.__context__ if cause is None else cause
    return False


def _let_arrive() -> None:
    try:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.005)
    except Interrupt:
        return


let_through(lambda error: isinstance(error, Interrupt))
