"""When a consumer thread looks again: as soon as something is due, not once in a worker's timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, TypeAlias

from dramatiq.broker import Broker, MessageProxy
from dramatiq.common import compute_backoff, current_millis, dq_name
from dramatiq.errors import ConnectionClosed
from dramatiq.worker import _ConsumerThread as ConsumerThread

from .on_redis import is_broker, is_redis
from .outages import redis_outages

#: How long a consumer that was woken waits for more, which it fetches along, in milliseconds.
GATHER = 5
#: Returns a consumer's next message, or None when none came in time.
Take: TypeAlias = Callable[[], MessageProxy | None]


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


def taking(broker: Broker, inner: Any, queue_name: str, wakes: Wakes) -> Take:
    """Return how the consumer of this thread, on a queue, takes its next message."""
    thread = threading.current_thread()
    take: Take = inner.__next__
    if not isinstance(thread, ConsumerThread):
        return take
    if is_redis(broker):
        return _polling(inner, thread, wakes.of(queue_name))
    if queue_name != dq_name(queue_name):
        return take
    if is_broker(broker, "rabbitmq", "RabbitmqBroker"):
        return _listening(inner, thread, queue_name)
    return _bounded(inner, thread) if hasattr(inner, "timeout") else take


def _polling(inner: Any, thread: ConsumerThread, wake: threading.Event) -> Take:
    """Wait in place of Redis' consumer, which sleeps whatever comes."""
    longest, inner.timeout = inner.timeout, 0

    def take() -> MessageProxy | None:
        try:
            message: MessageProxy | None = next(inner)
        except redis_outages() as error:
            raise ConnectionClosed(error) from None
        if message is None:
            _, pause = compute_backoff(inner.misses - 1, max_backoff=longest)
            if wake.wait(_until_due(thread, pause) / 1000):
                time.sleep(_until_due(thread, GATHER) / 1000)
                wake.clear()
        return message

    return take


def _listening(inner: Any, thread: ConsumerThread, queue_name: str) -> Take:
    def take() -> MessageProxy | None:
        # pika goes on with the same consumer, and lets each call have its own patience.
        seconds = _until_due(thread, thread.worker_timeout) / 1000
        inner.iterator = inner.channel.consume(queue_name, inactivity_timeout=seconds)
        message: MessageProxy | None = next(inner)
        return message

    return take


def _bounded(inner: Any, thread: ConsumerThread) -> Take:
    def take() -> MessageProxy | None:
        inner.timeout = _until_due(thread, thread.worker_timeout)
        message: MessageProxy | None = next(inner)
        return message

    return take


def _until_due(thread: ConsumerThread, most: int) -> int:
    """Return the milliseconds until the thread's first delayed message is due, `most` at most."""
    delayed = thread.delay_queue.queue
    if not delayed:
        return most
    first: Any = delayed[0]
    # Dramatiq 2.0 has pairs there.
    due: int = first[0] if isinstance(first, tuple) else first.priority
    return min(max(due - current_millis(), 0), most)
