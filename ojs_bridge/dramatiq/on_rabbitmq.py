"""RabbitMQ alone: publications are confirmed, queues exist, and dead letters have their final state."""

from __future__ import annotations

import logging
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.common import xq_name

from ..engine.private_names import numbers_of
from . import compat
from .brokers import is_rabbitmq
from .translate import bare_job, encodable

logger = logging.getLogger("ojs_bridge")

#: Whether Dramatiq publishes to RabbitMQ with the `mandatory` flag.
_MISSES_QUEUES = numbers_of(dramatiq.__version__) >= (2, 2)


def confirm(broker: Any) -> None:
    """Have RabbitMQ confirm what this thread publishes: else a lost message looks like one that was sent."""
    if is_rabbitmq(broker) and not compat.confirm_delivery(broker):
        compat.confirm_delivery.set(broker, value=True)
        # The next channel confirms.
        compat.channel.delete(broker)


def have_queue(broker: Any, queue_name: str) -> None:
    """Have the next publication declare its queue: before 2.2 Dramatiq does not notice that it is gone."""
    if not _MISSES_QUEUES and is_rabbitmq(broker):
        compat.queues_pending(broker).add(queue_name)


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
    """Publish a message with its final state to its dead queue; return whether that worked."""
    for last in (False, True):
        try:
            _publish_dead(broker, message)
        except Exception:
            # RabbitMQ closes a connection that idled for a while; the next try has a new connection.
            compat.connection.delete(broker)
            compat.queues_pending(broker).add(message.queue_name)
            if last:
                logger.exception("job %s: its dead letter lacks its final state", bare_job(message))
        else:
            return True
    return False


def _publish_dead(broker: Any, message: MessageProxy) -> None:
    import pika

    confirm(broker)
    broker.declare_queue(message.queue_name, ensure=True)
    queue = xq_name(message.queue_name)
    properties = pika.BasicProperties(delivery_mode=2)
    compat.channel(broker).basic_publish("", queue, encodable(message).encode(), properties, mandatory=True)
