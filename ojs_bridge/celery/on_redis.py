"""Redis as the broker: a worker renews the messages that it has, and gives back what dead workers had."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Container, Iterator, Mapping
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.concurrency import solo
from celery.worker import state
from kombu.connection import Connection
from kombu.utils.json import loads

from ..adapters.dead_queues import claimed_on_redis
from ..adapters.presence import Dead, Presence, text_of
from ..bridge import Bridge
from ..config.settings import fetches_reliably
from ..engine.reservations import Reservations
from ..engine.threads import keep_going
from ..errors import ConfigurationError
from ..rules.notations import spoken
from . import compat
from .brokers import Broker
from .dead_queues import is_readable
from .taking import Taking, client_of, keys_of, taking, this_worker

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


class Lists:
    """Dead queues on Redis: a list for each priority, the newest message first."""

    def __init__(self, connection: Connection) -> None:
        self._channel = connection.channel()
        self._client = client_of(self._channel)

    def read(self, name: str, most: int) -> list[Any]:
        """Return at most `most` messages, and leave them where they are."""
        return [message for _, _, message in islice(self._all(name, most), most)] if most else []

    def depth(self, name: str) -> int:
        """Return the number of messages in a queue."""
        return sum(map(self._client.llen, self._keys(name)))

    def oldest(self, name: str) -> list[Mapping[str, Any]]:
        """Return the headers of the oldest message of each list."""
        items = (item for key in self._keys(name) for item in self._client.lrange(key, -1, -1))
        return [message.headers for item in items if (message := self._message(item)) is not None]

    def take(self, name: str, is_it: Callable[[Any], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then` and delete it, unless `then` raises; False without a message."""
        place = next(((key, item) for key, item, message in self._all(name) if is_it(message)), None)
        if place is None:
            return False
        key, item = place
        with claimed_on_redis(self._client, f"{key}.ojs.{hashlib.sha256(item).hexdigest()}") as is_ours:
            if not is_ours or item not in self._client.lrange(key, 0, -1):
                return False
            then()
            self._client.lrem(key, -1, item)
        return True

    def _all(self, name: str, most: int = 0) -> Iterator[tuple[str, bytes, Any]]:
        """Yield the key, the item and the message of each item, from each list at most `most`, or all."""
        for key in self._keys(name):
            for item in self._client.lrange(key, 0, most - 1):
                message = self._message(item)
                if message is not None:
                    yield key, item, message

    def _keys(self, name: str) -> list[str]:
        channel, list_of = self._channel, compat.q_for_pri(self._channel)
        prefix = channel.global_keyprefix or ""
        return [f"{prefix}{list_of(name, step)}" for step in channel.priority_steps]

    def _message(self, item: bytes) -> Any:
        try:
            message = self._channel.Message(loads(item.decode("utf-8")), channel=self._channel)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("a message in a dead queue cannot be read, and stays there: %r", error)
            return None
        return message if is_readable(message) else None


