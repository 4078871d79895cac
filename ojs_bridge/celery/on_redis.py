"""Redis as the broker: messages are taken so that no kill loses one, and kept from a second worker.

Kombu pops a message and writes only later, from the worker, that somebody has it: what was popped and not
yet read when the worker was killed is gone. Here one script does both, and what waits for a message takes
nothing. An acknowledgement that finds no connection is given up by kombu, and the delivery is held, with its
place in the prefetch count, for as long as the worker lives; here it is made up for.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Mapping
from queue import Empty
from types import MappingProxyType
from typing import Any

from celery import Celery, bootsteps

logger = logging.getLogger("ojs_bridge")

#: How often a delivery is renewed before its visibility timeout ends.
BEATS = 3
#: How many lost deliveries go back to their queues at a time.
SWEEP = 1000


#: Seconds that an idle worker waits at one queue before it looks at all of them, priorities included.
WAIT_SECONDS = 0.5
#: How many packed commands a channel keeps: one for each turn of its queues, which may come and go.
MOST_PACKED = 100

#: KEYS: unacked, its index, then queues by priority. ARGV: for each queue whether it is consumed without
#: acknowledging (1) or not (0); now. Writes what kombu does when it has read a message, and first, for a
#: server without memory refuses that, and nothing may be popped then.
_TAKE = """
for n = 3, #KEYS do
  local item = redis.call('LINDEX', KEYS[n], -1)
  if item then
    local owed = string.sub(ARGV[1], n - 2, n - 2) == '0'
    local read, message = pcall(cjson.decode, owed and item or '')
    local properties = read and type(message) == 'table' and message.properties
    local info = properties and properties.delivery_info
    if info and properties.delivery_tag then
      local route = cjson.encode(info.exchange or '') .. ',' .. cjson.encode(info.routing_key or '')
      redis.call('ZADD', KEYS[2], ARGV[2], properties.delivery_tag)
      redis.call('HSET', KEYS[1], properties.delivery_tag, '[' .. item .. ',' .. route .. ']')
    end
    redis.call('RPOP', KEYS[n])
    return {KEYS[n], item}
  end
end
return false
"""


def take_safely(app: Celery) -> None:
    """Have what an app's worker consumes from Redis taken in one step with noting who has it."""
    connect = app.connection_for_read

    @functools.wraps(connect)
    def connection_for_read(*args: Any, **options: Any) -> Any:
        connection = connect(*args, **options)
        create = connection.create_transport

        def create_transport() -> Any:
            transport = create()
            if _is_redis(transport):
                transport.Channel = _taking(transport.Channel)
            return transport

        connection.create_transport = create_transport
        return connection

    app.connection_for_read = connection_for_read


def _is_redis(transport: Any) -> bool:
    module = sys.modules.get("kombu.transport.redis")
    return module is not None and isinstance(transport, module.Transport)


@functools.cache
def _taking(channel: Any) -> Any:
    qos = type(channel.QoS.__name__, (Owing, channel.QoS), {})
    return type(channel.__name__, (Taking, channel), {"__module__": channel.__module__, "QoS": qos})


