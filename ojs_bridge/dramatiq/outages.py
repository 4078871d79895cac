"""What a broker that is out of reach raises, whichever it is."""

from __future__ import annotations

import sys

from dramatiq.errors import ConnectionClosed, ConnectionFailed


def outages() -> tuple[type[Exception], ...]:
    """Return what is raised while a broker cannot be reached, or takes no more."""
    return (ConnectionClosed, ConnectionFailed, OSError, *redis_outages(), *_rabbitmq_outages())


def told(error: Exception) -> str:
    """Return what an error says, with its class; the newest redis-py's own `repr` holds neither."""
    return f"{type(error).__name__}: {error}"


def redis_outages() -> tuple[type[Exception], ...]:
    """Return what a Redis outage raises, also where Dramatiq does not know it as one."""
    if "dramatiq.brokers.redis" not in sys.modules:
        return ()
    from redis import exceptions as e

    return (e.ConnectionError, e.TimeoutError, e.OutOfMemoryError, e.ReadOnlyError)


def _rabbitmq_outages() -> tuple[type[Exception], ...]:
    if "dramatiq.brokers.rabbitmq" not in sys.modules:
        return ()
    from pika.exceptions import AMQPError

    return (AMQPError,)
