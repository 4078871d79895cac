"""The context that the engine and the operations of one bridge share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from ..errors import ConfigurationError
from ..store import Store
from .events import Dispatcher, Event
from .instruments import Instruments
from .redaction import Redactor
from .runs import DeadQueues, Publisher
from .storage_retry import StorageRetry


@dataclass(frozen=True, slots=True)
class Context:
    """The store, the clock, the listeners and the adapters' publishers of one bridge.

    A job's header carries `history` errors in `budget` bytes. `publishers` and `dead_queues` are by
    framework: an adapter adds its own when it is given the bridge.
    """

    store: Store | None
    clock: Callable[[], datetime]
    history: int
    budget: int
    storage_retry: StorageRetry
    events: Dispatcher
    redactor: Redactor
    instruments: Instruments = field(default_factory=Instruments)
    publishers: dict[str, Publisher] = field(default_factory=dict)
    dead_queues: dict[str, DeadQueues] = field(default_factory=dict)

    def store_for(self, what: str) -> Store:
        """Return the store; raises ConfigurationError if there is none, naming what needs it."""
        if self.store is None:
            raise ConfigurationError(
                f"{what} need a store: Bridge(store='sqlite:///ojs.db'), or OJS_BRIDGE_STORE"
            )
        return self.store

    def surely(self) -> datetime:
        """Return a time that has surely come: this machine's, or that of the store if it is earlier.

        What is deleted by its age is deleted by this time: one clock that is ahead must not empty a fleet's
        store. Raises StoreError.
        """
        return min(self.clock(), self.store_for("this time").clock())

    def emit(self, event: Event) -> None:
        """Tell instruments of an event, and queue it for the listeners; never raises."""
        if self.instruments.all:
            self.instruments.heard(event)
        if self.events.listeners:
            self.events.emit([event])
