"""A Celery message is published again as it came; until it is due, it waits at the broker or in a worker."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from amqp.exceptions import AMQPError, FrameSyntaxError
from celery import Celery
from celery.app import amqp
from kombu import pools
from kombu.connection import Connection
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError

from ..engine.engine import Engine
from ..errors import Unroutable
from ..messages import parameters_of
from . import compat
from .wire import DELAY_PREFIX, Wire, to_json

logger = logging.getLogger("ojs_bridge")

_OPTION = "confirm_publish"
#: RabbitMQ's answers where no queue takes a message: there is no such exchange or queue, no route to one, or
#: no permission; and those to a declaration that is refused.
_NO_QUEUE = (403, 404, 405, 406, 312, 540)
#: The method that RabbitMQ names when it refuses a login.
_LOGIN = (0, 0)
#: The attribute of a job's error that has the worker reject its message, which no dead queue takes.
REJECTED = "ojs_rejected"
#: The attribute in which an app keeps the connection for confirmed publishing.
_CONNECTION = "_ojs_confirmed"
#: The options of `apply_async` that say where a message goes; the priority is among them in older records.
_ROUTE = frozenset({"exchange", "exchange_type", "priority", "queue", "routing_key"})
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


class AsSent(dict[str, Any]):
    """Headers with the first sender's trace context, which another instrumentation cannot write over."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name not in TRACE_CONTEXT or not (name in self or "traceparent" in self):
            super().__setitem__(name, value)


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
    """Publish a message again with some headers changed; everything else is as it came.

    Celery's own sender does it, so that its publish signals, retry policy and queue declarations hold.
    Raises whatever publishing raises.
    """
    wire, options = outgoing.wire, outgoing.options
    headers, compression = _own_headers(wire)
    properties = {"priority": None, **wire.properties}
    delivery_mode = properties.pop("delivery_mode", None)
    if due is not None:
        # A message that comes early is sent on again. Redis delivers a second time what is not acknowledged
        # within the visibility timeout, and RabbitMQ closes the channel of a consumer that waits for half an
        # hour.
        longest = min(timedelta(seconds=visibility_timeout(app)) / 3, _LONGEST_HOP)
        headers["eta"] = min(due, now + longest).isoformat()
    headers = AsSent({**headers, **(outgoing.changes or {})})
    event = _sent_event(headers) if outgoing.is_announced and app.conf.task_send_sent_event else None
    message = compat.task_message_of(amqp)(headers, properties, wire.body, event)

    def send(producer: Any, **route: Any) -> None:
        compat.send_task_message_of(app.amqp)(
            producer,
            headers["task"],
            message,
            compression=compression,
            delivery_mode=delivery_mode,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
            **route,
        )

    asked = {name: value for name, value in options.items() if name in _ROUTE}
    if not {"queue", "exchange", "routing_key"} & asked.keys():
        asked = {**_way_back(app, wire), **asked}
    route = _delayed(app, wire, asked, due - now if due else timedelta(0))
    chosen = options.get("exchange")
    try:
        _send(app, send, route, queue=None if chosen else _queue_name(wire, asked), delays=route is not asked)
    except Unroutable:
        # The task's own choice of an exchange is not replaced.
        if chosen:
            raise
        _send(app, send, _straight(app, wire, asked), declares=True)


def _send(
    app: Celery,
    send: Callable[..., None],
    route: dict[str, Any],
    *,
    queue: str | None = None,
    delays: bool = False,
    declares: bool = False,
) -> None:
    """Call `send` with a producer and a route; raises Unroutable if no queue takes the message.

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
                "declare": route.get("declare") if declares else [],
            }
        elif not _leads_to_a_queue(app, producer, route):
            raise Unroutable(f"no queue is bound to {route}")
        send(producer, **route)


def _leads_to_a_queue(app: Celery, producer: Any, route: Mapping[str, Any]) -> bool:
    """Return whether kombu, which does the routing for Redis, finds a queue for a route."""
    lookup = getattr(producer.channel, compat.lookup.name, None)
    if lookup is None:
        return True
    exchange, key, queue = map(route.get, ("exchange", "routing_key", "queue"))
    if queue is not None and exchange is None:
        queue = queue if isinstance(queue, Queue) else app.amqp.queues[queue]
        if queue.exchange.type == "direct":
            return True
        exchange, key = queue.exchange, key or queue.routing_key
        producer.maybe_declare(queue)
    for entity in route.get("declare") or ():
        # Kombu knows the type of an exchange only in a process that has declared it.
        producer.maybe_declare(entity)
    return bool(lookup(getattr(exchange, "name", exchange), key))


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


def _sent_event(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return Celery's event `task-sent` of a job, as far as its headers say."""
    same = ("root_id", "parent_id", "retries", "eta", "expires")
    shown = {"args": headers.get("argsrepr"), "kwargs": headers.get("kwargsrepr")}
    fields = {"uuid": headers.get("id"), "name": headers["task"], **shown}
    return {**fields, **{name: headers.get(name) for name in same}}