class Taking:
    """Mixed into kombu's Redis channel; that of a server without BLMOVE stays as it is."""

    _ojs_idle = False
    _ojs_waits = 0
    _ojs_stock = False
    #: The queues that are consumed without acknowledging, as a worker that mingles reads the answers.
    _ojs_unacknowledged: frozenset[str] = frozenset()
    _ojs_packed: Mapping[tuple[str, ...], bytes] = MappingProxyType({})

    def basic_consume(self: Any, queue: str, no_ack: bool, *args: Any, **options: Any) -> Any:
        """Consume from a queue."""
        unacknowledged = self._ojs_unacknowledged - {queue} | ({queue} if no_ack else set())
        if unacknowledged != self._ojs_unacknowledged:
            self._ojs_unacknowledged, self._ojs_packed = unacknowledged, {}
        return super().basic_consume(queue, no_ack, *args, **options)  # type: ignore[misc]

    def _brpop_start(self: Any, *args: Any, **options: Any) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if self._ojs_stock or not queues:
            super()._brpop_start(*args, **options)  # type: ignore[misc]
            return
        self._in_poll = connection = self.client.connection
        self._brpop_sent_at = time.monotonic()
        if self._ojs_idle:
            connection.send_command(*self._ojs_wait(queues))
        else:
            now = b"%.6f" % time.time()
            # In one piece, for each piece is sent, and wakes the server, by itself.
            command = b"%b$%d\r\n%b\r\n" % (self._ojs_take(tuple(queues)), len(now), now)
            connection.send_packed_command((command,))

    def _ojs_take(self: Any, queues: tuple[str, ...]) -> bytes:
        """Return the command but for its last word, the time; packed once, for every message asks with it."""
        packed: bytes | None = self._ojs_packed.get(queues)
        if packed is None:
            keys = [self._q_for_pri(queue, step) for step in self.priority_steps for queue in queues]
            flags = "".join(str(int(queue in self._ojs_unacknowledged)) for queue in queues)
            keys = [self.global_keyprefix + key for key in (self.unacked_key, self.unacked_index_key, *keys)]
            words = ("EVAL", _TAKE, len(keys), *keys, flags * len(self.priority_steps))
            _, rest = b"".join(self.client.connection.pack_command(*words)).split(b"\r\n", 1)
            packed = b"*%d\r\n%s" % (len(words) + 1, rest)
            known = self._ojs_packed if len(self._ojs_packed) < MOST_PACKED else {}
            self._ojs_packed = {**known, queues: packed}
        return packed

    def _ojs_wait(self: Any, queues: list[str]) -> list[Any]:
        """Wait for a message at one queue, and put it back where it was."""
        self._ojs_waits += 1
        key = self.global_keyprefix + self._q_for_pri(
            queues[self._ojs_waits % len(queues)], self.priority_steps[0]
        )
        return ["BLMOVE", key, key, "RIGHT", "RIGHT", WAIT_SECONDS]

    def _brpop_read(self: Any, **options: Any) -> Any:
        if self._ojs_stock:
            return super()._brpop_read(**options)  # type: ignore[misc]
        if self._ojs_idle:
            self._ojs_idle = False
            return self._ojs_waited(**options)
        self._ojs_idle = True
        found = super()._brpop_read(**options)  # type: ignore[misc]
        self._ojs_idle = False
        return found

    def _ojs_waited(self: Any, **options: Any) -> Any:
        """Read the answer to a wait; whatever it is, the queues are to be looked at now."""
        try:
            self.client.parse_response(self.client.connection, "BLMOVE", **options)
        except self.connection_errors:
            self.client.connection.disconnect()
            raise
        except self.ResponseError as error:
            self._ojs_stock = True
            logger.warning("a killed worker may lose a job that Redis has just given it: %s", error)
        finally:
            self._in_poll = None
            getattr(self, "_flush_brpop_reauth", lambda: None)()
        raise Empty


class Owing:
    """Mixed into the account that kombu keeps of a Redis channel's deliveries."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ojs_owed: dict[str, None] = {}

    def ack(self: Any, delivery_tag: str) -> None:
        """Acknowledge a delivery; one that cannot be now is acknowledged when Redis is back."""
        try:
            super().ack(delivery_tag)  # type: ignore[misc]
        except self.channel.connection_errors:
            self._ojs_owed[delivery_tag] = None
            raise
        self._ojs_owed.pop(delivery_tag, None)

    def can_consume(self: Any) -> bool:
        """Return whether a next message may be taken, which is asked at every turn of the consumer's loop."""
        if self._ojs_owed:
            self._ojs_pay()
        return bool(super().can_consume())  # type: ignore[misc]

    def _ojs_pay(self: Any) -> None:
        for delivery_tag in list(self._ojs_owed):
            try:
                self.ack(delivery_tag)
            except self.channel.connection_errors:
                break


class Visibility(bootsteps.StartStopStep):  # type: ignore[misc]
    """Renews what a worker runs, or holds until it is due, and returns what dead workers held.

    Redis measures the visibility timeout from the delivery, and kombu never renews it (DESIGN section 7.2).
    A thread of its own, because a warm shutdown ends Celery's timers while jobs still run.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._over: threading.Event | None = None

    def start(self, consumer: Any) -> None:
        """Begin, once, where the transport is Redis; a new connection is found by itself."""
        channel = consumer.task_consumer.channel
        if self._over is None and hasattr(channel, "unacked_index_key"):
            self._over = threading.Event()
            seconds = channel.visibility_timeout / BEATS
            beating = threading.Thread(
                target=_beat, args=(consumer, self._over, seconds), name="ojs-visibility", daemon=True
            )
            beating.start()

    def stop(self, consumer: Any) -> None:
        """Go on: the connection is being renewed, or a warm shutdown waits for what runs."""

    def shutdown(self, _: Any) -> None:
        """End: what is unacknowledged goes back to its queue now."""
        if self._over is not None:
            self._over.set()

    terminate = shutdown


def _beat(consumer: Any, over: threading.Event, seconds: float) -> None:
    while not over.wait(seconds):
        try:
            keep(consumer.task_consumer.channel)
        except Exception as error:  # noqa: BLE001 - no connection just now; the next beat finds another
            logger.info("deliveries are not renewed: %r", error)


def keep(channel: Any) -> None:
    """Renew every delivery that a channel has, and put back those that nobody renewed in time."""
    tags = list(channel.qos._delivered)
    if tags:
        now = time.time()
        with channel.conn_or_acquire() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)
    # Green workers never do it themselves, and others only every 100 seconds.
    channel.qos.restore_visible(num=SWEEP, interval=1)
