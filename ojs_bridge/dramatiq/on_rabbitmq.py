"""RabbitMQ alone: publications are confirmed, their queues exist, and dead letters have their final state."""

from __future__ import annotations

import logging
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.common import xq_name

from . import compat
from .brokers import is_rabbitmq
from .translate import encodable

logger = logging.getLogger("ojs_bridge")

#: Whether Dramatiq publishes to RabbitMQ with the `mandatory` flag.
_MISSES_QUEUES = tuple(int(part) for part in dramatiq.__version__.split(".")[:2]) >= (2, 2)


def confirm(broker: Any) -> None:
    """Have RabbitMQ confirm what this thread publishes; without, a lost message looks like a sent one."""
    if is_rabbitmq(broker):
        compat.confirm(broker)


def have_queue(broker: Any, queue_name: str) -> None:
    """Have the next publication declare its queue where Dramatiq, before 2.2, would not miss it."""
    if not _MISSES_QUEUES and is_rabbitmq(broker):
        compat.declare_later(broker, queue_name)


def published_dead(broker: Any, message: MessageProxy) -> bool:
    """Publish a message with its final state to its dead queue; False, and a log line, if that fails."""
    for last in (False, True):
        try:
            _publish_dead(broker, message)
        except Exception:
            # A publisher's connection that idled for a while is closed; the next one is new.
            compat.drop_connection(broker)
            compat.declare_later(broker, message.queue_name)
            if last:
                logger.exception("job %s: its dead letter lacks its final state", message.message_id)
        else:
            return True
    return False


def _publish_dead(broker: Any, message: MessageProxy) -> None:
    import pika

    confirm(broker)
    broker.declare_queue(message.queue_name, ensure=True)
    queue = xq_name(message.queue_name)
    properties = pika.BasicProperties(delivery_mode=2)
    compat.channel_of(broker).basic_publish(
        "", queue, encodable(message).encode(), properties, mandatory=True
    )
