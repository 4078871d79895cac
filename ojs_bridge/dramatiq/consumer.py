"""How a delivery leaves the consumer: acknowledged, kept or given back, as the bridge decided."""

from __future__ import annotations

import enum
import logging
import sys
from collections.abc import Iterable
from typing import Any

from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.common import xq_name

logger = logging.getLogger("ojs_bridge")

_MARK = "_ojs_settlement"


class Settlement(enum.Enum):
    """How a message that the bridge has dealt with leaves the consumer."""

    DROP = enum.auto()
    """Acknowledge: nothing of it is needed any more."""
    DEAD = enum.auto()
    """Keep it, with its final state, in the broker's own dead queue."""
    HOLD = enum.auto()
    """Give it back to its queue: what was decided could not be carried out."""


def mark(message: MessageProxy, settlement: Settlement) -> None:
    """Say how a message is to be settled, whatever Dramatiq thinks of it."""
    setattr(message, _MARK, settlement)


class SettlingConsumer(Consumer):
    """A consumer that settles marked messages as marked, and all others as the broker's own does."""

    def __init__(self, inner: Consumer, broker: Broker) -> None:
        self._inner = inner
        self._broker = broker

    def ack(self, message: MessageProxy) -> None:
        """Acknowledge, or settle as marked."""
        self._settle(message, self._inner.ack)

    def nack(self, message: MessageProxy) -> None:
        """Move to the dead queue, or settle as marked."""
        self._settle(message, self._inner.nack)

    def _settle(self, message: MessageProxy, otherwise: Any) -> None:
        match getattr(message, _MARK, None):
            case Settlement.DROP:
                self._inner.ack(message)
            case Settlement.DEAD:
                _bury(self._broker, self._inner, message)
            case Settlement.HOLD:
                _give_back(self._inner, message)
            case _:
                otherwise(message)

    def requeue(self, messages: Iterable[MessageProxy]) -> None:
        """Give prefetched messages back, as the broker's own consumer does."""
        self._inner.requeue(messages)

    def __next__(self) -> MessageProxy | None:
        return next(self._inner)

    def close(self) -> None:
        """Close the broker's own consumer."""
        self._inner.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def wrap(broker: Broker) -> None:
    """Make a broker hand out settling consumers, once."""
    consume = broker.consume
    if getattr(consume, "_ojs_wrapped", False):
        return

    def settling(*args: Any, **kwargs: Any) -> Consumer:
        return SettlingConsumer(consume(*args, **kwargs), broker)

    settling._ojs_wrapped = True  # type: ignore[attr-defined]
    broker.consume = settling  # type: ignore[method-assign]


def _is(broker: Broker, module: str, name: str) -> bool:
    cls = getattr(sys.modules.get(f"dramatiq.brokers.{module}"), name, None)
    return cls is not None and isinstance(broker, cls)


def _bury(broker: Any, inner: Consumer, message: MessageProxy) -> None:
    """Put the message, with its final state, into the broker's dead queue.

    A plain nack moves the bytes as they were enqueued: without the last attempt. It is the fallback.
    """
    try:
        if _is(broker, "redis", "RedisBroker"):
            key = f"{broker.namespace}:{message.queue_name}.msgs"
            broker.client.hset(key, message.options["redis_message_id"], message.encode())
        elif _is(broker, "rabbitmq", "RabbitmqBroker"):
            _publish_dead(broker, message)
            inner.ack(message)
            return
    except Exception:
        logger.exception("job %s: its dead letter has not its final state", message.message_id)
    inner.nack(message)


def _publish_dead(broker: Any, message: MessageProxy) -> None:
    import pika

    broker.declare_queue(message.queue_name, ensure=True)
    channel = broker.connection.channel()
    try:
        channel.confirm_delivery()
        properties = pika.BasicProperties(delivery_mode=2)
        queue = xq_name(message.queue_name)
        channel.basic_publish("", queue, message.encode(), properties, mandatory=True)
    finally:
        if channel.is_open:
            channel.close()


def _give_back(inner: Any, message: Any) -> None:
    if hasattr(message, "_tag"):
        inner.known_tags.discard(message._tag)
        inner.connection.add_callback_threadsafe(lambda: inner.channel.basic_nack(message._tag, requeue=True))
    elif hasattr(inner, "dead_letters"):
        inner.queue.put(message._message.encode())
        inner.ack(message)
    else:
        inner.requeue([message])
        getattr(inner, "queued_message_ids", set()).discard(message.message_id)
