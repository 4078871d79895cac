"""Redis as the broker: a worker takes messages so that a kill loses none, and renews what it has.

Kombu pops a message, and the worker writes only later that it has the message. A worker that is killed in
between loses it. Here one script does both, and the command that waits for a message takes nothing. Kombu
also gives up an acknowledgement that finds no connection: the message then keeps its place in the prefetch
count for as long as the worker lives. Here the acknowledgement is made later.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections.abc import Mapping
from importlib.resources import files
from queue import Empty
from types import MappingProxyType
from typing import Any

from celery import Celery, bootsteps

from . import compat

logger = logging.getLogger("ojs_bridge")

#: How often a delivery is renewed within its visibility timeout.
_BEATS = 3
#: The most deliveries of dead workers that go back to their queues at a time.
_SWEEP = 1000
#: Seconds that an idle worker waits at one queue before it looks at all of them, priorities included.
_WAIT_SECONDS = 0.5
#: The most packed commands that a channel keeps: one for each order of its queues.
_MOST_PACKED = 100

_TAKE = files(__package__).joinpath("take.lua").read_text(encoding="utf-8")


def take_safely(app: Celery) -> None:
    """Have an app's worker take a message from Redis and note that in the same step."""
    connect = app.connection_for_read

    @functools.wraps(connect)
    def connection_for_read(*args: Any, **options: Any) -> Any:
        connection = connect(*args, **options)
        create = compat.create_transport(connection)

        def create_transport() -> Any:
            transport = create()
            if _is_redis(transport):
                transport.Channel = _taking(transport.Channel)
            return transport

        compat.create_transport.set(connection, create_transport)
        return connection

    app.connection_for_read = connection_for_read


def _is_redis(transport: Any) -> bool:
    module = sys.modules.get("kombu.transport.redis")
    return module is not None and isinstance(transport, module.Transport)


@functools.cache
def _taking(channel: Any) -> Any:
    """Return a subclass of kombu's channel, or of the user's, that takes messages in the bridge's way."""
    replaced = {compat.can_consume.name: Owing._ojs_may_consume}
    qos = type(channel.QoS.__name__, (Owing, channel.QoS), replaced)
    methods = {compat.brpop_start.name: Taking._ojs_ask, compat.brpop_read.name: Taking._ojs_read}
    own = {"__module__": channel.__module__, "QoS": qos, **methods}
    return type(channel.__name__, (Taking, channel), own)


class Taking:
    """Mixed into kombu's Redis channel; on a server without BLMOVE the channel works as kombu's."""

    #: Whether the next command waits for a message, because the queues were empty.
    _ojs_idle = False
    _ojs_waits = 0
    _ojs_stock = False
    #: The queues that are consumed without acknowledgement, such as those for the answers of other workers.
    _ojs_unacknowledged: frozenset[str] = frozenset()
    #: The packed commands for each order of the queues: redis-py packs one in tens of microseconds.
    _ojs_packed: Mapping[tuple[str, ...], list[bytes]] = MappingProxyType({})

    def basic_consume(self: Any, queue: str, no_ack: bool, *args: Any, **options: Any) -> Any:
        """Consume from a queue."""
        self._ojs_unacknowledged = self._ojs_unacknowledged - {queue} | ({queue} if no_ack else set())
        self._ojs_packed = {}
        return super().basic_consume(queue, no_ack, *args, **options)  # type: ignore[misc]

    def _ojs_ask(self: Any, *args: Any, **options: Any) -> None:
        """Send the command that takes a message or, if the queues were empty, the one that waits for it."""
        queues = compat.queue_cycle(self).consume(len(self.active_queues))
        if self._ojs_stock or not queues:
            compat.brpop_start(super())(*args, **options)
            return
        connection = compat.client_connection(self.client)
        compat.in_poll.set(self, connection)
        compat.brpop_sent_at.set(self, time.monotonic())
        if self._ojs_idle:
            compat.send_command(connection)(*self._ojs_wait(queues))
            return
        packed = self._ojs_packed.get(tuple(queues))
        if packed is None:
            packed = compat.pack_command(connection)(*self._ojs_take(queues))
            kept = self._ojs_packed if len(self._ojs_packed) < _MOST_PACKED else {}
            self._ojs_packed = {**kept, tuple(queues): packed}
        compat.send_packed_command(connection)(packed)

    def _ojs_take(self: Any, queues: list[str]) -> tuple[Any, ...]:
        """Return the command that takes a message; it depends on the order of the queues alone."""
        list_of, prefix = compat.q_for_pri(self), self.global_keyprefix
        lists = [list_of(queue, step) for step in self.priority_steps for queue in queues]
        keys = [prefix + key for key in (self.unacked_key, self.unacked_index_key, *lists)]
        flags = "".join("1" if queue in self._ojs_unacknowledged else "0" for queue in queues)
        return "EVAL", _TAKE, len(keys), *keys, flags * len(self.priority_steps)

    def _ojs_wait(self: Any, queues: list[str]) -> tuple[Any, ...]:
        """Return the command that waits for a message at one queue, and leaves it there."""
        self._ojs_waits += 1
        queue = queues[self._ojs_waits % len(queues)]
        key = self.global_keyprefix + compat.q_for_pri(self)(queue, self.priority_steps[0])
        return "BLMOVE", key, key, "RIGHT", "RIGHT", _WAIT_SECONDS

    def _ojs_read(self: Any, **options: Any) -> Any:
        """Read the answer, and deliver the message in it; raises Empty without one."""
        if self._ojs_stock:
            return compat.brpop_read(super())(**options)
        if self._ojs_idle:
            self._ojs_idle = False
            return self._ojs_waited(**options)
        self._ojs_idle = True
        found = compat.brpop_read(super())(**options)
        self._ojs_idle = False
        return found

    def _ojs_waited(self: Any, **options: Any) -> Any:
        """Read the answer to a wait; the next command looks at every queue in any case."""
        connection = compat.client_connection(self.client)
        try:
            compat.parse_response(self.client)(connection, "BLMOVE", **options)
        except self.connection_errors:
            connection.disconnect()
            raise
        except self.ResponseError as error:
            self._ojs_stock = True
            logger.warning("a killed worker may lose a job that Redis has just given it: %s", error)
        finally:
            compat.in_poll.set(self, None)
            compat.flush_brpop_reauth(self, lambda: None)()
        raise Empty


