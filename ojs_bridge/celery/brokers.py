"""A broker of any kind, and RabbitMQ: what differs between the kinds is a method of their objects.

A Celery message is published again as it came; until it is due, it waits at the broker or in a worker.
"""

from __future__ import annotations

import json
import logging
import struct
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any

from amqp.exceptions import AMQPError, FrameSyntaxError
from celery import Celery
from kombu import pools
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError, SerializationError

from ..adapters import parameters_of
from ..bridge import Bridge
from ..engine.engine import Engine
from ..engine.reservations import UNTOLD, Reservations
from ..engine.runs import Backlog, Override
from ..engine.threads import cached
from ..errors import Unpublishable, Unreachable, Unroutable
from ..messages import CREATED, HEADER
from ..rules.job import Header, Job, count_of, decoded
from ..rules.notations import spoken
from ..store import Letter, Parked
from . import compat
from .wire import (
    BROKER_HEADERS,
    DELAY_PREFIX,
    Outgoing,
    Wire,
    dead_name,
    from_json,
    queues_of,
    time_in,
    with_arguments,
)

logger = logging.getLogger("ojs_bridge")

_OPTION = "confirm_publish"
#: RabbitMQ's answers where no queue takes a message: there is no such exchange or queue, no route to one, or
#: no permission; and those to a declaration that is refused.
_NO_QUEUE = (403, 404, 405, 406, 312, 540)
#: The method that RabbitMQ names when it refuses a login.
_LOGIN = (0, 0)
#: Kombu's default, in seconds, and the longest time that a message waits in a worker.
_VISIBILITY_TIMEOUT = 3600
_LONGEST_HOP = timedelta(minutes=10)
#: RabbitMQ's default wait for an acknowledgement, in seconds.
_CONSUMER_TIMEOUT = 1800.0
#: The transports that keep the tag of a message. Others name it anew at each delivery, as by a receipt.
_TAGS_KEPT = frozenset(
    f"kombu.transport.{name}"
    for name in (
        *("redis", "memory", "filesystem", "sqlalchemy", "mongodb", "pgmq"),
        *("azureservicebus", "azurestoragequeues", "consul", "etcd", "pyro", "zookeeper"),
    )
)
#: Where Amazon's SQS and Google's Pub/Sub say what they call a message, by kombu's name for their kind.
_NAMES = {"sqs": ("sqs_message", "MessageId"), "gcpubsub": ("gcpubsub_message", "message_id")}


