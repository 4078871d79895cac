"""The broker of a fleet: what differs between the kinds of brokers is a method of their objects."""

from __future__ import annotations

import functools
import logging
import math
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any
from uuid import uuid4

import dramatiq
from dramatiq import Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.common import dq_name, xq_name
from dramatiq.errors import ConnectionClosed, DecodeError

from ..adapters.dead_queues import NOT_FOUND
from ..adapters.presence import Presence
from ..adapters.private_names import numbers_of
from ..bridge import Bridge
from ..engine.reservations import UNTOLD, Reservations
from ..engine.runs import Backlog
from ..engine.storage_retry import Outage
from ..engine.threads import cached
from ..rules.job import Job
from ..rules.notations import spoken
from . import compat, on_redis
from .compat import dead_letters_by_queue, ids_of, messages_of, parameters
from .dead_queues import (
    DeadElsewhere,
    DeadInMemory,
    DeadOnRabbitMQ,
    DeadOnRedis,
    PikaQueues,
    Places,
)
from .delivery import Acknowledgements, Delivery, is_dropped
from .keeping import KEPT_AT_MOST
from .on_redis import Hands, JointAcknowledgements
from .receiving import (
    Take,
    Wake,
    bounded,
    flaw_of,
    flaw_on_redis,
    listening,
    polling,
    put_away,
    readable,
    say_flaw,
    widening,
)
from .translate import bare_job, encodable, is_refusal, job_of, outages, redis_outages

logger = logging.getLogger("ojs_bridge")

#: How long RabbitMQ waits for an acknowledgement, unless its `consumer_timeout` says otherwise.
PATIENCE = timedelta(minutes=30)
#: Whether Dramatiq publishes to RabbitMQ with the `mandatory` flag.
_MISSES_QUEUES = numbers_of(dramatiq.__version__) >= (2, 2)
#: The attribute of a broker that has the object of its kind.
KIND = "_ojs_kind"


class AnyBroker:
    """A broker that is not Dramatiq's own."""

    #: Whether the bridge notes something of each delivery, and not only of delayed ones.
    is_noted = True
    #: Whether it shows a message that left its queue, and is to settle it as Dramatiq does.
    shows_dropped = False
    #: Whether delays may wait in the store: `StubBroker.join` waits for what is in the broker alone.
    parks_delays = True
    #: Returns why no worker can run a message, or None.
    flaw = staticmethod(flaw_of)
    #: The most seconds for which a worker may hold a delivery.
    kept_at_most = math.inf
    #: Where a dead letter goes while the store is away, in words.
    dead_queue = "the broker, where the bridge cannot look for them"
    #: What is not promised on a broker that is not Dramatiq's own, in one sentence.
    less = (
        "{} is no broker of Dramatiq's own: it does not say that a message comes again. A copy that comes "
        "when its job has ended is a new job, a job whose worker was killed comes back when the broker gives "
        "it out again, and the bridge cannot look for its dead letters"
    )

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        #: The name of the kind.
        self.system = type(broker).__name__
        self.less = type(self).less.format(self.system)
        self.dead_places: Places = DeadElsewhere(broker)
        #: What this process has taken from Redis, and not settled; nothing on another broker.
        self.hands = Hands()
        #: What settles and acknowledges for the worker's threads.
        self.acks: Acknowledgements | None = None
        #: What wakes the consumers, by their queues.
        self.wakes: dict[str, Wake] = {}

    @cached
    def outages(self) -> tuple[type[Exception], ...]:
        """The errors of a broker that cannot be reached, or takes no more."""
        return outages()

    def caveats(self, bridge: Bridge) -> Iterator[str]:
        """Yield what weakens a promise."""
        if self.less:
            yield self.less

    def long_wait(self) -> str:
        """Return where a long delay of Dramatiq's is, and what becomes of it, in words."""
        return "in a worker's memory, where it is delayed or stranded if the broker or the worker goes away"

    def long_run(self, seconds: float) -> str | None:
        """Return what becomes of a run that may take so long, if it is delivered again meanwhile."""

    def backlog(self, queues: Sequence[str]) -> Sequence[Backlog] | None:
        """Return the backlog of queues; None if the broker cannot be asked. Raises any error."""

    def forget_shown(self, message_id: str) -> None:
        """Forget a replayed message that is only shown among the dead."""

    def use_dead_queues_as_they_are(self) -> None:
        """Have only those dead queues declared that are missing; others may have other arguments."""

    def confirm(self) -> None:
        """Have the broker confirm what this thread publishes: else a lost message looks like a sent one."""

    def have_queue(self, queue_name: str) -> None:
        """Have the next publication declare a queue that is gone."""

    def swapping(self, message: MessageProxy) -> AbstractContextManager[None]:
        """Let the retry that this thread enqueues take the place of a message, in one step if it can."""
        return nullcontext()

    def boot(self, woken: Callable[[str], None], outage: Outage) -> None:
        """Prepare a process that consumes; `woken` is to hear the queue of each message that it enqueues."""

    def present(self, reservations: Reservations, queues: Callable[[], Iterable[str]]) -> Presence | None:
        """Let other workers know that this one lives, if they give back what dead workers had."""

    def consuming(self, queue_name: str) -> None:
        """Prepare for a new consumer of a queue."""

    def taking(self, inner: Any, thread: Any, queue_name: str, wake: Wake) -> Any:
        """Return the function by which the consumer of a thread takes its next message."""
        return inner.__next__

    def received(self, inner: Any, message: Any, *, is_delayed: bool) -> bool:
        """Note a delivery; False if this process has its message already."""
        setattr(message, compat.redelivered.name, UNTOLD)
        return True

    def has_put_away(self, queue_name: str, error: Exception) -> bool:
        """Move the message that a consumer could not read to the dead queue; False if it is still there."""
        return False

    def leave(self, inner: Any, queue_name: str, message: MessageProxy, flaw: str) -> None:
        """Move a message that no worker can run to the dead queue, as it came."""
        say_flaw(queue_name, flaw)
        inner.nack(message)

    def give_back(self, inner: Any, message: MessageProxy) -> None:
        """Give a message back to its queue."""
        inner.requeue([message])

    def requeue(self, inner: Any, messages: list[MessageProxy]) -> None:
        """Give prefetched messages back."""
        inner.requeue(messages)

    def bury(self, inner: Any, message: MessageProxy) -> None:
        """Put a message with its final state into the dead queue."""
        inner.nack(message)

    def stop_fetching(self, inner: Any) -> None:
        """Leave new messages to other workers, if the broker lets this worker."""

    def close(self, inner: Any, queue_name: str) -> None:
        """Give back what a consumer has fetched and not handed out."""


