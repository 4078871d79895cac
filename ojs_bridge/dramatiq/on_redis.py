"""Redis alone: a worker gives back messages that it has forgotten, and a retry replaces its message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.common import xq_name

from .compat import (
    REDIS_ID,
    acks_of,
    do_enqueue,
    do_requeue,
    ids_of,
    message_in,
    messages_of,
    queued_message_ids,
)
from .delivery import delivery_of
from .translate import bare_job, encodable

logger = logging.getLogger("ojs_bridge")


class Hands:
    """The deliveries in the hands of this process: taken from the broker's queues, and not settled yet."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._consumers: dict[str, threading.Thread] = {}

    def take(self, message: MessageProxy, *, is_delayed: bool) -> bool:
        """Take note of a delivery; False if its message is in hand already, and was taken away meanwhile.

        A delivery that its consumer thread delays is not noted, because Dramatiq may forget it.
        """
        options = message_in(message).options
        if is_delayed and options.get("eta") is not None:
            return True
        redis_id = options[REDIS_ID]
        if redis_id in self._ids:
            return False
        self._ids.add(redis_id)
        return True

    def put(self, message: MessageProxy) -> None:
        """Take note that a delivery was settled, or is given back next."""
        self._ids.discard(message_in(message).options.get(REDIS_ID, ""))

    def __contains__(self, message: MessageProxy) -> bool:
        return message.options.get(REDIS_ID) in self._ids

    def release_strays(self, broker: Any, queue_name: str, delayed: Iterable[MessageProxy] = ()) -> None:
        """Give back the strays: messages that this worker has fetched from a queue, and has no more.

        The queue's consumer thread calls this when it has handed out all that it fetched. In an outage
        Dramatiq forgets the messages that it delays, and the answer to a fetch may be lost. A message that
        comes again just as its first delivery ends is a stray, too. Redis would leave strays to this worker
        for as long as the worker lives.
        """
        thread = threading.current_thread()
        before = self._consumers.setdefault(queue_name, thread)
        if before is not thread and before.is_alive():
            return
        self._consumers[queue_name] = thread
        fetched = broker.client.smembers(acks_of(broker, queue_name))
        known = {message_in(message).options[REDIS_ID] for message in delayed}
        ids = [i for i in fetched if i.decode() not in self._ids and i.decode() not in known]
        for start in range(0, len(ids), 1000):
            do_requeue(broker)(queue_name, *ids[start : start + 1000])


def forget(inner: Any, message: MessageProxy) -> None:
    """Have a consumer fetch another message: this one has left."""
    getattr(inner, queued_message_ids.name, set()).discard(message.message_id)


class Replacing(threading.local):
    """The message whose place is taken by the next message that this thread enqueues."""

    message: MessageProxy | None = None


_replacing = Replacing()


#: KEYS: this worker's unacknowledged ids, the old queue's messages, the new queue's messages, the new queue's
#: ids. ARGV: the old id, the new id, the new message. If the old id is gone, another worker has the job, or
#: this script has run before. The commands that a server without memory refuses come first.
_REPLACE = """
if redis.call('sismember', KEYS[1], ARGV[1]) == 0 then return 0 end
redis.call('hset', KEYS[3], ARGV[2], ARGV[3])
redis.call('rpush', KEYS[4], ARGV[2])
redis.call('srem', KEYS[1], ARGV[1])
redis.call('hdel', KEYS[2], ARGV[1])
return 1
"""


@contextmanager
def replacing(message: MessageProxy) -> Iterator[None]:
    """Have the retry that this thread enqueues take the place of a message, in one step."""
    _replacing.message = message
    try:
        yield
    finally:
        _replacing.message = None


def replace_on(broker: Any, hands: Hands, woken: Callable[[str], None]) -> None:
    """Have a broker heed `replacing` as it enqueues, and call `woken` with the queue of each message."""

    def replace(old: MessageProxy, queue_name: str, redis_id: str, encoded: bytes) -> None:
        keys = (
            acks_of(broker, old.queue_name),
            messages_of(broker, old.queue_name),
            messages_of(broker, queue_name),
            ids_of(broker, queue_name),
        )
        words = (old.options[REDIS_ID], redis_id, encoded)
        if not broker.client.eval(_REPLACE, len(keys), *keys, *words):
            logger.warning("job %s: its delivery was taken away, and is another worker's", bare_job(old))
        delivery_of(old).is_replaced = True

    enqueue = do_enqueue(broker)

    def enqueue_or_replace(queue_name: str, redis_id: str, encoded: bytes) -> None:
        old = _replacing.message
        if old is not None and old in hands and _id_of(encoded) == old.message_id:
            replace(old, queue_name, redis_id, encoded)
        else:
            enqueue(queue_name, redis_id, encoded)
        woken(queue_name)

    do_enqueue.set(broker, enqueue_or_replace)


def _id_of(encoded: bytes) -> str:
    return dramatiq.Message.decode(encoded).message_id


_ENRICH = (
    "if redis.call('hexists', KEYS[1], ARGV[1]) == 1 then redis.call('hset', KEYS[1], ARGV[1], ARGV[2]) end"
)


def enrich(broker: Any, message: MessageProxy) -> None:
    """Write the final state of a dead letter over the message that a plain nack has moved; never raises."""
    try:
        key = messages_of(broker, xq_name(message.queue_name))
        final = encodable(message).encode()
        broker.client.eval(_ENRICH, 1, key, message.options[REDIS_ID], final)
    except Exception:
        logger.exception("job %s: its dead letter lacks its final state", bare_job(message))
