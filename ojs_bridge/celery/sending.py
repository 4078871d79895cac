"""A Celery message is published again as it came; until it is due, it waits at the broker or in a worker.

The same way is taken by what the store keeps: dead letters and parked retries.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from amqp.exceptions import AMQPError, ChannelError, FrameSyntaxError
from celery import Celery
from kombu import pools
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError, SerializationError

from ..bridge import Bridge
from ..engine.engine import Engine
from ..engine.runs import Backlog, Override
from ..errors import Unpublishable, Unreachable, Unroutable
from ..messages import CREATED, HEADER, parameters_of
from ..rules.job import Header, Job, count_of, decoded
from ..store import Letter, Parked
from . import compat
from .wire import DELAY_PREFIX, Wire, from_json, time_in, to_json, with_arguments

logger = logging.getLogger("ojs_bridge")

_OPTION = "confirm_publish"
#: RabbitMQ's answer where there is no such queue.
NOT_FOUND = 404
#: RabbitMQ's answers where no queue takes a message: there is no such exchange or queue, no route to one, or
#: no permission; and those to a declaration that is refused.
_NO_QUEUE = (403, 404, 405, 406, 312, 540)
#: The method that RabbitMQ names when it refuses a login.
_LOGIN = (0, 0)
#: The attribute in which an app keeps the connection for confirmed publishing.
_CONNECTION = "_ojs_confirmed"
#: Headers that the broker added to a delivery; a message that goes on must not claim them.
BROKER_HEADERS = frozenset(
    {
        "redelivered",
        "x-acquired-count",
        "x-death",
        "x-delivery-count",
        "x-first-death-exchange",
        "x-first-death-queue",
        "x-first-death-reason",
        "x-last-death-exchange",
        "x-last-death-queue",
        "x-last-death-reason",
    }
)
#: The headers that say in which trace a job was first sent; they travel unmodified.
TRACE_CONTEXT = frozenset({"traceparent", "tracestate", "baggage"})
#: Kombu's default, in seconds, and the longest time that a message waits in a worker.
_VISIBILITY_TIMEOUT = 3600
_LONGEST_HOP = timedelta(minutes=10)


@contextmanager
def confirmed_producer(app: Celery) -> Iterator[Any]:
    """Acquire a producer whose publishing RabbitMQ confirms, or the app's own if it sets `confirm_publish`.

    Its connection has no other use. If all of Celery's connections confirmed, greenlets that share one for
    events could take each other's confirmations, or wait for them, even at the shutdown.

    Raises OperationalError for a channel that an outage has closed, and Unroutable for a message that no
    queue takes. Both drop the channel, which is closed, or has an unread answer.
    """
    if _OPTION in (app.conf.broker_transport_options or {}) or driver_type(app) != "amqp":
        acquired: AbstractContextManager[Any] = app.producer_or_acquire(None)
    else:
        connection: Connection = vars(app).get(_CONNECTION)
        if connection is None:
            connection = app.connection_for_write(transport_options={_OPTION: True})
            setattr(app, _CONNECTION, connection)
        pools.set_limit(app.conf.broker_pool_limit)
        timeout = app.conf.get("broker_pool_acquire_timeout")
        acquired = pools.producers[connection].acquire(block=True, timeout=timeout)
    with acquired as producer:
        try:
            yield producer
        except AttributeError as error:
            if error.obj is not None or error.name != "client":
                raise
            compat.close(compat.producer_connection(producer))()
            raise OperationalError("the channel to the broker was closed") from error
        except Exception as error:
            if not _tells_of_no_queue(error):
                raise
            compat.close(compat.producer_connection(producer))()
            raise Unroutable(str(error)) from error


def driver_type(app: Celery) -> str:
    """Return kombu's name for the kind of an app's broker."""
    # The pool of producers makes its connections after this one.
    return str(compat.connections_of(app.producer_pool).connection.transport.driver_type)


def publish(app: Celery, outgoing: Outgoing, now: datetime, due: datetime | None = None) -> None:
    """Publish a message with some headers changed, where its wire says; everything else is as it came.

    Raises whatever publishing raises.
    """
    wire = outgoing.wire
    headers, delay = dict(wire.headers), timedelta(0)
    if due is not None:
        # A message that comes early is sent on again. Redis delivers a second time what is not acknowledged
        # within the visibility timeout, and RabbitMQ closes the channel of a consumer that waits for half an
        # hour.
        longest = min(timedelta(seconds=visibility_timeout(app)) / 3, _LONGEST_HOP)
        headers["eta"], delay = min(due, now + longest).isoformat(), due - now
    headers.update(outgoing.changes or {})
    message = _published(app, replace(wire, headers=headers), retry=app.conf.task_publish_retry)
    delayed = _delayed(app, wire, delay) if delay >= timedelta(seconds=1) else None
    queue = app.amqp.queues.get(wire.queue)
    straight = {"exchange": "", "routing_key": wire.queue or app.amqp.default_queue.name}
    usual = {"exchange": wire.exchange, "routing_key": wire.routing_key} if wire.exchange else straight
    declare = [queue] if queue is not None else []
    try:
        _send(
            app, message, {**(delayed or usual), "declare": declare}, queue=wire.queue, delays=bool(delayed)
        )
    except Unroutable:
        # An exchange that the task itself chose is not replaced.
        if wire.exchange and not wire.queue:
            raise
        _send(app, message, {**straight, "declare": [_queue(app, straight["routing_key"])]}, declares=True)


def _queue(app: Celery, name: str) -> Queue:
    """Return a queue to declare, if the app knows it or may make it."""
    try:
        queue: Queue = app.amqp.queues[name]
    except KeyError:
        return Queue(name, no_declare=True)
    return queue


def _published(app: Celery, wire: Wire, **options: Any) -> dict[str, Any]:
    """Return what a producer is told of a message, but for its route."""
    headers = {name: value for name, value in wire.headers.items() if name not in BROKER_HEADERS}
    return {
        "body": wire.body,
        "compression": headers.pop("compression", None),
        "headers": headers,
        "content_type": wire.content_type,
        "content_encoding": wire.content_encoding,
        "retry_policy": app.conf.task_publish_retry_policy,
        "priority": None,
        "delivery_mode": app.conf.task_default_delivery_mode,
        **wire.properties,
        **options,
    }


def _send(
    app: Celery,
    message: Mapping[str, Any],
    route: dict[str, Any],
    *,
    queue: str | None = None,
    delays: bool = False,
    declares: bool = False,
) -> None:
    """Publish a message by a route; raises Unroutable if no queue takes it.

    RabbitMQ tells that as it confirms, but not of `queue` behind a delay. It declares nothing unless asked:
    a queue that is there is used as it is, where a declaration with other arguments would be refused. For
    Redis kombu does the routing, and has to be asked.
    """
    with confirmed_producer(app) as producer:
        if driver_type(app) == "amqp":
            confirms = (app.conf.broker_transport_options or {}).get(_OPTION, True)
            if queue and (delays or not confirms):
                producer.channel.queue_declare(queue, passive=True)
            route = {
                **route,
                "mandatory": bool(confirms),
                "declare": route["declare"] if declares else [],
            }
        elif not _leads_to_a_queue(producer, route):
            raise Unroutable(f"no queue is bound to {route}")
        producer.publish(**message, **route)


def _leads_to_a_queue(producer: Any, route: Mapping[str, Any]) -> bool:
    """Return whether kombu, which does the routing for Redis, finds a queue for a route."""
    lookup = getattr(producer.channel, compat.lookup.name, None)
    if lookup is None:
        return True
    for entity in route["declare"]:
        # Kombu knows the type of an exchange only in a process that has declared it.
        producer.maybe_declare(entity)
    exchange = getattr(route["exchange"], "name", route["exchange"])
    return not exchange or bool(lookup(exchange, route["routing_key"]))


def out_of_reach(app: Celery) -> tuple[type[Exception], ...]:
    """Return the errors of publishing while the broker is out of reach."""
    connection = compat.connections_of(app.producer_pool).connection
    recoverable: tuple[type[Exception], ...] = connection.recoverable_connection_errors
    return (OperationalError, ConnectionError, *recoverable)


def _tells_of_no_queue(error: Exception) -> bool:
    """Return whether a broker has refused a message or its queue; a refused login is an outage."""
    if isinstance(error, AMQPError):
        return error.reply_code in _NO_QUEUE and error.method_sig not in (None, _LOGIN)
    # Redis-py need not be installed.
    return type(error).__name__ == "NoPermissionError"


def _delayed(app: Celery, wire: Wire, delay: timedelta) -> dict[str, Any] | None:
    """Return the route by which RabbitMQ delays a message, if the app has quorum queues; else None.

    RabbitMQ delays whole seconds, and never through a direct exchange; a worker waits for the rest.
    """
    if not _uses_native_delay(app):
        return None
    queue = app.amqp.queues.get(wire.queue)
    if queue is None or queue.exchange.type == "direct":
        return None
    key = DELAY_PREFIX.sub("", wire.routing_key if wire.exchange else queue.routing_key)
    exchange = Exchange("celery_delayed_27", type="topic")
    return {
        "exchange": exchange,
        "routing_key": compat.calculate_routing_key.find()(int(delay.total_seconds()), key),
    }


def visibility_timeout(app: Celery) -> float:
    """Return after how many seconds Redis delivers an unacknowledged message again."""
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", _VISIBILITY_TIMEOUT))


def _uses_native_delay(app: Celery) -> bool:
    """Return whether the app has quorum queues, which Celery 5.5 and newer delay in the broker."""
    try:
        detect_quorum_queues = compat.detect_quorum_queues.find()
    except ImportError:
        return False
    return bool(detect_quorum_queues(app, driver_type(app))[0])


def dead_name(queue: str) -> str:
    """Return the name of a queue's own dead queue."""
    return f"{queue}.dead"