class InMemory(AnyBroker):
    """StubBroker: it loses no connection, and a unit test looks into it."""

    is_noted, shows_dropped, parks_delays, less = False, True, False, ""
    dead_queue = (
        "the broker's own dead queues (.XQ), which forget them in time, "
        "where `Bridge.broker_letters` finds them"
    )

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self.system, self.dead_places = "stub", DeadInMemory(broker)

    def forget_shown(self, message_id: str) -> None:
        for letters in [*dead_letters_by_queue(self.broker, {}).values()]:
            for shown in [m for m in [*letters] if m.message_id == message_id and is_dropped(m)]:
                letters.remove(shown)

    def taking(self, inner: Any, thread: Any, queue_name: str, wake: Wake) -> Take:
        return bounded(inner, thread) if queue_name == dq_name(queue_name) else inner.__next__

    def give_back(self, inner: Any, message: MessageProxy) -> None:
        compat.stub_queue(inner).put(encodable(message).encode())
        inner.ack(message)

    def requeue(self, inner: Any, messages: list[MessageProxy]) -> None:
        # The broker itself would forget them.
        for message in messages:
            self.give_back(inner, message)


class OnRabbitMQ(AnyBroker):
    """RabbitmqBroker: it confirms what it takes, and takes back what a worker holds for too long."""

    kept_at_most = KEPT_AT_MOST
    dead_queue, less = InMemory.dead_queue, ""

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self.system, self.dead_places = "rabbitmq", DeadOnRabbitMQ(broker)
        self.acks: Acknowledgements = Acknowledgements()

    def caveats(self, bridge: Bridge) -> Iterator[str]:
        longest = bridge.settings.park_after
        if bridge.store and longest >= PATIENCE:
            yield (
                f"park_after is {longest}: RabbitMQ takes a delayed job back from its worker after its "
                f"consumer_timeout, {PATIENCE} by default, again and again; let park_after be shorter"
            )

    def long_wait(self) -> str:
        return (
            "unacknowledged in a worker's memory, and RabbitMQ takes it back after its consumer_timeout, "
            f"{spoken(PATIENCE.total_seconds())} by default, again and again (from RabbitMQ 4.3 on, on "
            "quorum queues only)"
        )

    def long_run(self, seconds: float) -> str | None:
        if seconds <= (longest := PATIENCE.total_seconds()):
            return None
        return (
            f"a run may take longer than RabbitMQ's consumer_timeout, {spoken(longest)} by default (from "
            "4.3 on, on quorum queues only): the job is then delivered again and runs beside itself; with a "
            "store the bridge lets the second one wait"
        )

    def backlog(self, queues: Sequence[str]) -> Sequence[Backlog]:
        from pika import BlockingConnection

        with BlockingConnection(parameters(self.broker)) as connection:
            return [Backlog(queue, PikaQueues(connection).depth(queue)) for queue in queues]

    def use_dead_queues_as_they_are(self) -> None:
        broker = self.broker
        if not hasattr(broker, compat.declare_dead_queue.name):
            return
        from pika.exceptions import ChannelClosedByBroker

        declare = compat.declare_dead_queue(broker)

        def declare_missing(queue_name: str) -> Any:
            try:
                return compat.channel(broker).queue_declare(xq_name(queue_name), passive=True)
            except ChannelClosedByBroker as error:
                if error.reply_code != NOT_FOUND:
                    raise
                compat.channel.delete(broker)
                return declare(queue_name)

        compat.declare_dead_queue.set(broker, declare_missing)

    def confirm(self) -> None:
        if not compat.confirm_delivery(self.broker):
            compat.confirm_delivery.set(self.broker, value=True)
            # The next channel confirms.
            compat.channel.delete(self.broker)

    def have_queue(self, queue_name: str) -> None:
        # Before 2.2 Dramatiq does not notice that a queue is gone.
        if _MISSES_QUEUES:
            return
        from pika.exceptions import AMQPError

        try:
            for name in (queue_name, dq_name(queue_name)):
                compat.channel(self.broker).queue_declare(name, passive=True)
        except AMQPError:
            compat.connection.delete(self.broker)
            compat.queues_pending(self.broker).add(queue_name)

    def taking(self, inner: Any, thread: Any, queue_name: str, wake: Wake) -> Any:
        if queue_name == dq_name(queue_name):
            return listening(inner, thread, queue_name)
        # The other half of what RabbitMQ lets the worker have keeps its threads busy.
        self.acks.lines[0].enough = compat.of_consumer_thread["prefetch"](thread) // 2
        return inner.__next__

    def received(self, inner: Any, message: Any, *, is_delayed: bool) -> bool:
        message.ojs_delivery = Delivery(inner, time.monotonic())
        return True

    def give_back(self, inner: Any, message: MessageProxy) -> None:
        tag, known = compat.tag(message), compat.known_tags(inner)
        if tag in known:
            known.discard(tag)
            channel = compat.consumer_channel(inner)
            compat.consumer_connection(inner).add_callback_threadsafe(
                lambda: channel.basic_nack(tag, requeue=True)
            )

    def bury(self, inner: Any, message: MessageProxy) -> None:
        """Publish a message with its final state to its dead queue.

        If that fails, a plain nack moves it there as it was enqueued, without the last attempt. Raises
        ConnectionClosed if there is no dead queue, and none can be declared: the message stays.
        """
        for last in (False, True):
            try:
                self._publish_dead(message, declares=last)
            except Exception as error:
                # RabbitMQ closes a connection that idled for a while; the next try has a new connection.
                compat.connection.delete(self.broker)
                if last and is_refusal(error):
                    raise ConnectionClosed(error) from error
                if last:
                    logger.exception("job %s: its dead letter lacks its final state", bare_job(message))
            else:
                inner.ack(message)
                return
        inner.nack(message)

    def _publish_dead(self, message: MessageProxy, *, declares: bool) -> None:
        import pika

        self.confirm()
        if declares and hasattr(self.broker, compat.declare_dead_queue.name):
            compat.declare_dead_queue(self.broker)(message.queue_name)
        queue, properties = xq_name(message.queue_name), pika.BasicProperties(delivery_mode=2)
        channel = compat.channel(self.broker)
        channel.basic_publish("", queue, encodable(message).encode(), properties, mandatory=True)


