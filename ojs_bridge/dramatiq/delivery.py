"""One delivery: the bridge's notes about a message that a broker has handed to this process."""

from __future__ import annotations

import enum
import uuid
from typing import Any

from dramatiq.broker import Consumer, MessageProxy

from .acknowledging import Ending
from .compat import REDIS_ID, is_redelivered, message_in


class Settlement(enum.Enum):
    """The way in which a message that the bridge has dealt with leaves the consumer."""

    DROP = enum.auto()
    """Acknowledge: nothing of it is needed any more."""
    DEAD = enum.auto()
    """Keep it, with its final state, in the broker's own dead queue."""
    HOLD = enum.auto()
    """Give it back to its queue after a while: it was interrupted before it was settled otherwise."""
    UNBEGUN = enum.auto()
    """As HOLD: it runs, and the bridge begins it only if it fails."""
    GIVE_BACK = enum.auto()
    """Give it back to its queue: this worker shuts down."""
    ENDING = enum.auto()
    """Acknowledge it as its `Ending` does."""
    NATIVE = enum.auto()
    """As Dramatiq itself would."""


#: Looked up once, because enumerations are slow and every job comes by here.
NATIVE, HOLD, UNBEGUN = Settlement.NATIVE, Settlement.HOLD, Settlement.UNBEGUN


class Delivery:
    """The notes about one delivery; the attribute `ojs_delivery` of Dramatiq's message leads to them."""

    __slots__ = (
        *("begun", "consumer", "ending", "is_covered", "is_given_back", "is_replaced", "received"),
        "settlement",
    )

    def __init__(self, consumer: Consumer | None = None, received: float | None = None) -> None:
        self.settlement = NATIVE
        #: The bridge's answer to whether it may run; UNBEGUN before the question, None once it is dealt with.
        self.begun: Any = UNBEGUN
        #: What acknowledges it, if it leaves by its own ending.
        self.ending: Ending | None = None
        #: Whether the job is under the bridge; None until the canary was asked.
        self.is_covered: bool | None = None
        #: Whether something took its place on the broker, so that it need not be acknowledged.
        self.is_replaced = False
        #: Whether it went back to its queue, or was about to.
        self.is_given_back = False
        #: On RabbitMQ: the broker's own consumer that received it, and when, on the monotonic clock.
        self.consumer = consumer
        self.received = received

    def settle(self, settlement: Settlement) -> None:
        """Say how it leaves, and that nothing more is to be said about its run."""
        self.settlement, self.begun = settlement, None


#: Asked of every message: a default for all of them is quicker than an attribute that may be missing.
MessageProxy.ojs_delivery = None  # type: ignore[attr-defined]


def delivery_of(message: Any) -> Delivery:
    """Return the notes about a message, which begin here if there are none."""
    found: Delivery | None = message.ojs_delivery
    if found is None:
        found = message.ojs_delivery = Delivery()
    return found


def mark(message: MessageProxy, settlement: Settlement) -> None:
    """Say how a message is to be settled, whatever Dramatiq thinks of it."""
    delivery_of(message).settlement = settlement


def leave_by(message: MessageProxy, ending: Ending) -> None:
    """Say that a message leaves by its own ending."""
    delivery = delivery_of(message)
    delivery.ending, delivery.settlement = ending, Settlement.ENDING


def is_dropped(message: MessageProxy) -> bool:
    """Return whether a message left its broker for good, even if StubBroker shows it to unit tests."""
    return delivery_of(message).settlement is Settlement.DROP


def is_native(message: MessageProxy) -> bool:
    """Return whether Dramatiq itself settles a message."""
    return delivery_of(message).settlement is NATIVE


def publication(message: MessageProxy) -> str:
    """Return what tells one message of a job's first run from another; "" where RabbitMQ cannot tell."""
    if redis_id := message_in(message).options.get(REDIS_ID):
        return str(redis_id)
    return "" if is_redelivered(message) else str(uuid.uuid4())
