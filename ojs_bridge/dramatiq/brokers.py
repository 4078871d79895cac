"""The broker of a fleet: its kind, the errors of its outages, and the settings that weaken a promise."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from dramatiq import Message
from dramatiq.broker import Broker
from dramatiq.errors import ConnectionClosed, ConnectionFailed

from ..bridge import Bridge
from ..engine.ports import Backlog
from ..rules.job import Job
from .compat import ids_of, messages_of, parameters
from .translate import bare_job, job_of

logger = logging.getLogger("ojs_bridge")

#: How long RabbitMQ waits for an acknowledgement, unless its `consumer_timeout` says otherwise.
PATIENCE = timedelta(minutes=30)
_NOT_FOUND = 404


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


def backlog(broker: Any, queues: Sequence[str]) -> Sequence[Backlog] | None:
    """Return the backlog of queues; None for a broker of another kind. Raises any error."""
    if is_redis(broker):
        broker.client.ping()
        return [_redis_backlog(broker, queue) for queue in queues]
    if is_rabbitmq(broker):
        from pika import BlockingConnection

        connection = BlockingConnection(parameters(broker))
        try:
            return [Backlog(queue, _depth(connection, queue)) for queue in queues]
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


def _depth(connection: Any, queue: str) -> int:
    """Return the number of messages in a queue, 0 where there is no such queue."""
    from pika.exceptions import ChannelClosedByBroker

    try:
        with connection.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).method.message_count)
    except ChannelClosedByBroker as error:
        if error.reply_code != _NOT_FOUND:
            raise
        return 0


def outages() -> tuple[type[Exception], ...]:
    """Return the errors of a broker that cannot be reached, or takes no more."""
    return (ConnectionClosed, ConnectionFailed, OSError, *redis_outages(), *_rabbitmq_outages())


def told(error: Exception) -> str:
    """Return the class and the text of an error, which the newest redis-py leaves out of its `repr`."""
    return f"{type(error).__name__}: {error}"


def redis_outages() -> tuple[type[Exception], ...]:
    """Return the errors of a Redis outage; Dramatiq does not take all of them for an outage."""
    if "dramatiq.brokers.redis" not in sys.modules:
        return ()
    from redis import exceptions as e

    return (e.ConnectionError, e.TimeoutError, e.OutOfMemoryError, e.ReadOnlyError)


def _rabbitmq_outages() -> tuple[type[Exception], ...]:
    if "dramatiq.brokers.rabbitmq" not in sys.modules:
        return ()
    from pika.exceptions import AMQPError

    return (AMQPError,)


def say_caveats(broker: Broker, bridge: Bridge) -> None:
    """Warn of every setting that weakens a promise."""
    for caveat in _caveats(broker, bridge):
        logger.warning("%s", caveat)


def _caveats(broker: Any, bridge: Bridge) -> Iterator[str]:
    if bridge.store is None and (is_redis(broker) or is_rabbitmq(broker)):
        yield (
            "no store: a job that kills its worker is delivered again without an attempt being counted, and "
            "long delays wait in the memory of workers"
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
    found: dict[str, str] = {}
    for name in ("maxmemory", "maxmemory-policy", "appendonly", "save"):
        try:
            found |= broker.client.config_get(name)
        except Exception:  # noqa: BLE001 - a caveat that cannot be found out stops no worker
            return {}
    return found
