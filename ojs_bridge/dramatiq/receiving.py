"""A consumer thread takes its next message: as soon as there is one, and only one that can be carried out.

Dramatiq's own threads end at some messages. A consumer thread that trips over such a message begins again,
and on Redis meets it again; a worker thread is gone for good. So these messages go to the dead queue as they
came, where they can be looked at.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

import dramatiq
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.common import current_millis, dq_name, q_name
from dramatiq.errors import ConnectionClosed, DecodeError

from .brokers import is_rabbitmq, is_redis, outages, redis_outages, told
from .compat import (
    REDIS_ID,
    ConsumerThread,
    acks_of,
    bury,
    delayed_in,
    due_in,
    forget,
    listen,
    message_in,
    messages_of,
    patience_of,
    pause_after,
    sleep_never,
    wait_at_most,
)
from .on_redis import Hands

logger = logging.getLogger("ojs_bridge")

#: How often, in seconds, a consumer looks for what its worker has fetched from Redis and does not have.
STRAYS_SECONDS = 30.0
#: How long a consumer that was woken waits for more, which it fetches along, in milliseconds.
GATHER = 5
#: Returns a consumer's next message, or None when none came in time.
Take: TypeAlias = "Callable[[], MessageProxy | None]"


class Wakes:
    """The consumer threads of this process that poll Redis: what it enqueues itself wakes them."""

    def __init__(self) -> None:
        self._events: dict[str, threading.Event] = {}

    def of(self, queue_name: str) -> threading.Event:
        """Return what wakes the consumer thread of a queue."""
        return self._events.setdefault(queue_name, threading.Event())

    def wake(self, queue_name: str) -> None:
        """Have the consumer thread of a queue, if this process has one, look at once."""
        if event := self._events.get(queue_name):
            event.set()


def taking(broker: Broker, inner: Any, queue_name: str, wakes: Wakes, hands: Hands) -> Take:
    """Return how the consumer of this thread, on a queue, takes its next message."""
    thread = threading.current_thread()
    take: Take = inner.__next__
    if not isinstance(thread, ConsumerThread):
        return take
    if is_redis(broker):
        release = partial(hands.release_strays, broker, queue_name)
        return _polling(inner, thread, wakes.of(queue_name), release)
    if queue_name != dq_name(queue_name):
        return take
    if is_rabbitmq(broker):
        return _listening(inner, thread, queue_name)
    return _bounded(inner, thread)


def _polling(
    inner: Any, thread: Any, wake: threading.Event, release_strays: Callable[[list[MessageProxy]], None]
) -> Take:
    """Wait in place of Redis' consumer, which sleeps whatever comes; look for strays now and then.

    redis-py may repeat a fetch whose answer was lost, and say nothing of it.
    """
    longest, looked = sleep_never(inner), time.monotonic()

    def take() -> MessageProxy | None:
        nonlocal looked
        try:
            message: MessageProxy | None = next(inner)
            if message is None and time.monotonic() - looked > STRAYS_SECONDS:
                looked = time.monotonic()
                release_strays(delayed_in(thread))
        except redis_outages() as error:
            raise ConnectionClosed(error) from None
        if message is None and wake.wait(_until_due(thread, pause_after(inner, longest)) / 1000):
            time.sleep(_until_due(thread, GATHER) / 1000)
            wake.clear()
        return message

    return take


def _listening(inner: Any, thread: Any, queue_name: str) -> Take:
    def take() -> MessageProxy | None:
        # pika goes on with the same consumer, and lets each call have its own patience.
        seconds = _until_due(thread, patience_of(thread)) / 1000
        listen(inner, queue_name, seconds)
        message: MessageProxy | None = next(inner)
        return message

    return take


def _bounded(inner: Any, thread: Any) -> Take:
    def take() -> MessageProxy | None:
        wait_at_most(inner, _until_due(thread, patience_of(thread)))
        message: MessageProxy | None = next(inner)
        return message

    return take


def _until_due(thread: Any, most: float) -> float:
    """Return the milliseconds until the thread's first delayed message is due, `most` at most."""
    due = due_in(thread)
    return most if due is None else min(max(due - current_millis(), 0), most)


def sound(broker: Broker, inner: Consumer, queue_name: str, take: Take) -> Take:
    """Return what takes messages of a queue as `take` does, without those that no thread can carry out."""
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
        flaw = _flaw(message_in(message), queue_name, on_redis=on_redis)
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
    if on_redis and REDIS_ID not in message.options:
        return f"it has no {REDIS_ID}"
    return None


def _leave(
    broker: Any, inner: Any, queue_name: str, message: MessageProxy, flaw: str, *, on_redis: bool
) -> None:
    if on_redis:
        _put_away(broker, queue_name, ValueError(flaw))
        forget(inner, message)
    else:
        _say(queue_name, flaw)
        inner.nack(message)


def _put_away(broker: Any, queue_name: str, error: Exception) -> bool:
    """Move the fetched messages that no thread can carry out to the dead queue; False if there are none."""
    bad = [*_unsound(broker, queue_name)]
    for redis_id in bad:
        bury(broker, queue_name, redis_id)
    if bad:
        _say(queue_name, told(error))
    return bool(bad)


def _unsound(broker: Any, queue_name: str) -> Iterator[bytes]:
    """Yield the ids of the fetched messages that no thread can carry out."""
    ids = sorted(broker.client.smembers(acks_of(broker, queue_name)))
    bodies = broker.client.hmget(messages_of(broker, queue_name), ids) if ids else []
    for redis_id, body in zip(ids, bodies, strict=True):
        if body is not None and not _is_sound(body, queue_name):
            yield redis_id


def readable(bodies: Iterable[bytes | None], queue_name: str) -> list[MessageProxy]:
    """Return the messages that a thread can carry out."""
    found = [body for body in bodies if body is not None and _is_sound(body, queue_name)]
    return [MessageProxy(dramatiq.Message.decode(body)) for body in found]


def _is_sound(body: bytes, queue_name: str) -> bool:
    try:
        return _flaw(dramatiq.Message.decode(body), queue_name, on_redis=True) is None
    except Exception:  # noqa: BLE001 - whatever the application's own encoder raises
        return False


def _say(queue_name: str, flaw: str) -> None:
    logger.error("a message of queue %s lies in its dead queue as it came: %s", queue_name, flaw)