def bury(app: Celery, wire: Wire, changes: Mapping[str, Any]) -> None:
    """Publish a message, with its final state, to its queue's own dead queue, `<queue>.dead`.

    If there is none, it is declared with the type of the job's queue. Raises Unroutable if the broker refuses
    that, FrameSyntaxError or struct.error for a name that is too long.
    """
    name = dead_name(wire.queue)
    buried = replace(wire, headers={**wire.headers, **changes})
    message = _published(app, buried, retry=True, delivery_mode=2)
    queue = app.amqp.queues.get(wire.queue)
    kind = ((queue and queue.queue_arguments) or {}).get("x-queue-type")
    arguments = {"x-queue-type": kind} if kind in ("classic", "quorum") else None
    queue = Queue(name, durable=True, queue_arguments=arguments)
    route = {"exchange": "", "routing_key": name, "declare": [queue]}
    try:
        _send(app, message, route, queue=name)
    except Unroutable:
        _send(app, message, route, declares=True)


def is_buried(engine: Engine, app: Celery, wire: Wire, changes: Mapping[str, Any], *, can_wait: bool) -> bool:
    """Bury a message; False if there is no dead queue, and none may be declared.

    The message then stands in the log: there may be no other place that keeps it. Raises the error if the
    message `can_wait` for a store that is away, and may take its letter later.
    """
    try:
        bury(app, wire, changes)
    except (Unroutable, FrameSyntaxError, struct.error) as error:
        if can_wait and not engine.store_answers():
            raise
        task = compat.task_in(app.tasks, wire.headers.get("task"))
        kept: Any = Outgoing(wire, changes, parameters=parameters_of(task.run) if task else ()).kept()
        if engine.context.redactor:
            kept, _ = engine.context.redactor.message(kept)
        logger.critical(
            "job %s (%s): its dead letter has no place, %s cannot be had: %s. Its message is rejected: only "
            "a dead-letter exchange of its queue keeps it. This is the message: %s",
            *(wire.headers.get("id"), wire.headers.get("task"), dead_name(wire.queue), error),
            json.dumps(kept),
        )
        return False
    return True


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message as it came, or, with changed headers, as it goes on.

    `parameters` are the names of what its task takes. An eager retry has the signature by which it runs.
    """

    wire: Wire
    changes: Mapping[str, Any] | None = None
    parameters: Iterable[str] = ()
    signature: Any = None

    def kept(self) -> dict[str, Any]:
        """Return the message as the store keeps it."""
        wire = self.wire
        if self.changes is not None:
            wire = replace(wire, headers={**wire.headers, **self.changes, "eta": None})
        return {**to_json(wire), "parameters": [*self.parameters]}


@dataclass(frozen=True)
class CeleryPublisher:
    """Publishes dead letters and parked retries through the app they came from."""

    _app: Celery
    _bridge: Bridge
    _oldest_in: Callable[[Connection, str], Iterable[Mapping[str, Any]]]

    @property
    def system(self) -> str:
        """The kind of the broker."""
        kind = driver_type(self._app)
        return "rabbitmq" if kind == "amqp" else kind

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
        depth = _depth(connection, queue)
        due = map(self._due, self._oldest_in(connection, queue) if depth else ())
        return Backlog(queue, depth, min((at for at in due if at is not None), default=None))

    def _due(self, headers: Mapping[str, Any]) -> datetime | None:
        """Return when the job of a message was due or sent, if its headers say so."""
        retries = count_of(headers.get("retries")) or 0
        created = time_in(self._app, headers.get(CREATED))
        bare = Job(str(headers.get("id")), str(headers.get("task")), "", 1 + retries, created_at=created)
        job = decoded(headers.get(HEADER), bare, headers.get("retries"))
        return job.due_at if isinstance(job, Job) else None

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
        """Publish a parked retry's message, due now, or with the whole delay as its `eta`."""
        changes = {"eta": due.isoformat() if due else None, HEADER: json.dumps(state)}
        self._publish(from_json(parked.message), changes, due)

    def _publish(self, kept: Wire, changes: Mapping[str, Any], due: datetime | None = None) -> None:
        try:
            publish(self._app, Outgoing(kept, changes), self._bridge.engine.now(), due)
        except out_of_reach(self._app) as error:
            raise Unreachable(repr(error)) from error
        except (SerializationError, FrameSyntaxError, struct.error, ValueError, TypeError) as error:
            raise Unpublishable(repr(error)) from error


