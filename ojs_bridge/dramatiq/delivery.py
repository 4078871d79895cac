"""The delivery: the bridge's notes about a message that a broker has handed to this process."""

from __future__ import annotations

import enum
import uuid
from typing import Any

from dramatiq import Message
from dramatiq.broker import Consumer, MessageProxy

from ..engine.instruments import Entered
from .acknowledging import Ending
from .compat import REDIS_ID, message_in, redelivered
from .compat import message as inner


class Exit(enum.Enum):
    """The way in which a message leaves its consumer."""

    DROP = enum.auto()
    """Acknowledge it: it is not needed any more."""
    DEAD = enum.auto()
    """Keep it, with its final state, in the broker's own dead queue."""
    HOLD = enum.auto()
    """Give it back to its queue after a while: something broke in before its end was known."""
    UNBEGUN = enum.auto()
    """As HOLD: its actor runs, and the bridge has not begun it yet."""
    GIVE_BACK = enum.auto()
    """Give it back to its queue: this worker shuts down."""
    ENDING = enum.auto()
    """Acknowledge it as its `Ending` does: its job succeeded."""
    NATIVE = enum.auto()
    """Do with it as Dramatiq itself does."""


#: The attribute of a message that holds the bytes that it came as.
_DELIVERED = "ojs_delivered"

#: Looked up once, because enumerations are slow and every job comes by here.
NATIVE, HOLD, UNBEGUN = Exit.NATIVE, Exit.HOLD, Exit.UNBEGUN


class Delivery:
    """The notes about one delivery; the attribute `ojs_delivery` of Dramatiq's message leads to them."""

    __slots__ = (
        *("begun", "consumer", "ending", "is_given_back", "is_replaced", "received"),
        *("exit", "task", "within"),
    )

    def __init__(self, consumer: Consumer | None = None, received: float | None = None) -> None:
        self.exit = NATIVE
        #: The engine's answer to the delivery: UNBEGUN before it, None if there is no outcome to judge.
        self.begun: Any = UNBEGUN
        #: The end of a job that succeeded.
        self.ending: Ending | None = None
        #: The policy of its actor; None if Dramatiq itself retries it, UNBEGUN before the question.
        self.task: Any = UNBEGUN
        #: The context of the run in which instruments are active.
        self.within: Entered | None = None
        #: Whether another message took its place on the broker, so that it need not be acknowledged.
        self.is_replaced = False
        #: Whether it went back to its queue, or was about to go.
        self.is_given_back = False
        #: On RabbitMQ: the broker's own consumer that received it, and the time, by the monotonic clock.
        self.consumer = consumer
        self.received = received

    def settle(self, exit_: Exit) -> None:
        """Say how it leaves, and that its run has no outcome to be judged."""
        self.exit, self.begun = exit_, None


def keep_what_is_delivered() -> None:
    """Have each message that a worker decodes keep the bytes that it came as.

    An actor may change its arguments in place. To copy them before each run costs more than the run.
    """
    if hasattr(Message.decode, "ojs_keeps"):
        return
    # As the class has it: instrumentation may have wrapped it.
    decode = vars(Message)["decode"]

    def keeping(kind: type[Message[Any]], data: bytes) -> Message[Any]:
        message: Message[Any] = decode.__get__(None, kind)(data)
        # A delayed message is published anew before it runs, and many of them wait in a worker. The options
        # of a foreign message may be anything.
        if not (isinstance(message.options, dict) and "eta" in message.options):
            vars(message)[_DELIVERED] = data
        return message

    keeping.ojs_keeps = True  # type: ignore[attr-defined]
    Message.decode = classmethod(keeping)  # type: ignore[method-assign, assignment]


def restore_arguments(message: MessageProxy) -> None:
    """Give a message the arguments back with which it was delivered."""
    inside = message_in(message)
    data = vars(inside).get(_DELIVERED)
    if data is not None:
        sent = Message.decode(data)
        restored = inside.copy(args=sent.args, kwargs=sent.kwargs)
        vars(restored)[_DELIVERED] = data
        setattr(message, inner.name, restored)


#: Every message is asked for it: a default is quicker than an attribute that may be missing.
MessageProxy.ojs_delivery = None  # type: ignore[attr-defined]


def delivery_of(message: Any) -> Delivery:
    """Return the notes about a message; they begin here if there are none."""
    found: Delivery | None = message.ojs_delivery
    if found is None:
        found = message.ojs_delivery = Delivery()
    return found


def mark(message: MessageProxy, exit_: Exit) -> None:
    """Say how a message leaves its consumer."""
    delivery_of(message).exit = exit_


def is_dropped(message: MessageProxy) -> bool:
    """Return whether a message left its broker for good, though StubBroker still shows it to unit tests."""
    return delivery_of(message).exit is Exit.DROP


def is_native(message: MessageProxy) -> bool:
    """Return whether Dramatiq itself settles a message."""
    return delivery_of(message).exit is NATIVE


def publication(message: MessageProxy) -> str:
    """Return an id that tells a job's messages apart at its first run; "" where RabbitMQ cannot tell."""
    if redis_id := message_in(message).options.get(REDIS_ID):
        return str(redis_id)
    return "" if getattr(message, redelivered.name, None) else str(uuid.uuid4())