class OnRedis(AnyBroker):
    """RedisBroker: it gives back what dead workers had, if the others tell it of their death."""

    dead_queue, less = InMemory.dead_queue, ""
    flaw = staticmethod(flaw_on_redis)

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self.system, self.dead_places = "redis", DeadOnRedis(broker)

    def caveats(self, bridge: Bridge) -> Iterator[str]:
        return on_redis.caveats(self.broker.client)

    def backlog(self, queues: Sequence[str]) -> Sequence[Backlog]:
        address = self.broker.client.connection_pool.connection_kwargs
        if "host" in address:
            # The client tries a refused connection again, for longer than a probe waits.
            socket.create_connection((address["host"], address.get("port", 6379)), timeout=2.0).close()
        self.broker.client.ping()
        return [self._backlog_of(queue) for queue in queues]

    def _backlog_of(self, queue: str) -> Backlog:
        client, ids = self.broker.client, ids_of(self.broker, queue)
        depth, oldest = client.llen(ids), client.lindex(ids, 0)
        held = client.hget(messages_of(self.broker, queue), oldest) if oldest else None
        try:
            message = Message.decode(held) if held else None
            job = job_of(message, bare_job(message)) if message else None
        except Exception:  # noqa: BLE001 - another encoder's message has no age here
            job = None
        return Backlog(queue, depth, job.due_at if isinstance(job, Job) else None)

    def swapping(self, message: MessageProxy) -> AbstractContextManager[None]:
        return on_redis.replacing(message)

    def boot(self, woken: Callable[[str], None], outage: Outage) -> None:
        # A process that was forked after its broker was made would share what it has fetched with the others.
        compat.worker_id.set(self.broker, str(uuid4()))
        on_redis.replace_on(self.broker, self.hands, woken)
        self.acks = JointAcknowledgements(self.broker, outage)

    def present(self, reservations: Reservations, queues: Callable[[], Iterable[str]]) -> Presence:
        return on_redis.present(self.broker, reservations, queues, self.wakes)

    def consuming(self, queue_name: str) -> None:
        try:
            self.hands.release_strays(self.broker, queue_name)
        except redis_outages() as error:
            raise ConnectionClosed(error) from None

    def taking(self, inner: Any, thread: Any, queue_name: str, wake: Wake) -> Take:
        release = functools.partial(self.hands.release_strays, self.broker, queue_name)
        take = polling(inner, thread, wake, functools.partial(on_redis.seldom, self.broker), release)
        if compat.queue_prefetch(dramatiq.worker, 0) or queue_name == dq_name(queue_name):
            return take
        give_back = functools.partial(on_redis.to_head, self.broker, self.hands, inner, queue_name)
        return widening(inner, thread, take, give_back)

    def received(self, inner: Any, message: Any, *, is_delayed: bool) -> bool:
        return self.hands.take(message, is_delayed=is_delayed)

    def has_put_away(self, queue_name: str, error: Exception) -> bool:
        # An earlier look may have put this message away, though the consumer still had it in memory.
        return put_away(self.broker, queue_name, error) or isinstance(error, (DecodeError, TypeError))

    def leave(self, inner: Any, queue_name: str, message: MessageProxy, flaw: str) -> None:
        put_away(self.broker, queue_name, ValueError(flaw))
        on_redis.forget(inner, message)

    def give_back(self, inner: Any, message: MessageProxy) -> None:
        inner.requeue([message])
        on_redis.forget(inner, message)

    def bury(self, inner: Any, message: MessageProxy) -> None:
        inner.nack(message)
        on_redis.enrich(self.broker, message)

    def stop_fetching(self, inner: Any) -> None:
        # First, for a thread that is about to set another number.
        inner.ojs_stops = True
        compat.redis_prefetch.set(inner, 0)

    def close(self, inner: Any, queue_name: str) -> None:
        fetched = compat.message_cache(inner, [])
        compat.message_cache.set(inner, [])
        if fetched:
            inner.requeue(readable(fetched, queue_name))


def kind_of(broker: Broker) -> AnyBroker:
    """Return the object of a broker's kind, made once. No other place asks for the kind."""
    kind: AnyBroker | None = vars(broker).get(KIND)
    if kind is None:
        known: dict[tuple[str, str], type[AnyBroker]] = {
            (compat.REDIS, "RedisBroker"): OnRedis,
            (compat.RABBITMQ, "RabbitmqBroker"): OnRabbitMQ,
            (compat.STUB, "StubBroker"): InMemory,
        }
        places = ((cls.__module__, cls.__name__) for cls in type(broker).__mro__)
        found = next((known[place] for place in places if place in known), AnyBroker)
        kind = vars(broker).setdefault(KIND, found(broker))
    return kind
