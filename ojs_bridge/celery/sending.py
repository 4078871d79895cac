"""A Celery message is published again as it came; until it is due, it waits at the broker or in a worker."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from amqp.exceptions import AMQPError, FrameSyntaxError
from celery import Celery
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
#: The attribute of a job's error that says whether the worker acknowledges the message, or rejects it into
#: the dead-letter exchange of its queue. Without it the task's own options say so, as under Celery alone.
ACKNOWLEDGED = "ojs_acknowledged"
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

    `parameters` are the names of what its task takes.
    """

    wire: Wire
    changes: Mapping[str, Any] | None = None
    parameters: Iterable[str] = ()

    def kept(self) -> dict[str, Any]:
        """Return the message as the store keeps it."""
        wire = self.wire
        if self.changes is not None:
            wire = replace(wire, headers={**wire.headers, **self.changes, "eta": None})
        return {**to_json(wire), "parameters": [*self.parameters]}
