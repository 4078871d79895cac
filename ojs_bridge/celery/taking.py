"""Redis as the broker: a worker takes messages so that a kill loses none, many in one trip.

Kombu pops a message from a queue, and notes only later that this worker has it. A kill in between loses the
message. The script `take.lua` does both in one step, and notes the worker's name. So another worker can give
the message back when this one has died. What another worker has now, this one cannot acknowledge.

A worker asks Redis in one of three ways, its steps:

    take --- messages -----------------------------------------------> take
    take --- none, and this worker may listen ------------> listen --> listen when it rings, or after 2 s
    take --- none, and others listen, or there is no bell --> wait --> take after half a second at one queue

- `take` answers at once, with as many messages as the worker has room for.
- `listen` asks once more, and lets a bell ring when one of the queues changes. Two of the free workers of the
  same queues listen: if all did, all would come for each message. They `take` again for their places to last.
- `wait` takes nothing: it returns when the queue has a message.

Kombu makes three trips a job, and its loop stands still for two of them. Here a question for messages carries
the acknowledgements, and the loop goes on meanwhile. An acknowledgement that finds no connection is sent
later.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
import uuid
from contextlib import suppress
from importlib.resources import files
from itertools import islice
from queue import Empty
from typing import Any, Literal, TypeAlias

from kombu.transport.virtual import QoS
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from kombu.utils.scheduling import priority_cycle, round_robin_cycle

from ..adapters.presence import present_key, text_of
from . import compat

logger = logging.getLogger("ojs_bridge")

#: Seconds after which an idle worker looks at its queues, though no bell has rung; and after which it asks
#: for its place among those that listen anew: `take.lua` keeps that for seven at least.
_REST_SECONDS, _PLACE_SECONDS = 2.0, 5.0
#: Seconds in which Redis rings a bell that is tried.
_RING_SECONDS = 1.0
#: Seconds that it waits at one queue before it looks at all, priorities included, if Redis rings no bell.
_WAIT_SECONDS = 0.5
#: The codes of errors that pass: a master without replicas takes no writes, a replica waits for no message.
_PASSING = ("NOREPLICAS", "UNBLOCKED", "MISCONF", "BUSY ")
#: The same by the classes of redis-py, which leaves their codes out of the text: a master has become a
#: replica, is full, or is without its cluster.
_PASSING_CLASSES = ("ReadOnlyError", "OutOfMemoryError", "MasterDownError", "ClusterDownError")
#: How servers say that a user may not run a command, or that a script may not for this user.
_DENIED = ("permission", "executing the script")

#: A step in which a worker asks Redis for messages.
Step: TypeAlias = Literal["take", "listen", "wait"]
#: The most messages that a worker takes, and acknowledges, in one step.
_MOST = 100

_TAKE = files(__package__).joinpath("take.lua").read_text(encoding="utf-8")
_TAKE_SHA = hashlib.sha1(_TAKE.encode(), usedforsecurity=False).hexdigest()


@functools.cache
def _worker(_process: int) -> str:
    return uuid.uuid4().hex


def this_worker() -> str:
    """Return the name under which this process takes messages."""
    return _worker(os.getpid())


def client_of(channel: Any) -> Any:
    """Return redis-py's own client for a channel's connections; kombu's puts its prefix before some keys."""
    client = getattr(channel, "_ojs_client", None)
    if client is None or client.connection_pool is not channel.pool:
        from redis import Redis

        client = channel._ojs_client = Redis(connection_pool=channel.pool)
    return client


def _take_keys(channel: Any) -> tuple[str, ...]:
    """Return the keys of the script that takes messages, but for the queues' lists.

    Workers of the same queues share the last one.
    """
    keys = keys_of(channel)
    queues = hashlib.sha1("\n".join(sorted(channel.active_queues)).encode(), usedforsecurity=False)
    return *keys, present_key(keys[0]), f"{keys[0]}_ojs_listeners.{queues.hexdigest()[:8]}"


