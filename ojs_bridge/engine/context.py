"""The context that the engine and the operations of one bridge share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from ..store import Store
from .events import Dispatcher, Event
from .history import History
from .instruments import Instruments
from .ports import DeadQueues, Publisher
from .redaction import Redactor
from .storage_retry import StorageRetry


@dataclass(frozen=True, slots=True)
class Context:
    """The store, the clock, the listeners and the adapters' publishers of one bridge.

    `publishers` and `dead_queues` are by framework: an adapter adds its own when it is given the bridge.
    """

    store: Store | None
    clock: Callable[[], datetime]
    history: History
    storage_retry: StorageRetry
    events: Dispatcher
    redactor: Redactor
    instruments: Instruments = field(default_factory=Instruments)
    publishers: dict[str, Publisher] = field(default_factory=dict)
    dead_queues: dict[str, DeadQueues] = field(default_factory=dict)

    def emit(self, event: Event) -> None:
        """Tell instruments of an event, and queue it for the listeners; never raises."""
        self.instruments.heard(event)
        if self.events.listeners:
            self.events.emit([event])
