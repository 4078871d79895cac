"""The broker of a fleet: its kind, its outages, what weakens a promise, and what RabbitMQ alone needs."""

from __future__ import annotations

import logging
import socket
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import dramatiq
from dramatiq import Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.common import dq_name, xq_name
from dramatiq.errors import ConnectionClosed, ConnectionFailed

from ..adapters.private_names import numbers_of
from ..bridge import Bridge
from ..engine.runs import Backlog
from ..rules.job import Job
from . import compat
from .compat import ids_of, messages_of, parameters
from .translate import bare_job, encodable, job_of

logger = logging.getLogger("ojs_bridge")

#: How long RabbitMQ waits for an acknowledgement, unless its `consumer_timeout` says otherwise.
PATIENCE = timedelta(minutes=30)
#: RabbitMQ's answers: there is no such queue; a declaration is not allowed, or its arguments are not.
NOT_FOUND, _REFUSALS = 404, (403, 405, 406, 540)
#: Whether Dramatiq publishes to RabbitMQ with the `mandatory` flag.
_MISSES_QUEUES = numbers_of(dramatiq.__version__) >= (2, 2)


def is_redis(broker: Broker) -> bool:
    """Return whether this is Dramatiq's RedisBroker."""
    return is_broker(broker, "redis", "RedisBroker")


def is_broker(broker: Broker, module: str, name: str) -> bool:
    """Return whether a broker is of this class of Dramatiq's; the module need not be importable."""
    cls = getattr(sys.modules.get(f"dramatiq.brokers.{module}"), name, None)
    return cls is not None and isinstance(broker, cls)


def is_rabbitmq(broker: Broker) -> bool:
    """Return whether this is Dramatiq's RabbitmqBroker."""
    return is_broker(broker, "rabbitmq", "RabbitmqBroker")


def is_known(broker: Broker) -> bool:
    """Return whether this is a broker of Dramatiq's own; others promise less."""
    return is_redis(broker) or is_rabbitmq(broker) or is_broker(broker, "stub", "StubBroker")


def backlog(broker: Any, queues: Sequence[str]) -> Sequence[Backlog] | None:
    """Return the backlog of queues; None for a broker of another kind. Raises any error."""
    if is_redis(broker):
        address = broker.client.connection_pool.connection_kwargs
        if "host" in address:
            # The client tries a refused connection again, for longer than a probe waits.
            socket.create_connection((address["host"], address.get("port", 6379)), timeout=2.0).close()
        broker.client.ping()
        return [_redis_backlog(broker, queue) for queue in queues]
    if is_rabbitmq(broker):
        from pika import BlockingConnection

        connection = BlockingConnection(parameters(broker))
        try:
            return [Backlog(queue, depth_of(connection, queue)) for queue in queues]
        finally:
            connection.close()
    return None


def _redis_backlog(broker: Any, queue: str) -> Backlog:
    ids = ids_of(broker, queue)
    depth, oldest = broker.client.llen(ids), broker.client.lindex(ids, 0)
    held = broker.client.hget(messages_of(broker, queue), oldest) if oldest else None
    try:
        message = Message.decode(held) if held else None
        job = job_of(message, bare_job(message)) if message else None
    except Exception:  # noqa: BLE001 - another encoder's message has no age here
        job = None
    return Backlog(queue, depth, job.due_at if isinstance(job, Job) else None)


def depth_of(connection: Any, queue: str) -> int:
    """Return the number of messages in a queue, 0 where there is no such queue."""
    from pika.exceptions import ChannelClosedByBroker

    try:
        with connection.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)
    except ChannelClosedByBroker as error:
        if error.reply_code != NOT_FOUND:
            raise
        return 0


def outages() -> tuple[type[Exception], ...]:
    """Return the errors of a broker that cannot be reached, or takes no more."""
    errors = (ConnectionClosed, ConnectionFailed, OSError, *redis_outages())
    if "dramatiq.brokers.rabbitmq" not in sys.modules:
        return errors
    from pika.exceptions import AMQPError

    return (*errors, AMQPError)