class Owing:
    """Mixed into the class in which kombu counts a Redis channel's deliveries."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._ojs_owed: dict[str, None] = {}

    def ack(self: Any, delivery_tag: str) -> None:
        """Acknowledge a delivery, or without a connection note it, to acknowledge it when Redis is back."""
        try:
            super().ack(delivery_tag)  # type: ignore[misc]
        except self.channel.connection_errors:
            self._ojs_owed[delivery_tag] = None
            raise
        self._ojs_owed.pop(delivery_tag, None)

    def _ojs_may_consume(self: Any) -> bool:
        """Return whether the consumer may take another message; its loop asks each time."""
        if self._ojs_owed:
            self._ojs_pay()
        return bool(compat.can_consume(super())())

    def _ojs_pay(self: Any) -> None:
        for delivery_tag in list(self._ojs_owed):
            try:
                self.ack(delivery_tag)
            except self.channel.connection_errors:
                break


class Visibility(bootsteps.StartStopStep):  # type: ignore[misc]
    """Renews the deliveries that a worker has, and puts back those of dead workers.

    The visibility timeout begins with the delivery, and kombu never renews it. A thread does so here, because
    a warm shutdown ends Celery's timers while jobs still run.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def __init__(self, consumer: Any, **options: Any) -> None:
        super().__init__(consumer, **options)
        self._over: threading.Event | None = None

    def start(self, consumer: Any) -> None:
        """Begin, once, where the transport is Redis; the thread finds a new connection by itself."""
        channel = consumer.task_consumer.channel
        if self._over is None and hasattr(channel, "unacked_index_key"):
            self._over = threading.Event()
            seconds = channel.visibility_timeout / _BEATS
            beating = threading.Thread(
                target=_beat, args=(consumer, self._over, seconds), name="ojs-visibility", daemon=True
            )
            beating.start()

    def stop(self, consumer: Any) -> None:
        """Go on: the worker connects anew, or a warm shutdown waits for running jobs."""

    def shutdown(self, _: Any) -> None:
        """End: unacknowledged messages go back to their queues now."""
        if self._over is not None:
            self._over.set()

    terminate = shutdown


def _beat(consumer: Any, over: threading.Event, seconds: float) -> None:
    while not over.wait(seconds):
        try:
            renew(consumer.task_consumer.channel)
        except Exception as error:  # noqa: BLE001 - no connection just now; the next beat finds another
            logger.info("deliveries are not renewed: %r", error)


def renew(channel: Any) -> None:
    """Renew every delivery that a channel has, and put back those that no worker has renewed in time."""
    tags = list(compat.deliveries(channel.qos))
    if tags:
        now = time.time()
        with compat.conn_or_acquire(channel)() as client:
            client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)
    # Kombu does it every 100 seconds, and in green workers never.
    compat.restore_visible(channel.qos)(num=_SWEEP, interval=1)
