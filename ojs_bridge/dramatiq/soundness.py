"""Messages that Dramatiq's own threads would end at: they go to the dead queue as they came.

A consumer thread that trips over such a message begins again, and on Redis meets it again; a worker thread is
gone for good. What lies in a dead queue can be looked at.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import dramatiq
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.common import dq_name, q_name
from dramatiq.errors import DecodeError

from .on_redis import acks_of, is_redis
from .outages import outages, told

logger = logging.getLogger("ojs_bridge")

#: What returns the next message of a consumer, or None.
Take: TypeAlias = Callable[[], "MessageProxy | None"]


def sound(broker: Broker, inner: Consumer, queue_name: str, take: Take) -> Take:
    """Return what takes messages of a queue as `take` does, without those that nobody can carry out."""
    on_redis = is_redis(broker)
    passes: tuple[type[Exception], ...] = (StopIteration, *outages())

    def take_sound() -> MessageProxy | None:
        try:
            message = take()
        except passes:
            raise
        except Exception as error:
            # One that an earlier look has put away with the others is taken from memory all the same.
            is_read = isinstance(error, (DecodeError, TypeError))
            if not (on_redis and (_put_away(broker, queue_name, error) or is_read)):
                raise
            return None
        if message is None:
            return None
        flaw = _flaw(message._message, queue_name, on_redis=on_redis)
        if flaw is None:
            return message
        _leave(broker, inner, queue_name, message, flaw, on_redis=on_redis)
        return None

    return take_sound


def _flaw(message: dramatiq.Message[Any], queue_name: str, *, on_redis: bool) -> str | None:
    """Return why Dramatiq's threads cannot handle a message, or None."""
    if type(message.actor_name) is not str:
        return f"its actor's name is {message.actor_name!r}"
    if type(message.options) is not dict:
        return f"its options are {message.options!r}"
    if message.queue_name != queue_name and message.queue_name not in (
        q_name(queue_name),
        dq_name(queue_name),
    ):
        return f"it says that its queue is {message.queue_name!r}"
    if not isinstance(message.message_id, Hashable):
        return f"its id is {message.message_id!r}"
    if on_redis and "redis_message_id" not in message.options:
        return "it has no redis_message_id"
    return None


def _leave(
    broker: Any, inner: Any, queue_name: str, message: MessageProxy, flaw: str, *, on_redis: bool
) -> None:
    if on_redis:
        _put_away(broker, queue_name, ValueError(flaw))
        inner.queued_message_ids.discard(message.message_id)
    else:
        _say(queue_name, flaw)
        inner.nack(message)


def _put_away(broker: Any, queue_name: str, error: Exception) -> bool:
    """Move what this worker has fetched and nobody can carry out to the dead queue; False without any."""
    bad = [*_unsound(broker, queue_name)]
    for redis_id in bad:
        broker.do_nack(queue_name, redis_id)
    if bad:
        _say(queue_name, told(error))
    return bool(bad)


def _unsound(broker: Any, queue_name: str) -> Iterator[bytes]:
    """Yield the ids of what this worker has fetched and nobody can carry out."""
    ids = sorted(broker.client.smembers(acks_of(broker, queue_name)))
    bodies = broker.client.hmget(f"{broker.namespace}:{queue_name}.msgs", ids) if ids else []
    for redis_id, body in zip(ids, bodies, strict=True):
        if body is not None and not _is_sound(body, queue_name):
            yield redis_id


def readable(bodies: Iterable[bytes | None], queue_name: str) -> list[MessageProxy]:
    """Return the messages that somebody can carry out."""
    found = [body for body in bodies if body is not None and _is_sound(body, queue_name)]
    return [MessageProxy(dramatiq.Message.decode(body)) for body in found]


def _is_sound(body: bytes, queue_name: str) -> bool:
    try:
        return _flaw(dramatiq.Message.decode(body), queue_name, on_redis=True) is None
    except Exception:  # noqa: BLE001 - whatever the application's own encoder raises
        return False


def _say(queue_name: str, flaw: str) -> None:
    logger.error("a message of queue %s lies in its dead queue as it came: %s", queue_name, flaw)