def error_in_words(error: Exception) -> str:
    """Return the class and the text of an error, which the newest redis-py leaves out of its `repr`."""
    return f"{type(error).__name__}: {error}"


def redis_errors() -> tuple[type[Exception], ...]:
    """Return the errors of Redis, such as a refusal to write without replicas."""
    if "dramatiq.brokers.redis" not in sys.modules:
        return ()
    from redis import RedisError

    return (RedisError,)


def redis_outages() -> tuple[type[Exception], ...]:
    """Return the errors of a Redis outage; Dramatiq does not take all of them for an outage."""
    if "dramatiq.brokers.redis" not in sys.modules:
        return ()
    from redis import exceptions as e

    return (e.ConnectionError, e.TimeoutError, e.OutOfMemoryError, e.ReadOnlyError, e.ClusterDownError)


def say_caveats(broker: Broker, bridge: Bridge) -> None:
    """Warn of every setting that weakens a promise."""
    for caveat in _caveats(broker, bridge):
        logger.warning("%s", caveat)


def _caveats(broker: Any, bridge: Bridge) -> Iterator[str]:
    if not is_known(broker):
        yield (
            f"{type(broker).__name__} is no broker of Dramatiq's own: it does not say that a message comes "
            "again. A copy that comes when its job has ended is a new job, a job whose worker was killed "
            "comes back when the broker gives it out again, and the bridge cannot look for its dead letters"
        )
    longest = bridge.settings.park_after
    if is_rabbitmq(broker) and bridge.store and longest >= PATIENCE:
        yield (
            f"park_after is {longest}: RabbitMQ takes a delayed job back from its worker after its "
            f"consumer_timeout, {PATIENCE} by default, again and again; let park_after be shorter"
        )
    if is_redis(broker):
        yield from _redis_caveats(broker)


def _redis_caveats(broker: Any) -> Iterator[str]:
    settings = _settings_of(broker)
    policy = settings.get("maxmemory-policy", "noeviction")
    if settings.get("maxmemory", "0") != "0" and policy != "noeviction":
        yield f"the broker's Redis may evict jobs: set maxmemory-policy noeviction, not {policy}"
    if settings.get("appendonly") == "no" and settings.get("save") == "":
        yield "the broker's Redis keeps no job over a restart: set appendonly yes"


def _settings_of(broker: Any) -> dict[str, str]:
    """Return the server's settings; none if CONFIG is not allowed, or the server does not answer."""
    settings: dict[str, str] = {}
    for name in ("maxmemory", "maxmemory-policy", "appendonly", "save"):
        try:
            settings |= broker.client.config_get(name)
        except Exception:  # noqa: BLE001 - a caveat that cannot be found out stops no worker
            return {}
    return settings


def confirm(broker: Any) -> None:
    """Make RabbitMQ confirm what this thread publishes: else a lost message looks like one that was sent."""
    if is_rabbitmq(broker) and not compat.confirm_delivery(broker):
        compat.confirm_delivery.set(broker, value=True)
        # The next channel confirms.
        compat.channel.delete(broker)


def have_queue(broker: Any, queue_name: str) -> None:
    """Make the next publication declare a queue that is gone: before 2.2 Dramatiq does not notice that."""
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
    """Make a broker declare only the dead queues that are missing; others may have other arguments."""
    if not (is_rabbitmq(broker) and hasattr(broker, compat.declare_dead_queue.name)):
        return
    from pika.exceptions import ChannelClosedByBroker

    declare = compat.declare_dead_queue(broker)

    def declare_missing(queue_name: str) -> Any:
        try:
            return compat.channel(broker).queue_declare(xq_name(queue_name), passive=True)
        except ChannelClosedByBroker as error:
            if error.reply_code != NOT_FOUND:
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
