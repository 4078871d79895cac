"""How a worker thread keeps a delivery that cannot be begun or ended yet.

RabbitMQ counts what goes back to its queue, and drops what it delivered too often where a queue has a limit.
So a thread waits in its place and tries again, and prefetch bounds what the worker holds.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from dramatiq.broker import Broker, MessageProxy

from ..engine.waiting import Outage
from .interrupts import Interrupts

#: How long a delivery from RabbitMQ is held at most, in seconds: half of what RabbitMQ itself allows (its
#: `consumer_timeout`) before it closes the channel and delivers again all that was delivered there.
HELD_AT_MOST = 900.0

_RECEIVED = "_ojs_received"


def received(message: MessageProxy) -> None:
    """Take note that RabbitMQ has just delivered a message."""
    message.__dict__[_RECEIVED] = time.monotonic()


def is_old(message: MessageProxy) -> bool:
    """Return whether a delivery was held for as long as it may be."""
    since = message.__dict__.get(_RECEIVED)
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
        return any(threading.current_thread() in worker.workers for worker in self._stopping)

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