class Broker:
    """A broker of a kind that the bridge knows through kombu alone, or not at all.

    `transport` is kombu's class for it, or None if its package is missing.
    """

    #: The options that limit each wait, and take its seconds; none where no queue can be asked for its depth.
    timeouts: Sequence[str] = ()
    #: The uses of private names that a worker has which takes messages from it.
    needs: frozenset[str] = frozenset()

    def __init__(self, app: Celery, transport: Any, places: type[Any]) -> None:
        self.app, self.transport = app, transport
        #: Makes what looks into the queues of a connection, the dead ones, too.
        self.places = places
        #: The name of the kind.
        self.system = str(getattr(transport, "driver_type", "unknown"))
        self._place = _NAMES.get(self.system)
        kinds = getattr(getattr(transport, "Channel", None), "__mro__", ())
        keeps_tags = any(kind.__module__ in _TAGS_KEPT for kind in kinds)
        #: What is not promised if it names a message anew at each delivery, in one sentence.
        self.less = ""
        if transport is not None and not keeps_tags and self._place is None:
            self.less = (
                f"{transport.__module__}.{transport.__name__} names a message anew at each delivery: a copy "
                "that comes when its job has ended is a new job, and a job whose worker was killed comes "
                "back when the broker gives it out again"
            )
        #: Returns what the broker calls a message at each of its deliveries; UNTOLD if it does not say it.
        self.publication: Callable[[Any], str] = attrgetter("delivery_tag") if keeps_tags else self._told
        self._options: Mapping[str, Any] = app.conf.broker_transport_options or {}
        #: After how many seconds, as kombu reads it, an unacknowledged message is delivered again.
        self.visibility_timeout = float(self._options.get("visibility_timeout", _VISIBILITY_TIMEOUT))

    @cached
    def unreachable(self) -> tuple[type[Exception], ...]:
        """The errors of publishing while the broker is out of reach."""
        recoverable = self.app.connection_for_write().recoverable_connection_errors
        return (OperationalError, ConnectionError, *recoverable)

    def caveats(self, bridge: Bridge) -> Iterator[str]:
        """Yield what weakens a promise; raises ConfigurationError for what cannot work."""
        if bridge.store is not None and self.less:
            yield self.less

    def long_wait(self, seconds: float) -> tuple[str, str] | None:
        """Return the name of the hazard of a job that waits so long in a worker, and what becomes of it."""

    def delays(self, queue: Queue) -> bool:
        """Return whether the broker itself keeps a delayed job of a queue until its time."""
        return False

    def visibility(self, consumer: Any, reservations: Reservations) -> Any:
        """Return what keeps a consumer's messages from other workers, if the broker gives them out again."""

    def take_safely(self) -> None:
        """Have workers take messages so that a kill loses none, where kombu does not."""

    def _told(self, message: Any) -> str:
        place, name = self._place or ("", "")
        told = (message.delivery_info or {}).get(place)
        return str(told[name]) if isinstance(told, Mapping) and told.get(name) else UNTOLD

    @contextmanager
    def producer(self) -> Iterator[Any]:
        """Acquire a producer whose publishing the broker confirms, unless the app says `confirm_publish`.

        Raises OperationalError for a channel that an outage has closed, and Unroutable for a message that no
        queue takes. Both drop the channel, which is closed, or has an unread answer.
        """
        with self._acquired() as producer:
            try:
                yield producer
            except AttributeError as error:
                if error.obj is not None or error.name != "client":
                    raise
                compat.close(compat.producer_connection(producer))()
                raise OperationalError("the channel to the broker was closed") from error
            except Exception as error:
                if not self.tells_of_no_queue(error):
                    raise
                compat.close(compat.producer_connection(producer))()
                raise Unroutable(str(error)) from error

    def _acquired(self) -> Any:
        return self.app.producer_or_acquire(None)

    def tells_of_no_queue(self, error: Exception) -> bool:
        """Return whether a broker has refused a message or its queue; a refused login is an outage."""
        # Redis-py need not be installed.
        return type(error).__name__ == "NoPermissionError"

    def publish(self, outgoing: Outgoing, now: datetime, due: datetime | None = None) -> None:
        """Publish a message with some headers changed, where its wire says; everything else is as it came.

        Raises whatever publishing raises.
        """
        app, wire = self.app, outgoing.wire
        headers, delay = dict(wire.headers), timedelta(0)
        if due is not None:
            # A message that comes early is sent on again. Redis delivers a second time what is not
            # acknowledged within the visibility timeout, and RabbitMQ closes the channel of a consumer that
            # waits for half an hour.
            longest = min(timedelta(seconds=self.visibility_timeout) / 3, _LONGEST_HOP)
            headers["eta"], delay = min(due, now + longest).isoformat(), due - now
        headers.update(outgoing.changes or {})
        message = self._published(replace(wire, headers=headers), retry=app.conf.task_publish_retry)
        delayed = self._delayed(wire, delay) if delay >= timedelta(seconds=1) else None
        queue = app.amqp.queues.get(wire.queue)
        straight = {"exchange": "", "routing_key": wire.queue or app.amqp.default_queue.name}
        usual = {"exchange": wire.exchange, "routing_key": wire.routing_key} if wire.exchange else straight
        declare = [queue] if queue is not None else []
        try:
            self._send(message, {**(delayed or usual), "declare": declare}, wire.queue)
        except Unroutable:
            # An exchange that the task itself chose is not replaced.
            if wire.exchange and not wire.queue:
                raise
            try:
                declare = [app.amqp.queues[straight["routing_key"]]]
            except KeyError:  # the app may not make it
                declare = [Queue(straight["routing_key"], no_declare=True)]
            self._send(message, {**straight, "declare": declare}, None)

    def _published(self, wire: Wire, **options: Any) -> dict[str, Any]:
        """Return what a producer is told of a message, but for its route."""
        headers = {name: value for name, value in wire.headers.items() if name not in BROKER_HEADERS}
        conf = self.app.conf
        return {
            "body": wire.body,
            "compression": headers.pop("compression", None),
            "headers": headers,
            "content_type": wire.content_type,
            "content_encoding": wire.content_encoding,
            "retry_policy": conf.task_publish_retry_policy,
            "priority": None,
            "delivery_mode": conf.task_default_delivery_mode,
            **wire.properties,
            **options,
        }

    def _delayed(self, wire: Wire, delay: timedelta) -> dict[str, Any] | None:
        """Return the route by which the broker itself delays a message; None if a worker does."""

    def _send(self, message: Mapping[str, Any], route: Mapping[str, Any], queue: str | None) -> None:
        """Publish a message by a route to a queue; None declares the queue of the route first.

        Raises Unroutable if no queue takes it. Kombu, which does the routing, has to be asked.
        """
        with self.producer() as producer:
            if lookup := getattr(producer.channel, compat.lookup.name, None):
                for entity in route["declare"]:
                    # Kombu knows the type of an exchange only in a process that has declared it.
                    producer.maybe_declare(entity)
                exchange = getattr(route["exchange"], "name", route["exchange"])
                if exchange and not lookup(exchange, route["routing_key"]):
                    raise Unroutable(f"no queue is bound to {route}")
            producer.publish(**message, **{**route, "declare": [] if lookup else route["declare"]})

    def bury(self, wire: Wire, changes: Mapping[str, Any]) -> None:
        """Publish a message, with its final state, to its queue's own dead queue, `<queue>.dead`.

        If there is none, it is declared with the type of the job's queue. Raises Unroutable if the broker
        refuses that, FrameSyntaxError or struct.error for a name that is too long.
        """
        name = dead_name(wire.queue)
        buried = replace(wire, headers={**wire.headers, **changes})
        message = self._published(buried, retry=True, delivery_mode=2)
        queue = self.app.amqp.queues.get(wire.queue)
        kind = ((queue and queue.queue_arguments) or {}).get("x-queue-type")
        arguments = {"x-queue-type": kind} if kind in ("classic", "quorum") else None
        queue = Queue(name, durable=True, queue_arguments=arguments)
        route = {"exchange": "", "routing_key": name, "declare": [queue]}
        try:
            self._send(message, route, name)
        except Unroutable:
            self._send(message, route, None)

    def is_buried(self, engine: Engine, wire: Wire, changes: Mapping[str, Any], *, can_wait: bool) -> bool:
        """Bury a message; False if there is no dead queue, and none may be declared.

        The message then stands in the log: there may be no other place that keeps it. Raises the error if the
        message `can_wait` for a store that is away, and may take its letter later.
        """
        try:
            self.bury(wire, changes)
        except (Unroutable, FrameSyntaxError, struct.error) as error:
            if can_wait and not engine.store_answers():
                raise
            task = compat.task_in(self.app.tasks, wire.headers.get("task"))
            kept: Any = Outgoing(wire, changes, parameters=parameters_of(task.run) if task else ()).kept()
            if engine.context.redactor:
                kept, _ = engine.context.redactor.message(kept)
            logger.critical(
                "job %s (%s): its dead letter has no place, %s cannot be had: %s. Its message is rejected: "
                "only a dead-letter exchange of its queue keeps it. This is the message: %s",
                *(wire.headers.get("id"), wire.headers.get("task"), dead_name(wire.queue), error),
                json.dumps(kept),
            )
            return False
        return True


