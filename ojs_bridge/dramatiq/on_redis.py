"""What only Redis needs, as a broker: messages that a worker forgot, or a dead one had, are given back.

Acknowledgements travel together, and a retry takes the place of its message in one step.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import dramatiq
from dramatiq.broker import MessageProxy
from dramatiq.common import current_millis, dq_name, xq_name

from ..adapters.presence import Dead, Presence, present_key
from ..engine.reservations import Reservations
from ..engine.storage_retry import Outage
from .compat import (
    REDIS_ID,
    acks_of,
    do_enqueue,
    do_requeue,
    heartbeats_of,
    ids_of,
    message_in,
    messages_of,
    namespace,
    queued_message_ids,
    worker_id,
)
from .delivery import ENDING, NATIVE, Acknowledgements, Line, Lot, delivery_of
from .receiving import Wake
from .translate import bare_job, encodable, redis_errors

logger = logging.getLogger("ojs_bridge")


class Hands:
    """The deliveries in the hands of this process: taken from the broker's queues, and not settled yet."""

    def __init__(self) -> None:
        self._ids: set[str] = set()
        self._consumers: dict[str, threading.Thread] = {}

    def take(self, message: MessageProxy, *, is_delayed: bool) -> bool:
        """Note a delivery; False if its message is in hand already, and was taken away meanwhile.

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
        """Note that a delivery was settled, or is given back next."""
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


#: For how long a worker that stops waits for a Redis that is away.
AWAY_SECONDS = 10.0
#: Dramatiq's own acknowledgement, of many messages. What another worker has by now is left to it; the answer
#: has the positions of those.
#: KEYS: the heartbeats, this worker's unacknowledged ids, the queue's messages. ARGV: the time, the worker's
#: id, the ids of messages.
_ACKNOWLEDGE = """
redis.call('zadd', KEYS[1], ARGV[1], ARGV[2])
local others = {}
for n = 3, #ARGV do
  if redis.call('srem', KEYS[2], ARGV[n]) == 1 then
    redis.call('hdel', KEYS[3], ARGV[n])
  else
    others[#others + 1] = n - 3
  end
end
return others
"""


class JointAcknowledgements(Acknowledgements):
    """Acknowledges many messages in one trip, on a thread of its own. Meanwhile the next ones are settled."""

    exits = (NATIVE, ENDING)

    def __init__(self, broker: Any, outage: Outage) -> None:
        super().__init__()
        self._broker, self._outage, self._is_out = broker, outage, False
        self._script = broker.client.register_script(_ACKNOWLEDGE)
        self.lines.append(Line("ojs-acknowledging", self._send))

    def is_away(self) -> bool:
        """Return whether Redis is away, and has been for AWAY_SECONDS."""
        since = self._outage.since if self._is_out else None
        return since is not None and time.monotonic() - since >= AWAY_SECONDS

    def _acknowledge(self, lot: Lot) -> None:
        self.lines[-1].put(lot)

    def _send(self, lot: Lot) -> Lot:
        """Acknowledge the messages of one queue; none while Redis is away or refuses to write."""
        queue_name = next(iter(lot.values())).consumer.queue_name
        lot = {key: ended for key, ended in lot.items() if ended.consumer.queue_name == queue_name}
        ids = [message_in(ended.message).options[REDIS_ID] for ended in lot.values()]
        broker = self._broker
        keys = (heartbeats_of(broker), acks_of(broker, queue_name), messages_of(broker, queue_name))
        try:
            others = frozenset(self._script(keys=keys, args=(current_millis(), worker_id(broker), *ids)))
        except redis_errors() as error:
            self._is_out = True
            self._outage.wait(error, lambda: False)
            return {}
        if self._is_out:
            self._is_out = False
            self._outage.over()
        for n, ended in enumerate(lot.values()):
            ended.consumer.acknowledged(ended.message, n not in others)
        return lot


#: KEYS: a worker's unacknowledged ids of a queue, the queue's messages, the queue's ids, and the times at
#: which workers said that they live. ARGV: the worker and its time. Returns how many go back, to the head of
#: the queue: they have waited before. None go back if the worker has said since that it lives.
_GIVE_BACK = """
local at = redis.call('ZSCORE', KEYS[4], ARGV[1])
if at and tonumber(at) ~= tonumber(ARGV[2]) then return 0 end
local ids, count = redis.call('SMEMBERS', KEYS[1]), 0
for _, id in ipairs(ids) do
  if redis.call('HEXISTS', KEYS[2], id) == 1 then
    redis.call('LPUSH', KEYS[3], id)
    count = count + 1
  end
end
redis.call('DEL', KEYS[1])
return count
"""


def present(
    broker: Any, reservations: Reservations, queues: Callable[[], Iterable[str]], wakes: Mapping[str, Wake]
) -> Presence:
    """Let the other workers know that this one lives, and give back what dead workers had.

    The consumers of delayed messages hear by `wakes` whether Redis has some.
    """
    prefix = f"{namespace(broker)}:"

    def give_back(dead: Dead) -> int:
        return sum(
            broker.client.eval(
                _GIVE_BACK,
                4,
                acks_of(broker, name, dead.worker),
                messages_of(broker, name),
                ids_of(broker, name),
                present_key(prefix),
                dead.worker,
                dead.last_seen,
            )
            for queue in dead.queues
            for name in (queue, dq_name(queue))
        )

    presence = Presence(
        prefix,
        worker_id(broker),
        reservations.family,
        queues=lambda: sorted(queues()),
        lists=lambda: {ids_of(broker, q): wake.looked for q, wake in [*wakes.items()] if q == dq_name(q)},
        suspect=reservations.suspect,
        give_back=give_back,
    )
    presence.start(lambda: broker.client)
    return presence


def seldom(broker: Any) -> float:
    """Return once in how many seconds a consumer is to fetch, though its queue is empty.

    By fetches, Dramatiq knows that a worker lives; and at some of them, by chance, it gives back what a dead
    worker had that did not have the bridge.
    """
    silent_since = current_millis() - broker.heartbeat_timeout
    # As Dramatiq's own script asks, so that it may be asked.
    dead = broker.client.zrangebyscore(heartbeats_of(broker), 0, silent_since, start=0, num=1)
    return 0.0 if dead else broker.heartbeat_timeout / 6000


def caveats(client: Any) -> Iterator[str]:
    """Yield what weakens a promise in the settings of a broker's Redis."""
    settings: dict[str, str] = {}
    # A caveat that cannot be found out, as without the right to CONFIG, stops no worker.
    with suppress(Exception):
        for name in ("maxmemory", "maxmemory-policy", "appendonly", "save"):
            settings |= client.config_get(name)
    policy = settings.get("maxmemory-policy", "noeviction")
    if settings.get("maxmemory", "0") != "0" and policy != "noeviction":
        yield f"the broker's Redis may evict jobs: set maxmemory-policy noeviction, not {policy}"
    if settings.get("appendonly") == "no" and settings.get("save") == "":
        yield "the broker's Redis keeps no job over a restart: set appendonly yes"


def forget(inner: Any, message: MessageProxy) -> None:
    """Let a consumer fetch another message: this one has left."""
    getattr(inner, queued_message_ids.name, set()).discard(message.message_id)


#: KEYS: this worker's unacknowledged ids, the queue's ids. ARGV: ids of messages, the first one first.
_TO_HEAD = """
for n = #ARGV, 1, -1 do
  if redis.call('srem', KEYS[1], ARGV[n]) == 1 then redis.call('lpush', KEYS[2], ARGV[n]) end
end
"""


def to_head(broker: Any, hands: Hands, inner: Any, queue_name: str, messages: list[MessageProxy]) -> None:
    """Give messages back to the head of their queue; if Redis is away, they are strays then."""
    for message in messages:
        # First, or this process might fetch the message again, and take it for this delivery.
        hands.put(message)
        forget(inner, message)
    ids = [message_in(message).options[REDIS_ID] for message in messages]
    with suppress(*redis_errors()):
        broker.client.eval(_TO_HEAD, 2, acks_of(broker, queue_name), ids_of(broker, queue_name), *ids)


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
    """Let the retry that this thread enqueues take the place of a message, in one step."""
    _replacing.message = message
    try:
        yield
    finally:
        _replacing.message = None


def replace_on(broker: Any, hands: Hands, woken: Callable[[str], None]) -> None:
    """Make a broker heed `replacing` as it enqueues, and call `woken` with the queue of each message."""

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
        if old and old in hands and dramatiq.Message.decode(encoded).message_id == old.message_id:
            replace(old, queue_name, redis_id, encoded)
        else:
            enqueue(queue_name, redis_id, encoded)
        woken(queue_name)

    do_enqueue.set(broker, enqueue_or_replace)


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