def keys_of(channel: Any) -> tuple[str, str, str]:
    """Return the keys of the unacknowledged messages, of their index, and of their workers."""
    prefix, unacked = channel.global_keyprefix, channel.unacked_key
    return prefix + unacked, prefix + channel.unacked_index_key, f"{prefix}{unacked}_ojs_workers"


@functools.cache
def taking(channel: Any) -> Any:
    """Return a subclass of kombu's channel, or of the user's, that takes messages in the bridge's way."""
    replaced = {compat.can_consume.name: Owing._ojs_may_consume}
    qos = type(channel.QoS.__name__, (Owing, channel.QoS), replaced)
    methods = {compat.brpop_start.name: Taking._ojs_ask, compat.brpop_read.name: Taking._ojs_read}
    own = {"__module__": channel.__module__, "QoS": qos, **methods}
    return type(channel.__name__, (Taking, channel), own)


class Taking:
    """Mixed into kombu's Redis channel; on a server without BLMOVE the channel works as kombu's."""

    #: Whether the worker's loop goes on while messages wait for it; then many travel in one step.
    ojs_gathers = False
    #: What the awaited answer is of, and what comes next: "take" messages, "listen" for some while there are
    #: none, or "wait" for one at one queue.
    _ojs_step: Step = "take"
    _ojs_next: Step = "take"
    _ojs_waits = 0
    #: None before it is needed, False on a server that rings none.
    _ojs_bell: Bell | Literal[False] | None = None
    #: Whether the bell is waited for, and until when; and when the place among those that listen is old.
    _ojs_resting = False
    _ojs_rest_ends = _ojs_place_ends = 0.0
    _ojs_stock = False
    #: Whether kombu itself takes the next message, which the script cannot read.
    _ojs_next_is_stock = False
    #: Whether a message is being delivered that the script has noted.
    _ojs_noted = False
    #: The queues in the order of the last question, and the acknowledgements that went with it.
    _ojs_asked: tuple[str, ...] = ()
    _ojs_sent: tuple[str, ...] = ()
    #: The queues that are consumed without acknowledgement, such as those for the answers of other workers.
    _ojs_unacknowledged: frozenset[str] = frozenset()

    def basic_consume(self: Any, queue: str, no_ack: bool, *args: Any, **options: Any) -> Any:
        """Consume from a queue."""
        self._ojs_unacknowledged = self._ojs_unacknowledged - {queue} | ({queue} if no_ack else set())
        self._ojs_resting = False
        return super().basic_consume(queue, no_ack, *args, **options)  # type: ignore[misc]

    def close(self: Any) -> None:
        """Close, in an outage, too.

        Kombu first reads the answer to its last command. Where that fails, it closes the channel once more
        without its connection, and the worker ends.
        """
        if compat.in_poll(self):
            with suppress(Empty, *self.connection_errors):
                compat.brpop_read(self)()
        if self._ojs_bell:
            self._ojs_bell.close()
            self._ojs_bell = False
        super().close()  # type: ignore[misc]

    def basic_cancel(self: Any, consumer_tag: str) -> Any:
        """End a consumer; with the last one, what was asked for goes back: jobs may run for long."""
        result = super().basic_cancel(consumer_tag)  # type: ignore[misc]
        if self.ojs_gathers and not self.active_queues:
            if compat.in_poll(self) and self._ojs_step != "wait":
                with suppress(Empty):
                    compat.brpop_read(self)()
            self.qos.ojs_pay()
        return result

    @property
    def ojs_defers(self: Any) -> bool:
        """Whether the loop sends acknowledgements at its next turn."""
        return bool(self.ojs_gathers and not self._ojs_stock and self.active_queues)

    def _ojs_ask(self: Any, *args: Any, **options: Any) -> None:
        """Send the command of the next step; nothing while the worker waits for the bell."""
        queues = tuple(compat.queue_cycle(self).consume(len(self.active_queues)))
        if self._ojs_stock or self._ojs_next_is_stock or not queues:
            compat.brpop_start(super())(*args, **options)
            return
        sent = tuple(islice(self.qos.ojs_owed, _MOST)) if self.ojs_defers else ()
        now = time.monotonic()
        if self._ojs_resting and not sent and not self._ojs_bell.rang:
            if now < self._ojs_rest_ends:
                return
            self._ojs_next = "listen" if now < self._ojs_place_ends else "take"
        connection = compat.client_connection(self.client)
        step: Step = "take" if sent else self._ojs_next
        if step == "listen" and not self._ojs_set_bell(connection):
            step = "wait"
        compat.in_poll.set(self, connection)
        compat.brpop_sent_at.set(self, now)
        self._ojs_sent, self._ojs_asked, self._ojs_step, self._ojs_resting = sent, queues, step, False
        if step == "listen":
            self._ojs_bell.rang, self._ojs_rest_ends = False, now + _REST_SECONDS
            compat.send_command(connection)("CLIENT", "CACHING", "YES")
        words = self._ojs_wait(queues) if step == "wait" else self._ojs_take(queues, step)
        compat.send_command(connection)(*words)

    def _ojs_set_bell(self: Any, connection: Any) -> bool:
        """Let a bell ring for a connection; return whether Redis does that."""
        flaw: object = "it rings no bell"
        try:
            self._ojs_bell = bell = self._ojs_bell or Bell(self)
            if bell.is_set or bell.set(connection, f"{keys_of(self)[2]}:bell"):
                return True
        except self.ResponseError as error:
            flaw = error
        logger.info(
            "Redis does not tell when a message comes, and workers find some half a second late: %s", flaw
        )
        if self._ojs_bell:
            self._ojs_bell.close()
        self._ojs_bell = False
        return False

    def _ojs_take(self: Any, queues: tuple[str, ...], step: Step) -> tuple[Any, ...]:
        """Return the command that takes messages, and acknowledges some."""
        list_of, prefix = compat.q_for_pri(self), self.global_keyprefix
        lists = [prefix + list_of(queue, priority) for priority in self.priority_steps for queue in queues]
        keys = *_take_keys(self), *lists
        flags = "".join("1" if queue in self._ojs_unacknowledged else "0" for queue in queues)
        # While it listens, a read of the listeners would have the bell ring for each of them.
        asks, turns = step == "take" and self._ojs_bell is not False, self._ojs_turns is True
        words = flags, this_worker(), int(turns), self._ojs_room(), int(asks), *self._ojs_sent
        return "EVALSHA", _TAKE_SHA, len(keys), *keys, *words

    @property
    def _ojs_turns(self: Any) -> bool | None:
        """Whether a queue that has given a message comes last; None if the user's own class decides that."""
        rotate = type(compat.queue_cycle(self)).rotate
        return {round_robin_cycle.rotate: True, priority_cycle.rotate: False}.get(rotate)

    def _ojs_room(self: Any) -> int:
        """Return the most messages to take now."""
        if not self.ojs_gathers or self._ojs_turns is None:
            return 1
        room = self.qos.can_consume_max_estimate()
        return _MOST if room is None else max(1, min(room, _MOST))

    def _ojs_wait(self: Any, queues: tuple[str, ...]) -> tuple[Any, ...]:
        """Return the command that waits for a message at one queue, and leaves it there."""
        self._ojs_waits += 1
        queue = queues[self._ojs_waits % len(queues)]
        key = self.global_keyprefix + compat.q_for_pri(self)(queue, self.priority_steps[0])
        return "BLMOVE", key, key, "RIGHT", "RIGHT", _WAIT_SECONDS

    def _ojs_read(self: Any, **options: Any) -> Any:
        """Read the answer, and deliver the messages in it; raises Empty without one."""
        if self._ojs_stock or self._ojs_next_is_stock:
            self._ojs_next_is_stock = False
            return compat.brpop_read(super())(**options)
        step, sent = self._ojs_step, self._ojs_sent
        self._ojs_step, self._ojs_sent, self._ojs_next = "take", (), "take"
        try:
            taken = self._ojs_answer(step, **options)
        except self.ResponseError as error:
            self._ojs_refused(error, step == "wait")
            raise Empty from None
        for delivery_tag in sent:
            self.qos.ojs_owed.pop(delivery_tag, None)
        if step != "wait" and not taken:
            self._ojs_next = "listen" if step == "listen" else "wait"
            self._ojs_resting = step == "listen" and self._ojs_bell.is_set
        if taken == 1:
            self._ojs_next, self._ojs_place_ends = "listen", time.monotonic() + _PLACE_SECONDS
        if step == "wait" or not taken or taken == 1:
            raise Empty
        self._ojs_deliver([(self._ojs_asked[n % len(self._ojs_asked)], tag, item) for n, tag, item in taken])
        return True

    def _ojs_answer(self: Any, step: Step, **options: Any) -> Any:
        connection = compat.client_connection(self.client)
        try:
            if step == "listen":
                try:
                    connection.read_response()
                except self.ResponseError:
                    # Kombu has connected anew.
                    self._ojs_bell.is_set = False
            command = "BLMOVE" if step == "wait" else "EVALSHA"
            return compat.parse_response(self.client)(connection, command, **options)
        except self.ResponseError:
            raise
        except self.connection_errors:
            connection.disconnect()
            raise
        finally:
            compat.in_poll.set(self, None)
            compat.flush_brpop_reauth(self, lambda: None)()

    def _ojs_refused(self: Any, error: Exception, waited: bool) -> None:
        """Find another way to take messages; raises the error if there is none."""
        if str(error).startswith(_PASSING) or type(error).__name__ in _PASSING_CLASSES:
            raise error
        if "OJSNATIVE" in str(error):
            self._ojs_next_is_stock = True
        elif waited or any(word in str(error).lower() for word in _DENIED):
            self._ojs_give_up(error)
        elif type(error).__name__ == "NoScriptError":
            client_of(self).script_load(_TAKE)
        else:
            raise error

    def _ojs_deliver(self: Any, taken: list[tuple[str, bytes | str, bytes | str]]) -> None:
        """Deliver messages that the script has noted; those of a queue that has no consumer now go back."""
        deliver, consumers = compat.deliver(self.connection), compat.callbacks(self.connection)
        for _, tag, _ in taken:
            # If an error keeps a message from being delivered, the channel gives it back as it closes.
            if tag:
                QoS.append(self.qos, None, text_of(tag))
        # The last one goes to the head of its queue first.
        for queue, tag, _ in reversed(taken):
            if tag and queue not in consumers:
                self.qos.restore_by_tag(text_of(tag))
                QoS.ack(self.qos, text_of(tag))
        for queue, tag, item in taken:
            if tag and queue not in consumers:
                continue
            compat.queue_cycle(self).rotate(queue)
            self._ojs_noted = bool(tag)
            try:
                deliver(loads(bytes_to_str(item)), queue)
            finally:
                self._ojs_noted = False

    def _ojs_give_up(self: Any, error: Exception) -> None:
        """Take messages in kombu's way from now on: this server has no such command, or does not allow it."""
        self._ojs_stock = True
        logger.warning("a killed worker may lose a job that Redis has just given it: %s", error)