class RabbitMQ(Broker):
    """A broker that confirms what it takes, delays messages itself, and counts their deliveries."""

    timeouts = "read_timeout", "write_timeout"
    _confirmed: Connection | None = None

    def __init__(self, app: Celery, transport: Any, places: type[Any]) -> None:
        super().__init__(app, transport, places)
        self.system, self.less = "rabbitmq", ""

    def long_wait(self, seconds: float) -> tuple[str, str] | None:
        """Return the hazard of a wait beyond its `consumer_timeout`."""
        if seconds <= _CONSUMER_TIMEOUT:
            return None
        return (
            "beyond-consumer-timeout",
            f"longer than RabbitMQ's consumer_timeout, {spoken(_CONSUMER_TIMEOUT)} by default: before "
            "RabbitMQ 4.3 it closes the channel, and the worker ends; on quorum queues Celery 5.5 and newer "
            "has RabbitMQ wait instead",
        )

    def delays(self, queue: Queue) -> bool:
        """Return whether it has quorum queues and Celery 5.5 or newer; a direct exchange delays nothing."""
        with suppress(ImportError):
            detect_quorum_queues = compat.detect_quorum_queues.find()
            return queue.exchange.type != "direct" and bool(detect_quorum_queues(self.app, "amqp")[0])
        return False

    def _told(self, message: Any) -> str:
        """Return a mark of this delivery, or "" if the message comes again: it has no name of its own."""
        return "" if (message.delivery_info or {}).get("redelivered") else uuid.uuid4().hex

    def _acquired(self) -> Any:
        """Acquire a producer of a connection that has no other use.

        If all of Celery's connections confirmed, greenlets that share one for events could take each other's
        confirmations, or wait for them, even at the shutdown.
        """
        if _OPTION in self._options:
            return super()._acquired()
        conf = self.app.conf
        if self._confirmed is None:
            self._confirmed = self.app.connection_for_write(transport_options={_OPTION: True})
        pools.set_limit(conf.broker_pool_limit)
        timeout = conf.get("broker_pool_acquire_timeout")
        return pools.producers[self._confirmed].acquire(block=True, timeout=timeout)

    def tells_of_no_queue(self, error: Exception) -> bool:
        """Return whether a broker has refused a message or its queue; a refused login is an outage."""
        if not isinstance(error, AMQPError):
            return False
        return error.reply_code in _NO_QUEUE and error.method_sig not in (None, _LOGIN)

    def _delayed(self, wire: Wire, delay: timedelta) -> dict[str, Any] | None:
        """Return the route of a message that RabbitMQ delays whole seconds; a worker waits for the rest."""
        queue = self.app.amqp.queues.get(wire.queue)
        if queue is None or not self.delays(queue):
            return None
        key = DELAY_PREFIX.sub("", wire.routing_key if wire.exchange else queue.routing_key)
        exchange = Exchange("celery_delayed_27", type="topic")
        routing_key = compat.calculate_routing_key.find()(int(delay.total_seconds()), key)
        return {"exchange": exchange, "routing_key": routing_key}

    def _send(self, message: Mapping[str, Any], route: Mapping[str, Any], queue: str | None) -> None:
        """Publish a message by a route to a queue; None declares the queue of the route first.

        RabbitMQ tells as it confirms that no queue takes a message, but not of a queue behind a delay. A
        queue that is there is used as it is, where a declaration with other arguments would be refused.
        """
        confirms = bool(self._options.get(_OPTION, True))
        with self.producer() as producer:
            if queue and (isinstance(route["exchange"], Exchange) or not confirms):
                producer.channel.queue_declare(queue, passive=True)
            declare = route["declare"] if queue is None else []
            producer.publish(**message, **{**route, "mandatory": confirms, "declare": declare})


