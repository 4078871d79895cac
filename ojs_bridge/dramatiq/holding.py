"""A worker thread keeps a delivery that cannot be begun or ended yet, and nothing interrupts it meanwhile.

RabbitMQ counts what goes back to its queue, and drops what it delivered too often where a queue has a limit.
So a thread waits in its place and tries again, and prefetch bounds what the worker holds.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Interrupt, ShutdownNotifications, TimeLimit

from ..engine.waiting import Outage
from .compat import end_limit, end_notification, has_struck, worker_threads
from .delivery import delivery_of

#: How long a delivery from RabbitMQ is held at most, in seconds: half of what RabbitMQ itself allows (its
#: `consumer_timeout`) before it closes the channel and delivers again all that was delivered there.
HELD_AT_MOST = 900.0

#: How long a time limit that has struck but not arrived yet is waited for, in seconds.
ARRIVAL_SECONDS = 0.25


def is_old(message: MessageProxy) -> bool:
    """Return whether a delivery was held for as long as it may be."""
    since = delivery_of(message).received
    return since is not None and time.monotonic() - since > HELD_AT_MOST


class GiveUp(Exception):
    """A delivery goes back to its queue unbegun, because its worker shuts down."""


class Holding:
    """The deliveries that the threads of one broker's workers keep until they can go on."""

    def __init__(self) -> None:
        self._beginning = Outage(
            "jobs cannot begin, the worker keeps those it has and takes no more", "jobs can begin again"
        )
        self._ending = Outage(
            "what became of jobs can be neither published nor stored, the worker keeps them",
            "what became of jobs can be published or stored again",
        )
        self._interrupts: Interrupts | None = None
        self._stopping: list[Any] = []

    def boot(self, broker: Broker) -> None:
        """Take note of what interrupts this broker's actors."""
        self._interrupts = Interrupts(broker)

    def stop(self, worker: Any) -> None:
        """Take note that a worker shuts down: its threads wait no more."""
        self._stopping.append(worker)

    def stopped(self, worker: Any) -> None:
        """Take note that a worker has shut down."""
        self._stopping.remove(worker)

    @property
    def is_stopping(self) -> bool:
        """Whether some worker shuts down."""
        return bool(self._stopping)

    def stops(self) -> bool:
        """Return whether this thread's worker shuts down."""
        return any(threading.current_thread() in worker_threads(worker) for worker in self._stopping)

    def disarm(self, exception: BaseException | None) -> None:
        """Have nothing interrupt this thread; its actor, if it ran, raised `exception`."""
        if self._interrupts:
            self._interrupts.disarm(exception)

    def keep_unbegun(self, error: Exception) -> bool:
        """Wait before a delivery is begun once more; False when this thread's worker shuts down."""
        self.disarm(None)
        return self._beginning.wait(error, self.stops)

    def begins(self, message: MessageProxy) -> None:
        """Have a job interrupted as if it had not waited before it begins."""
        self._beginning.over()
        if self._interrupts:
            self._interrupts.arm(message)

    def keep_unended(self, error: Exception) -> bool:
        """Wait before a decision is carried out once more; False when this thread's worker shuts down."""
        return self._ending.wait(error, self.stops)

    def ends(self) -> None:
        """Take note that a decision could be carried out after all."""
        self._ending.over()


class Interrupts:
    """The interrupts of a broker's actors: time limits and shutdown notifications."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        limits = [m for m in broker.middleware if isinstance(m, TimeLimit)]
        shutdowns = [m for m in broker.middleware if isinstance(m, ShutdownNotifications)]
        self._arming: list[TimeLimit | ShutdownNotifications] = [*limits, *shutdowns]
        self._limits, self._shutdowns = limits, shutdowns

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
            struck = struck or has_struck(limit, thread)
            end_limit(limit, thread)
        for shutdown in self._shutdowns:
            end_notification(shutdown)
        if struck and not came_of_interrupt(exception):
            _let_arrive()


def came_of_interrupt(exception: BaseException | None) -> bool:
    """Return whether an exception is an interrupt or was raised because of one."""
    for _ in range(20):
        if exception is None or isinstance(exception, Interrupt):
            return exception is not None
        exception = exception.__cause__ or exception.__context__
    return False


def _let_arrive() -> None:
    try:
        deadline = time.monotonic() + ARRIVAL_SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.005)
    except Interrupt:
        return