class Owing:
    """Mixed into the class in which kombu counts a Redis channel's deliveries."""

    def __init__(self: Any, channel: Any, *args: Any, **options: Any) -> None:
        super().__init__(channel, *args, **options)  # type: ignore[call-arg]
        #: What is to be acknowledged; the channel that comes after an outage acknowledges what is left.
        self.ojs_owed: dict[str, None] = channel.connection.ojs_owed

    def append(self: Any, message: Any, delivery_tag: str) -> None:
        """Count a delivery; kombu's own way would note once more in Redis what the script has noted."""
        if self.channel._ojs_noted:
            self.channel._ojs_noted = False
            QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)  # type: ignore[misc]

    def ack(self: Any, delivery_tag: str) -> None:
        """Acknowledge a delivery: now, or with the next question for messages."""
        self.ojs_owed[delivery_tag] = None
        QoS.ack(self, delivery_tag)
        if not self.channel.ojs_defers:
            self.ojs_pay()

    def restore_by_tag(self: Any, tag: str, *args: Any, **options: Any) -> None:
        """Put a delivery back into its queue, where it has no worker."""
        # First, or the note of a worker that takes it at once might be lost.
        if not self.channel._ojs_stock:
            client_of(self.channel).hdel(keys_of(self.channel)[2], tag)
        super().restore_by_tag(tag, *args, **options)  # type: ignore[misc]

    def restore_unacked_once(self: Any, *args: Any, **options: Any) -> None:
        """Put back what is not acknowledged: the channel closes."""
        self._ojs_try_to_pay()
        super().restore_unacked_once(*args, **options)  # type: ignore[misc]

    def _ojs_may_consume(self: Any) -> bool:
        """Return whether the consumer may take another message; its loop asks at each turn."""
        room = bool(compat.can_consume(super())())
        # With room, and if nothing is awaited that may take long, the next question acknowledges.
        if self.ojs_owed and not (room and self.channel.ojs_defers and self.channel._ojs_step != "wait"):
            self._ojs_try_to_pay()
        return room

    def _ojs_try_to_pay(self: Any) -> None:
        try:
            self.ojs_pay()
        except self.channel.connection_errors:
            logger.info("acknowledgements wait for Redis")

    def ojs_pay(self: Any) -> None:
        """Acknowledge all that is owed, and wait for the answer."""
        while owed := tuple(islice(self.ojs_owed, _MOST)):
            if self.channel._ojs_stock:
                for delivery_tag in owed:
                    super().ack(delivery_tag)  # type: ignore[misc]
            else:
                take = client_of(self.channel).register_script(_TAKE)
                take(_take_keys(self.channel), ["", this_worker(), 0, 0, 0, *owed])
            for delivery_tag in owed:
                self.ojs_owed.pop(delivery_tag, None)


