"""A consumer thread takes its next message: as soon as there is a message, and only if a worker can run it.

Some messages end the threads of Dramatiq. A consumer thread begins again, and on Redis meets the same message
again. A worker thread is gone for good. So such a message goes to the dead queue as it came.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, TypeAlias

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.common import compute_backoff, current_millis, dq_name, iter_queue, q_name
from dramatiq.errors import ConnectionClosed

from ..adapters.presence import LOOK_SECONDS
from ..engine.storage_retry import is_of_process
from . import compat
from .compat import REDIS_ID, acks_of, messages_of
from .translate import error_in_words, redis_outages

logger = logging.getLogger("ojs_bridge")

#: How often a consumer looks for strays, messages that its worker has fetched from Redis and forgotten, in
#: seconds.
STRAYS_SECONDS = 30.0
#: For how many seconds a queue counts as empty that a look has found empty; the next look comes before.
EMPTY_SECONDS = 2 * LOOK_SECONDS
#: For how many seconds after a message a queue does not count as empty: the next one may be due at once.
BUSY_SECONDS = 10.0
#: How long a consumer that was woken waits for more messages to fetch with the first, in milliseconds.
GATHER = 5
#: A worker may have as many messages of a queue as leave it in so many seconds; at most so many times as many
#: as Dramatiq lets it have; and those that are more, because its jobs have become slow, for so many seconds.
WINDOW_SECONDS, WIDEST, BEHIND_SECONDS = 0.1, 4, 1.0
#: Returns a consumer's next message, or None when none came in time.
Take: TypeAlias = "Callable[[], MessageProxy | None]"


class Wake(threading.Event):
    """Wakes the consumer thread of a queue on Redis, also when this process itself enqueues a message."""

    #: The thread waits until its worker has this many messages or fewer; None if it waits for messages.
    room: int | None = None
    #: Until when, by the monotonic clock, Redis has nothing for the thread.
    empty_until = 0.0
    #: Until when, by the monotonic clock, the thread goes on to ask Redis, which had a message for it.
    busy_until = 0.0

    def looked(self, length: int) -> None:
        """Hear the length of the thread's queue, or -1 if it is not known."""
        if length:
            self.set()
        elif time.monotonic() > self.busy_until:
            self.empty_until = time.monotonic() + EMPTY_SECONDS

    def freed(self, inner: Any) -> None:
        """Wake the thread if a consumer that had its hands full has room for a lot of messages."""
        if self.room is not None and compat.outstanding(inner) <= self.room:
            self.set()


def polling(
    inner: Any,
    thread: Any,
    wake: Wake,
    seldom: Callable[[], float],
    release_strays: Callable[[list[MessageProxy]], None],
) -> Take:
    """Wait in place of the consumer for Redis, whose sleep nothing ends; and look for strays now and then.

    There are strays because redis-py silently repeats a fetch whose answer was lost. While its queue counts
    as empty, a consumer fetches once in so many seconds as `seldom` returns after a fetch.
    """
    longest, looked = compat.redis_timeout(inner), time.monotonic()
    fetches_at = 0.0
    # The consumer returns at once.
    compat.redis_timeout.set(inner, 0)

    def take() -> MessageProxy | None:
        nonlocal looked, fetches_at
        prefetch = compat.redis_prefetch(inner)
        # A worker that shuts down fetches nothing, and has no room however few messages it has.
        is_full = compat.outstanding(inner) >= prefetch > 0
        # Dramatiq would sleep as if there were no messages, and its threads would run dry.
        wake.room = prefetch // 2 if is_full else None
        message: MessageProxy | None = None
        rests = time.monotonic() < min(fetches_at, wake.empty_until)
        try:
            if not rests:
                message = next(inner)
                if message is None and not is_full and time.monotonic() < wake.empty_until:
                    fetches_at = time.monotonic() + seldom()
            if message is None and time.monotonic() - looked > STRAYS_SECONDS:
                looked = time.monotonic()
                release_strays([*map(_message_of, compat.delay_queue_of(thread).queue)])
        except redis_outages() as error:
            raise ConnectionClosed(error) from None
        if message is not None:
            wake.empty_until, wake.busy_until = 0.0, time.monotonic() + BUSY_SECONDS
            return message
        wake.freed(inner)
        if wake.wait(_until_due(thread, longest if rests else _pause_after(inner, longest)) / 1000):
            fetches_at = 0.0
            if not is_full:
                time.sleep(_until_due(thread, GATHER) / 1000)
            wake.clear()
        return None

    return take


def widening(inner: Any, thread: Any, take: Take, give_back: Callable[[list[MessageProxy]], None]) -> Take:
    """Let a worker have as many messages of a queue on Redis as have left it in the last tenth of a second.

    That is Dramatiq's own number at least, and four times that at most. So the threads need not wait for the
    next fetch, however far away Redis is, and where jobs are slow, messages wait in Redis for a free worker.
    If they have become slow, what waits here for a second behind them goes back.
    """
    least, waiting = compat.redis_prefetch(inner), compat.of_consumer_thread["work_queue"](thread)
    looked = fits = time.monotonic()
    taken = left = 0

    def take_and_look() -> MessageProxy | None:
        nonlocal looked, fits, taken, left
        now = time.monotonic()
        # A worker that shuts down fetches nothing more.
        if (seconds := now - looked) > WINDOW_SECONDS and compat.redis_prefetch(inner):
            before, left, looked = left, taken - len(compat.queued_message_ids(inner)), now
            size = max(least, min(round((left - before) * WINDOW_SECONDS / seconds), WIDEST * least))
            compat.redis_prefetch.set(inner, size)
            if hasattr(inner, "ojs_stops"):
                compat.redis_prefetch.set(inner, 0)
            more = compat.outstanding(inner) - size
            if more <= 0:
                fits = now
            elif now - fits > BEHIND_SECONDS:
                fits = now
                give_back(_take_out(waiting, thread.queue_name, more))
        message = take()
        taken += message is not None
        return message

    return take_and_look