class Redis(Broker):
    """A broker that gives out again what a worker has not acknowledged in time, and does no routing."""

    timeouts = "socket_timeout", "socket_connect_timeout"
    needs = frozenset({compat.REDIS})

    def __init__(self, app: Celery, transport: Any, places: type[Any]) -> None:
        super().__init__(app, transport, places)
        self._is_reliable = fetches_reliably()
        if self._is_reliable:
            self.needs |= {compat.FETCH}

    def caveats(self, bridge: Bridge) -> Iterator[str]:
        """Yield what weakens a promise; raises ConfigurationError for what cannot work."""
        seconds, longest = self.visibility_timeout, bridge.settings.park_after.total_seconds()
        if seconds <= 0:
            raise ConfigurationError(f"visibility_timeout: {seconds!r} must be greater than zero seconds")
        if bridge.store is not None and seconds < longest:
            yield (
                f"visibility_timeout is {seconds:g} s, less than park_after, {longest:g} s: retries wait in "
                "Redis for longer than it lets them, and travel in hops; set park_after below it"
            )

    def long_wait(self, seconds: float) -> tuple[str, str] | None:
        """Return the hazard of a wait beyond the visibility timeout."""
        if seconds <= self.visibility_timeout:
            return None
        return (
            "beyond-visibility-timeout",
            "longer than Redis keeps a message from other workers (visibility_timeout, "
            f"{spoken(self.visibility_timeout)}): the job is delivered again and runs more than once",
        )

    def take_safely(self) -> None:
        """Make the app's workers take a message and note that in the same step; works once.

        A worker outlasts whatever Redis answers: it connects anew, and tries again. Kombu has it end with
        most errors, though Redis may only be full, read-only or without its replicas for a while.
        """
        connect, owed = self.app.connection_for_read, dict[str, None]()
        if not self._is_reliable:
            logger.warning(
                "reliable_fetch is off: a killed worker may lose a job that Redis has just given it"
            )
        if not self._is_reliable or hasattr(connect, "ojs_takes"):
            return

        @functools.wraps(connect)
        def connection_for_read(*args: Any, **options: Any) -> Any:
            from redis import ResponseError

            connection = connect(*args, **options)
            if connection.get_transport_cls() is not self.transport:
                return connection
            create = compat.create_transport(connection)
            connection.connection_errors = (*connection.connection_errors, ResponseError)

            def create_transport() -> Any:
                transport = create()
                if type(transport) is self.transport:
                    transport.Channel, transport.ojs_owed = taking(finding(transport.Channel)), owed
                    transport.connection_errors = connection.connection_errors
                return transport

            compat.create_transport.set(connection, create_transport)
            return connection

        connection_for_read.ojs_takes = True  # type: ignore[attr-defined]
        self.app.connection_for_read = connection_for_read

    def visibility(self, consumer: Any, reservations: Reservations) -> Visibility:
        """Return what renews a consumer's messages, and gives back those of dead workers."""
        return Visibility(consumer, reservations)


@functools.cache
def finding(channel: Any) -> Any:
    """Return a subclass of kombu's channel that knows whether it has found Redis."""
    methods = {compat.on_connection_disconnect.name: Finding.ojs_disconnected}
    return type(channel.__name__, (Finding, channel), {"__module__": channel.__module__, **methods})


class Finding:
    """Mixed into kombu's Redis channel; what is left of one that has not found Redis does no harm.

    Python may collect it when the worker has long found Redis with another channel. Its connection then says
    that it ends, and kombu 5.3 has the worker's loop ask for no message from there on: the worker is deaf.
    """

    _ojs_found = False

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ojs_found = True

    def ojs_disconnected(self: Any, connection: Any) -> None:
        """Say that a connection of this channel ends."""
        if self._ojs_found:
            compat.on_connection_disconnect(super())(connection)


class Visibility:
    """Renews the deliveries that a worker has, and puts back those of dead workers.

    The visibility timeout begins with the delivery, and kombu never renews it. A thread does so here, because
    a warm shutdown ends Celery's timers while jobs still run.
    """

    def __init__(self, consumer: Any, reservations: Reservations) -> None:
        self._consumer, self._reservations = consumer, reservations
        self._over: threading.Event | None = None
        self._presence: Presence | None = None

    def connected(self, channel: Any) -> None:
        """Begin, once, or go on with the channel of a new connection; the thread finds it by itself."""
        consumer = self._consumer
        # A pool that runs a job within the loop would keep the others of a step from other workers.
        runs_within = isinstance(consumer.pool, solo.TaskPool)
        alone = runs_within or consumer.app.conf.get("worker_disable_prefetch")
        channel.ojs_gathers = consumer.hub is not None and not alone
        _channels[self] = channel
        if self._over is None:
            self._over = threading.Event()
            if isinstance(channel, Taking):
                self._presence = present(consumer, self._reservations)
            seconds = channel.visibility_timeout / _BEATS
            keep_going("ojs-visibility", functools.partial(_beat, consumer, self._over, seconds))
        elif isinstance(channel, Taking):
            give_back_strays(channel)

    def end(self) -> None:
        """End: unacknowledged messages go back to their queues now."""
        _channels.pop(self, None)
        if self._over is not None:
            self._over.set()
        if self._presence is not None:
            self._presence.stop()


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


def present(consumer: Any, reservations: Reservations) -> Presence:
    """Let the other workers know that this one lives, and give back what dead workers had."""
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
