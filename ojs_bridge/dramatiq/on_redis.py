"""What only a RedisBroker needs: deliveries that an outage strands, and a retry that replaces its message."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.common import xq_name

from .compat import acks_of
from .delivery import delivery_of
from .translate import encodable

logger = logging.getLogger("ojs_bridge")


class Hands:
    """The deliveries that this process has taken from a broker's queues and not settled yet."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._consumers: dict[str, threading.Thread] = {}

    def take(self, message: MessageProxy) -> bool:
        """Take note of a delivery; False for one that is in hand already, and was taken away meanwhile."""
        redis_id = message._message.options["redis_message_id"]
        if redis_id in self._ids:
            return False
        self._ids.add(redis_id)
        return True

    def put(self, message: MessageProxy) -> None:
        """Take note that a delivery was settled, or is about to be given back."""
        self._ids.discard(message._message.options.get("redis_message_id", ""))

    def __contains__(self, message: MessageProxy) -> bool:
        return message.options.get("redis_message_id") in self._ids

    def release_strays(self, broker: Any, queue_name: str) -> None:
        """Give back what this thread, or one that is dead, fetched from a queue and forgot in an outage.

        Dramatiq forgets the delayed messages, and what was fetched while the answer got lost. Redis has them
        as this worker's own, for as long as it lives.
        """
        thread = threading.current_thread()
        before = self._consumers.setdefault(queue_name, thread)
        if before is not thread and before.is_alive():
            return
        self._consumers[queue_name] = thread
        fetched = broker.client.smembers(acks_of(broker, queue_name))
        ids = [i for i in fetched if i.decode() not in self._ids]
        for start in range(0, len(ids), 1000):
            broker.do_requeue(queue_name, *ids[start : start + 1000])


class Replacing(threading.local):
    """The message, of this thread, that what is enqueued next takes the place of."""

    message: MessageProxy | None = None


_replacing = Replacing()


#: KEYS: our unacknowledged ids, the old queue's messages, the new queue's, the new queue. ARGV: the old id,
#: the new one, the new message. Somebody else has the job, or we were here before, when the old id is gone.
#: What a server without memory refuses comes first.
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
    """Have what this thread enqueues of a job take its message's place, in one step."""
    _replacing.message = message
    try:
        yield
    finally:
        _replacing.message = None


def replace_on(broker: Any, hands: Hands, woken: Callable[[str], None]) -> None:
    """Have a broker's `enqueue` heed `replacing`, and call `woken` with the queue of each message."""
    enqueue = broker.do_enqueue

    def do_enqueue(queue_name: str, redis_id: str, encoded: bytes) -> None:
        old = _replacing.message
        if old is None or old not in hands or dramatiq.Message.decode(encoded).message_id != old.message_id:
            enqueue(queue_name, redis_id, encoded)
            woken(queue_name)
            return
        prefix = f"{broker.namespace}:"
        keys = (
            acks_of(broker, old.queue_name),
            f"{prefix}{old.queue_name}.msgs",
            f"{prefix}{queue_name}.msgs",
            f"{prefix}{queue_name}",
        )
        words = (old.options["redis_message_id"], redis_id, encoded)
        if not broker.client.eval(_REPLACE, len(keys), *keys, *words):
            logger.warning("job %s: its delivery was taken away, and is somebody else's", old.message_id)
        delivery_of(old).is_replaced = True
        woken(queue_name)

    broker.do_enqueue = do_enqueue


_ENRICH = (
    "if redis.call('hexists', KEYS[1], ARGV[1]) == 1 then redis.call('hset', KEYS[1], ARGV[1], ARGV[2]) end"
)


def enrich(broker: Any, message: MessageProxy) -> None:
    """Write a dead letter's final state over the bytes that a plain nack has moved; never raises."""
    try:
        key = f"{broker.namespace}:{xq_name(message.queue_name)}.msgs"
        final = encodable(message).encode()
        broker.client.eval(_ENRICH, 1, key, message.options["redis_message_id"], final)
    except Exception:
        logger.exception("job %s: its dead letter lacks its final state", message.message_id)