def _take_out(waiting: Any, queue_name: str, many: int) -> list[MessageProxy]:
    """Take so many messages of a queue out of those that wait for a thread, the last ones."""
    items = [*iter_queue(waiting)]
    last = [item for item in items if _message_of(item).queue_name == queue_name][-many:]
    for item in items:
        if not any(item is each for each in last):
            waiting.put(item)
        waiting.task_done()
    return [*map(_message_of, last)]


def listening(inner: Iterator[MessageProxy | None], thread: Any, queue_name: str) -> Take:
    """Wait for RabbitMQ until the first message is due that the thread delays."""

    def take() -> MessageProxy | None:
        # pika goes on with the same consumer, and lets each call have its own patience.
        seconds = _until_due(thread, compat.worker_timeout_of(thread)) / 1000
        patience = {compat.inactivity_timeout.name: seconds}
        compat.iterator.set(inner, compat.consumer_channel(inner).consume(queue_name, **patience))
        return next(inner)

    return take


def bounded(inner: Iterator[MessageProxy | None], thread: Any) -> Take:
    """Have StubBroker wait until the first message is due that the thread delays."""

    def take() -> MessageProxy | None:
        setattr(inner, compat.stub_timeout.name, _until_due(thread, compat.worker_timeout_of(thread)))
        return next(inner)

    return take


def _until_due(thread: Any, most: float) -> float:
    """Return the milliseconds until the first message is due that the thread delays, `most` at most."""
    delayed = compat.delay_queue_of(thread).queue
    if not delayed:
        return most
    # Dramatiq 2.0 has pairs of a time and a message there.
    due: float = delayed[0][0] if isinstance(delayed[0], tuple) else delayed[0].priority
    return min(max(due - current_millis(), 0), most)


def _message_of(item: Any) -> Any:
    return item[1] if isinstance(item, tuple) else item.message


def _pause_after(inner: Any, longest: int) -> int:
    """Return for how many milliseconds a consumer that has found nothing would sleep."""
    return compute_backoff(compat.misses(inner) - 1, max_backoff=longest)[1]


def flaw_of(message: dramatiq.Message[Any], queue_name: str) -> str | None:
    """Return why no worker can run a message, or None."""
    if type(message.actor_name) is not str:
        return f"its actor's name is {message.actor_name!r}"
    if type(message.options) is not dict:
        return f"its options are {message.options!r}"
    if message.queue_name not in (queue_name, q_name(queue_name), dq_name(queue_name)):
        return f"it says that its queue is {message.queue_name!r}"
    if not isinstance(message.message_id, Hashable):
        return f"its id is {message.message_id!r}"
    return None


def flaw_on_redis(message: dramatiq.Message[Any], queue_name: str) -> str | None:
    """Return why no worker can run a message of Redis, or None."""
    if flaw := flaw_of(message, queue_name):
        return flaw
    redis_id = message.options.get(REDIS_ID)
    # What redis-py cannot send would keep it from sending the acknowledgements of other messages, too.
    return None if isinstance(redis_id, str) and redis_id.isascii() else f"its {REDIS_ID} is {redis_id!r}"


def put_away(broker: Any, queue_name: str, error: Exception) -> bool:
    """Move the fetched messages that no worker can run to the dead queue; False if there are none."""
    bad = [*_unsound(broker, queue_name)]
    for redis_id in bad:
        compat.do_nack(broker)(queue_name, redis_id)
    if bad:
        say_flaw(queue_name, error_in_words(error))
    return bool(bad)


def _unsound(broker: Any, queue_name: str) -> Iterator[bytes]:
    """Yield the ids of the fetched messages that no worker can run."""
    ids = sorted(broker.client.smembers(acks_of(broker, queue_name)))
    bodies = broker.client.hmget(messages_of(broker, queue_name), ids) if ids else []
    for redis_id, body in zip(ids, bodies, strict=True):
        if body is not None and not _is_sound(body, queue_name):
            yield redis_id


def readable(bodies: Iterable[bytes | None], queue_name: str) -> list[MessageProxy]:
    """Return the messages that a worker can run."""
    good = [body for body in bodies if body is not None and _is_sound(body, queue_name)]
    return [MessageProxy(dramatiq.Message.decode(body)) for body in good]


def _is_sound(body: bytes, queue_name: str) -> bool:
    try:
        return flaw_on_redis(dramatiq.Message.decode(body), queue_name) is None
    except Exception as error:  # noqa: BLE001 - the application's own encoder may raise anything
        return is_of_process(error, body)


def say_flaw(queue_name: str, flaw: str) -> None:
    """Log that a message lies in its dead queue."""
    logger.error("a message of queue %s lies in its dead queue as it came: %s", queue_name, flaw)
