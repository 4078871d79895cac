"""RabbitMQ alone: publications are confirmed, queues exist, and dead letters have their final state."""

from __future__ import annotations

import logging
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.common import dq_name, xq_name
from dramatiq.errors import ConnectionClosed

from ..engine.private_names import numbers_of
from . import compat
from .brokers import is_rabbitmq
from .translate import bare_job, encodable

logger = logging.getLogger("ojs_bridge")

#: Whether Dramatiq publishes to RabbitMQ with the `mandatory` flag.
#: RabbitMQ's answers: there is no such queue; a declaration is not allowed, or its arguments are not.
_NOT_FOUND, _REFUSALS = 404, (403, 405, 406, 540)
_MISSES_QUEUES = numbers_of(dramatiq.__version__) >= (2, 2)


def confirm(broker: Any) -> None:
    """Have RabbitMQ confirm what this thread publishes: else a lost message looks like one that was sent."""
    if is_rabbitmq(broker) and not compat.confirm_delivery(broker):
        compat.confirm_delivery.set(broker, value=True)
        # The next channel confirms.
        compat.channel.delete(broker)


def have_queue(broker: Any, queue_name: str) -> None:
    """Have the next publication declare a queue that is gone: before 2.2 Dramatiq does not notice that."""
    if _MISSES_QUEUES or not is_rabbitmq(broker):
        return
    from pika.exceptions import AMQPError

    try:
        for name in (queue_name, dq_name(queue_name)):
            compat.channel(broker).queue_declare(name, passive=True)
    except AMQPError:
        compat.connection.delete(broker)
        compat.queues_pending(broker).add(queue_name)


def is_refusal(error: Exception) -> bool:
    """Return whether RabbitMQ has refused to declare a queue, which is no outage."""
    cause = error.args[0] if isinstance(error, ConnectionClosed) and error.args else error
    return getattr(cause, "reply_code", None) in _REFUSALS


def use_dead_queues_as_they_are(broker: Any) -> None:
    """Have a broker declare only the dead queues that are missing; others may have other arguments."""
    if not (is_rabbitmq(broker) and hasattr(broker, compat.declare_dead_queue.name)):
        return
    from pika.exceptions import ChannelClosedByBroker

    declare = compat.declare_dead_queue(broker)

    def declare_missing(queue_name: str) -> Any:
        try:
            return compat.channel(broker).queue_declare(xq_name(queue_name), passive=True)
        except ChannelClosedByBroker as error:
            if error.reply_code != _NOT_FOUND:
                raise
            compat.channel.delete(broker)
            return declare(queue_name)

    compat.declare_dead_queue.set(broker, declare_missing)


def give_back(inner: Any, message: MessageProxy) -> None:
    """Give a message back on the channel that delivered it, unless that was done."""
    tag, known = compat.tag(message), compat.known_tags(inner)
    if tag in known:
        known.discard(tag)
        channel = compat.consumer_channel(inner)
        compat.consumer_connection(inner).add_callback_threadsafe(
            lambda: channel.basic_nack(tag, requeue=True)
        )


def published_dead(broker: Any, message: MessageProxy) -> bool:
    """Publish a message with its final state to its dead queue; return whether that worked.

    Raises ConnectionClosed if there is no dead queue, and none can be declared: the message stays.
    """
    for last in (False, True):
        try:
            _publish_dead(broker, message, declares=last)
        except Exception as error:
            # RabbitMQ closes a connection that idled for a while; the next try has a new connection.
            compat.connection.delete(broker)
            if last and is_refusal(error):
                raise ConnectionClosed(error) from error
            if last:
                logger.exception("job %s: its dead letter lacks its final state", bare_job(message))
        else:
            return True
    return False


def _publish_dead(broker: Any, message: MessageProxy, *, declares: bool) -> None:
    import pika

    confirm(broker)
    if declares and hasattr(broker, compat.declare_dead_queue.name):
        compat.declare_dead_queue(broker)(message.queue_name)
    queue = xq_name(message.queue_name)
    properties = pika.BasicProperties(delivery_mode=2)
    compat.channel(broker).basic_publish("", queue, encodable(message).encode(), properties, mandatory=True)