@dataclass(frozen=True)
class CeleryPublisher:
    """Publishes dead letters and parked jobs through the app they came from."""

    _app: Celery
    _bridge: Bridge
    #: Returns the broker, which is looked at when it is needed first.
    _broker: Callable[[], Broker]

    @property
    def system(self) -> str:
        """The kind of the broker."""
        return self._broker().system

    def knows(self, type_: str) -> bool:
        """Return whether the app has this task, or no tasks but Celery's own."""
        tasks = self._app.tasks
        return type_ in tasks or all(name.startswith("celery.") for name in tasks)

    def backlog(self, queues: Collection[str]) -> Sequence[Backlog]:
        """Ask the broker for the backlog of these queues, and of those that the app names; raises any error.

        Only Redis knows the oldest message.
        """
        with self._app.connection_for_read() as connection:
            # As `connect` does, but for the two seconds that it waits before it tries again.
            connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            return [self._backlog_of(connection, name) for name in sorted({*queues, *queues_of(self._app)})]

    def _backlog_of(self, connection: Connection, queue: str) -> Backlog:
        places = self._broker().places(connection)
        depth = places.depth(queue)
        due = map(self._due, places.oldest(queue) if depth else ())
        return Backlog(queue, depth, min((at for at in due if at is not None), default=None))

    def _due(self, headers: Mapping[str, Any]) -> datetime | None:
        """Return when the job of a message was due or sent, if its headers say so."""
        retries = count_of(headers.get("retries")) or 0
        created = time_in(self._app, headers.get(CREATED))
        bare = Job(str(headers.get("id")), str(headers.get("task")), "", 1 + retries, created_at=created)
        job = decoded(headers.get(HEADER), bare, headers.get("retries"))
        return job.due_at if isinstance(job, Job) else None

    @contextmanager
    def reaching(self) -> Iterator[Any]:
        """Give the dead queues, through a new connection to the broker that the app writes to."""
        try:
            with self._app.connection_for_write() as connection:
                yield self._broker().places(connection)
        except self._broker().unreachable as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish the letter's message under its own id, at attempt 1; a past expiry is dropped."""
        kept = from_json(letter.message)
        if override.args is not None or override.kwargs is not None:
            kept = _with_arguments(kept, letter, override)
        changes: dict[str, Any] = {**(override.meta or {}), "retries": 0, "eta": None, HEADER: header.text}
        expires = time_in(self._app, kept.headers.get("expires"))
        if expires and expires <= self._bridge.engine.now():
            changes["expires"] = None
        if queue := override.queue:
            kept = replace(kept, exchange="", routing_key=queue, queue=queue)
        self._publish(kept, changes)

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Publish a parked job's message, due now, or with the whole delay as its `eta`.

        A time that its user has set stays, unless an operator has the job run before it.
        """
        kept = from_json(parked.message)
        eta = time_in(self._app, kept.headers.get("eta"))
        changes: dict[str, Any] = {HEADER: json.dumps(state)}
        if due or (eta and eta > self._bridge.engine.now()):
            changes["eta"] = due.isoformat() if due else None
        self._publish(kept, changes, due)

    def _publish(self, kept: Wire, changes: Mapping[str, Any], due: datetime | None = None) -> None:
        try:
            self._broker().publish(Outgoing(kept, changes), self._bridge.engine.now(), due)
        except self._broker().unreachable as error:
            raise Unreachable(repr(error)) from error
        except (SerializationError, FrameSyntaxError, struct.error, ValueError, TypeError) as error:
            raise Unpublishable(repr(error)) from error


def _with_arguments(kept: Wire, letter: Letter, override: Override) -> Wire:
    reading = letter.reading
    if reading.args is None:
        raise Unpublishable(f"args: those of dead letter {letter.id!r} cannot be replaced: {reading.note}")
    args = reading.args if override.args is None else override.args
    return with_arguments(kept, args, reading.kwargs if override.kwargs is None else override.kwargs)