def _own_headers(wire: Wire) -> tuple[dict[str, Any], str | None]:
    headers = {name: value for name, value in wire.headers.items() if name not in BROKER_HEADERS}
    return headers, headers.pop("compression", None)


def _way_back(app: Celery, wire: Wire) -> dict[str, Any]:
    """Return the route by which a delivery came, with the type of its exchange if the queue declares it."""
    if not wire.exchange:
        return {"queue": wire.queue or app.amqp.default_queue.name}
    queue = app.amqp.queues.get(wire.queue)
    declared = queue is not None and queue.exchange.name == wire.exchange
    exchange = [queue.exchange] if declared else None
    return {"exchange": wire.exchange, "declare": exchange, "routing_key": wire.routing_key}


def _queue_name(wire: Wire, route: Mapping[str, Any]) -> str:
    """Return the name of the queue that a route leads to, or that a message came from."""
    queue = route.get("queue", wire.queue)
    return str(getattr(queue, "name", queue))


def _straight(app: Celery, wire: Wire, route: Mapping[str, Any]) -> dict[str, Any]:
    """Return a route to the same queue by the default exchange, and declare the queue if the app knows it."""
    name = _queue_name(wire, route)
    try:
        queue = app.amqp.queues[name]
    except KeyError:
        queue = Queue(name, no_declare=True)
    rest = {key: value for key, value in route.items() if key == "priority"}
    return {**rest, "queue": queue, "exchange": "", "routing_key": name, "declare": [queue]}


def _delayed(app: Celery, wire: Wire, route: dict[str, Any], delay: timedelta) -> dict[str, Any]:
    """Return a route by which RabbitMQ delays a message, if the app has quorum queues.

    RabbitMQ delays whole seconds, and never through a direct exchange; a worker waits for the rest.
    """
    seconds = int(delay.total_seconds())
    if seconds < 1 or not _uses_native_delay(app):
        return route
    queue = route.get("queue", wire.queue)
    queue = queue if isinstance(queue, Queue) else app.amqp.queues.get(queue)
    if queue is None or queue.exchange.type == "direct":
        return route
    key = DELAY_PREFIX.sub("", route.get("routing_key") or queue.routing_key)
    rest = {name: value for name, value in route.items() if name not in ("queue", "declare")}
    exchange = Exchange("celery_delayed_27", type="topic")
    return {**rest, "exchange": exchange, "routing_key": compat.calculate_routing_key.find()(seconds, key)}


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
    headers, compression = _own_headers(wire)

    def send(producer: Any, **route: Any) -> None:
        producer.publish(
            wire.body,
            exchange="",
            routing_key=name,
            headers={**headers, **changes},
            compression=compression,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
            retry=True,
            retry_policy=app.conf.task_publish_retry_policy,
            delivery_mode=2,
            **{k: v for k, v in wire.properties.items() if k != "delivery_mode"},
            **route,
        )

    queue = app.amqp.queues.get(wire.queue)
    kind = ((queue and queue.queue_arguments) or {}).get("x-queue-type")
    arguments = {"x-queue-type": kind} if kind in ("classic", "quorum") else None
    route = {"declare": [Queue(name, durable=True, queue_arguments=arguments)]}
    try:
        _send(app, send, route, queue=name)
    except Unroutable:
        _send(app, send, route, declares=True)


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
        task = app.tasks.get(wire.headers.get("task"))
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
    """A message as it came, or as it goes on: with changed headers, and the `options` of a retry.

    `parameters` are the names of what its task takes. Where it `is_announced`, Celery's event `task-sent`
    tells of it.
    """

    wire: Wire
    changes: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    parameters: Iterable[str] = ()
    is_announced: bool = True

    def kept(self) -> dict[str, Any]:
        """Return the message as the store keeps it, with the route that its options ask for."""
        names = {"parameters": [*self.parameters]}
        if self.changes is None:
            return {**to_json(self.wire), **names}
        asked = {name: value for name, value in self.options.items() if name in _ROUTE}
        route = {name: getattr(value, "name", value) for name, value in asked.items()}
        headers = {**self.wire.headers, **self.changes, "eta": None}
        return {**to_json(replace(self.wire, headers=headers)), "route": route, **names}