def queues_of(app: Celery) -> set[str]:
    """Return the names of the queues that an app consumes, routes to or has sent to."""
    named = {
        *app.amqp.queues,
        app.conf.task_default_queue,
        *_routed(compat.router_routes(app.amqp.router, ())),
    }
    return {
        str(name) for name in (*named, *(getattr(task, "queue", None) for task in app.tasks.values())) if name
    }


def _routed(routes: Iterable[Any]) -> Iterator[str]:
    """Yield the queues that `task_routes` names; a route that is a function names none."""
    for router in routes:
        patterns = getattr(router, "patterns", {})
        for route in (*getattr(router, "map", {}).values(), *patterns.values()):
            queue = route.get("queue") if isinstance(route, Mapping) else route
            yield str(getattr(queue, "name", queue) or "")


def _depth(connection: Connection, queue: str) -> int:
    """Return the number of messages in a queue, 0 where there is no such queue."""
    try:
        with connection.channel() as channel:
            return int(channel.queue_declare(queue, passive=True).message_count)
    except ChannelError as error:
        # Kombu's own transports have the code as a text.
        if str(error.reply_code) != str(NOT_FOUND):
            raise
        return 0


def _with_arguments(kept: Wire, letter: Letter, override: Override) -> Wire:
    reading = letter.reading
    if reading.args is None:
        raise Unpublishable(f"args: those of dead letter {letter.id!r} cannot be replaced: {reading.note}")
    args = reading.args if override.args is None else override.args
    return with_arguments(kept, args, reading.kwargs if override.kwargs is None else override.kwargs)
