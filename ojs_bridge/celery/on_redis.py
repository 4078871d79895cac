"""Redis as the broker: a worker renews the messages that it has, and gives back what dead workers had."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Container
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import bootsteps
from celery.concurrency import solo
from celery.worker import state

from ..adapters.presence import Dead, Presence, text_of
from ..engine.threads import keep_going
from . import compat
from .installation import attach
from .taking import Taking, client_of, keys_of, this_worker

logger = logging.getLogger("ojs_bridge")

#: How often a delivery is renewed within its visibility timeout.
_BEATS = 3
#: The most deliveries of dead workers that go back to their queues at a time.
_SWEEP = 1000
#: KEYS: the hash of unacknowledged messages, its index by time, the hash of their workers. ARGV: a dead
#: worker, and a time. Returns what the dead worker had, each delivery tag and the delivery. What a worker
#: without the bridge has taken since is younger, and stays.
_LEFT = """
local worker_of, left = redis.call('HGETALL', KEYS[3]), {}
for n = 1, #worker_of, 2 do
  local tag = worker_of[n]
  if worker_of[n + 1] == ARGV[1] then
    local at, message = redis.call('ZSCORE', KEYS[2], tag), redis.call('HGET', KEYS[1], tag)
    if at and message and tonumber(at) <= tonumber(ARGV[2]) then
      left[#left + 1] = {tag, message}
    else
      redis.call('HDEL', KEYS[3], tag)
    end
  end
end
return left
"""
#: KEYS as above, then lists; ARGV: a delivery tag, a dead worker, and a message. Puts the message at the head
#: of each list, in the place of the delivery, unless another worker has done so.
_GIVE_BACK = """
if redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[2] then return 0 end
for n = 4, #KEYS do redis.call('RPUSH', KEYS[n], ARGV[3]) end
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
return 1
"""
#: How many seconds a dead worker's last renewal may lie after the time at which it last said that it lived.
_TOLERANCE = 3.0
#: The channels on which the workers of this process take messages now.
_channels: WeakKeyDictionary[Visibility, Any] = WeakKeyDictionary()


class Visibility(bootsteps.StartStopStep):  # type: ignore[misc]
    """Renews the deliveries that a worker has, and puts back those of dead workers.

    The visibility timeout begins with the delivery, and kombu never renews it. A thread does so here, because
    a warm shutdown ends Celery's timers while jobs still run.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._over: threading.Event | None = None
        self._presence: Presence | None = None

    def start(self, consumer: Any) -> None:
        """Begin, once, where the transport is Redis; the thread finds a new connection by itself."""
        channel = consumer.task_consumer.channel
        # A pool that runs a job within the loop would keep the others of a step from other workers.
        runs_within = isinstance(consumer.pool, solo.TaskPool)
        alone = runs_within or consumer.app.conf.get("worker_disable_prefetch")
        channel.ojs_gathers = consumer.hub is not None and not alone
        _channels[self] = channel
        if isinstance(channel, Taking) and self._over is not None:
            give_back_strays(channel)
        if self._over is None and hasattr(channel, "unacked_index_key"):
            self._over = threading.Event()
            if isinstance(channel, Taking):
                self._presence = present(consumer)
            seconds = channel.visibility_timeout / _BEATS
            keep_going("ojs-visibility", partial(_beat, consumer, self._over, seconds))

    def stop(self, consumer: Any) -> None:
        """Go on: the worker connects anew, or a warm shutdown waits for running jobs."""

    def shutdown(self, _: Any) -> None:
        """End: unacknowledged messages go back to their queues now."""
        _channels.pop(self, None)
        if self._over is not None:
            self._over.set()
        if self._presence is not None:
            self._presence.stop()

    terminate = shutdown


def _onward(channel: Any, delivery: bytes | str) -> tuple[str, list[str]]:
    """Return the message of a delivery as kombu gives it back, and its lists; raises LookupError without."""
    message, exchange, routing_key = json.loads(delivery)
    for part in (message.get("headers"), message["properties"].get("delivery_info")):
        if isinstance(part, dict):
            part["redelivered"] = True
    priority = compat.message_priority(channel)(message)
    lists = [
        compat.q_for_pri(channel)(name, priority) for name in compat.lookup(channel)(exchange, routing_key)
    ]
    if not lists:
        raise LookupError(f"exchange {exchange!r}, routing key {routing_key!r}: they lead to no queue")
    return json.dumps(message), [channel.global_keyprefix + name for name in lists]


def present(consumer: Any) -> Presence:
    """Let the other workers know that this one lives, and give back what dead workers had."""
    reservations = attach(consumer.app).engine.reservations
    stuck: set[bytes | str] = set()

    def give_back(dead: Dead) -> int | None:
        return _give_back(consumer.task_consumer.channel, dead.worker, dead.last_seen + _TOLERANCE, stuck)

    channel = consumer.task_consumer.channel
    presence = Presence(
        keys_of(channel)[0],
        this_worker(),
        reservations.family,
        suspect=reservations.suspect,
        give_back=give_back,
    )
    # The channel is another one after each outage.
    presence.start(lambda: client_of(consumer.task_consumer.channel))
    return presence


def _give_back(
    channel: Any, worker: str, until: float, stuck: set[bytes | str], kept: Container[str] = ()
) -> int | None:
    """Give back what a worker had at a time, by the server's clock, but for the delivery tags that are kept.

    Returns how many messages; None if some of them lead to no queue that is known here. They are stuck.
    """
    keys, client = keys_of(channel), client_of(channel)
    count: int | None = 0
    for tag, delivery in client.eval(_LEFT, len(keys), *keys, worker, until):
        if text_of(tag) in kept:
            continue
        try:
            message, lists = _onward(channel, delivery)
        except Exception as error:  # noqa: BLE001 - a worker of another app may know the exchange
            if tag not in stuck:
                logger.warning("a message of a dead worker is left to other workers: %s", error)
            stuck.add(tag)
            count = None
            continue
        words = tag, worker, message
        given = client.eval(_GIVE_BACK, len(keys) + len(lists), *keys, *lists, *words)
        count = None if count is None else count + given
    return count


def give_back_strays(channel: Any) -> None:
    """Give back the strays: what this worker took on a connection that it has lost, and has no more.

    Celery forgets what it has not begun, and cannot put that back while Redis is away. The answer to a
    question may be lost, too. Redis would leave strays to this worker for as long as the worker lives.
    """
    kept = {request.message.delivery_tag for request in compat.active_requests(state)}
    for each in (channel, *_channels.values()):
        # Another worker of this process may have taken some, too.
        kept.update(getattr(each.qos, "ojs_owed", ()), compat.deliveries(each.qos))
    try:
        count = _give_back(channel, this_worker(), client_of(channel).time()[0] + 1, set(), kept)
    except Exception as error:  # noqa: BLE001 - no connection just now, or no right; the next connection tries
        logger.info("what this worker took before it connected anew is not given back: %r", error)
    else:
        if count:
            logger.warning("%d messages that this worker has lost with its connection go back", count)


def _beat(consumer: Any, over: threading.Event, seconds: float) -> bool:
    if over.wait(seconds):
        return False
    try:
        renew(consumer.task_consumer.channel)
    except Exception as error:  # noqa: BLE001 - no connection just now; the next beat finds another
        logger.info("deliveries are not renewed: %r", error)
    return True


def renew(channel: Any) -> None:
    """Renew every delivery that a channel has, and put back those that no worker has renewed in time."""
    tags = list(compat.deliveries(channel.qos))
    if tags:
        with compat.conn_or_acquire(channel)() as client:
            # The server's clock, by which it is decided whether a dead worker had a message.
            seconds, micro = (time.time(), 0) if getattr(channel, "_ojs_stock", True) else client.time()
            now = seconds + micro / 1_000_000
            client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)
    # Kombu does it every 100 seconds, and in green workers never.
    compat.restore_visible(channel.qos)(num=_SWEEP, interval=1)
