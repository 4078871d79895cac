"""The agenda of a test, and the methods that the worker of each framework has."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from datetime import datetime
from typing import Any, Protocol, TypeAlias

from .bridging import Clock

Handler: TypeAlias = Callable[..., Any]


class Agenda:
    """What is to be done at a time of a clock, in the order of the times."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._entries: list[tuple[datetime, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def at(self, due: datetime, do: Callable[[], object]) -> None:
        """Do something at a time."""
        heapq.heappush(self._entries, (due, next(self._numbers), do))

    def next_due(self) -> datetime | None:
        """Return the time of the first entry."""
        return self._entries[0][0] if self._entries else None

    def do_next(self) -> bool:
        """Do the first of what is due; False if nothing is."""
        if not self._entries or self._entries[0][0] > self.clock():
            return False
        heapq.heappop(self._entries)[2]()
        return True


class VirtualWorker(Protocol):
    """The worker of one framework, which takes the messages of an app or broker from memory."""

    framework: str

    def deliver(self) -> bool:
        """Deliver the next message that waits; False if none does. Raises WorkerDied."""

    def replace(self) -> None:
        """Have the broker deliver the message of the dead worker again, unless it was acknowledged."""

    def put_in(self, name: str, make: Callable[[Handler], Handler]) -> None:
        """Put a function in the place of a task's own, made of it; raises LookupError."""


def instance_of(error: BaseException | type[BaseException]) -> BaseException:
    """Return an exception, or one of a class, which may need arguments."""
    if not isinstance(error, type):
        return error
    try:
        return error()
    except TypeError:
        return error.__new__(error)