class Bell:
    """Rings when a list changes that a channel has found empty, by what Redis calls client tracking.

    Redis tells a second connection when a key changes that the channel's own connection has asked to be told
    of. Kombu's poller takes the bell for a channel with that second connection.
    """

    def __init__(self, channel: Any) -> None:
        from redis import Redis

        # Its own object, or redis-py would give the connection back to the pool.
        self._client = Redis(connection_pool=channel.pool, single_connection_client=True)
        self.connection = compat.client_connection(self._client)
        self._number = self._client.client_id()
        self._cycle = channel.connection.cycle
        self.qos, self.handlers = self, {"BELL": self.hear}
        #: Whether it rings for the channel's connection, which may be another one later.
        self.is_set = False
        self.rang = False
        self._say(self.connection, "SUBSCRIBE", "__redis__:invalidate")
        compat.register(self._cycle)(self, self, "BELL")

    def set(self, connection: Any, key: str) -> bool:
        """Let it ring for a connection; return whether it rings when a key is tried."""
        self._say(connection, "CLIENT", "TRACKING", "ON", "REDIRECT", self._number, "OPTIN")
        self._say(connection, "CLIENT", "CACHING", "YES")
        self._say(connection, "EVAL", "return redis.call('LINDEX', KEYS[1], -1)", 1, key)
        self._say(connection, "RPUSH", key, "")
        self._say(connection, "DEL", key)
        self.is_set = self.connection.can_read(timeout=_RING_SECONDS)
        return self.is_set

    def _say(self, connection: Any, *words: object) -> None:
        compat.send_command(connection)(*words)
        connection.read_response(push_request=True)

    def can_consume(self) -> bool:
        """Return True: kombu's poller asks before it lets a channel read."""
        return True

    def hear(self, *_: str) -> None:
        """Read all that Redis has told; kombu's poller calls it."""
        self.rang = True
        while self.connection.can_read(timeout=0):
            self.connection.read_response(push_request=True)

    def close(self) -> None:
        """Ring no more."""
        compat.unregister(self._cycle)(self, self, "BELL")
        owners = compat.fd_to_chan(self._cycle)
        for descriptor in [fd for fd, (owner, _) in owners.items() if owner is self]:
            del owners[descriptor]
        self.connection.disconnect()
