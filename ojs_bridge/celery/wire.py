"""A Celery message as it was delivered, and how it is published again to the letter."""

from __future__ import annotations

import base64
import functools
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from typing import Any, TypeAlias

from celery import Celery
from celery.app.amqp import task_message
from celery.utils.saferepr import saferepr
from celery.utils.time import maybe_make_aware
from kombu.entity import Exchange, Queue, binding
from kombu.exceptions import OperationalError
from kombu.serialization import dumps, loads, registry
from kombu.utils import json as kombu_json

from . import confirmed

#: The message header that carries a job's retry state.
HEADER = "ojs"
#: The key among a request's properties under which its message travels to the process that runs the task.
KEY = "ojs_wire"

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
#: What of a message's properties is its own, not its transport's.
_PROPERTIES = ("correlation_id", "reply_to", "priority", "delivery_mode")
#: The routing key prefix of RabbitMQ's native delayed delivery: 28 bits of delay.
_DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")
#: Kombu's own, in seconds, and the longest a message waits in a worker.
_VISIBILITY_TIMEOUT = 3600
_LONGEST_HOP = timedelta(minutes=10)
#: The exchanges from which RabbitMQ delivers what it has delayed.
_DELAYED = "celery_delayed_"


#: Body, content type, content encoding, headers and publication of a delivery, as a request takes them along.
Carried: TypeAlias = tuple[bytes | str, str, str, Mapping[str, Any], str]


@dataclass(frozen=True, slots=True)
class Wire:
    """One delivery: body bytes, content type, headers and properties, and where it came from."""

    body: bytes | str
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any] = field(default_factory=dict)
    exchange: str = ""
    routing_key: str = ""
    queue: str = ""


def carried(message: Any, body: Any, headers: Mapping[str, Any] | None, app: Celery) -> Carried:
    """Return what of a received message its request does not carry by itself; parts of it, not copies."""
    content_type, encoding = message.content_type, message.content_encoding
    if not isinstance(body, (bytes, str)):
        name = registry.type_to_name.get(content_type, app.conf.task_serializer)
        content_type, encoding, body = _dumps_if_possible(body, name)
    headers = message.headers if headers is None else headers
    return body, content_type, encoding, headers, _publication(message)


def delivered(app: Celery, parts: Carried, properties: Mapping[str, Any], info: Mapping[str, Any]) -> Wire:
    """Return the wire form of a message that a worker received."""
    body, content_type, encoding, headers, _ = parts
    exchange, routing_key = info.get("exchange") or "", info.get("routing_key") or ""
    return Wire(
        body=body,
        content_type=content_type,
        content_encoding=encoding,
        headers=dict(headers),
        properties={name: properties[name] for name in _PROPERTIES if name in properties},
        exchange=exchange,
        routing_key=routing_key,
        queue=_queue_of(app, exchange, routing_key),
    )


def _publication(message: Any) -> str:
    """Return what tells one message of a job's first run from another; "" where RabbitMQ cannot tell."""
    if isinstance(message.delivery_tag, str):
        return message.delivery_tag
    return "" if (message.delivery_info or {}).get("redelivered") else uuid.uuid4().hex


def _queue_of(app: Celery, exchange: str, routing_key: str) -> str:
    """Return the queue a delivery came from, which names only its exchange and routing key itself."""
    key = _DELAY_PREFIX.sub("", routing_key)
    if not exchange:
        return key
    delayed = exchange.startswith(_DELAYED)
    for queue in app.amqp.queues.consume_from.values():
        for bound in queue.bindings or (binding(queue.exchange, queue.routing_key),):
            if (delayed or bound.exchange.name == exchange) and _leads(bound, key):
                return str(queue.name)
    return key


def _leads(bound: binding, key: str) -> bool:
    match bound.exchange.type:
        case "fanout" | "headers":
            return True
        case "topic":
            return _pattern(bound.routing_key or "").fullmatch(key) is not None
        case _:
            return str(bound.routing_key or "") == key


@functools.lru_cache
def _pattern(key: str) -> re.Pattern[str]:
    """Return a topic exchange's binding key as a pattern: `*` is one word, `#` any number of them."""
    words = re.escape(key).replace(r"\*", r"[^.]+")
    return re.compile(words.replace(r"\.\#", r"(\..*)?").replace(r"\#\.", r"(.*\.)?").replace(r"\#", ".*"))


def eager(app: Celery, name: str, request: Any, headers: Mapping[str, Any]) -> Wire:
    """Return the wire form that an eagerly applied task would have had."""
    message = app.amqp.as_task_v2(
        request.id,
        name,
        request.args,
        request.kwargs,
        retries=request.retries,
        callbacks=request.callbacks,
        errbacks=request.errbacks,
    )
    content_type, encoding, body = _dumps_if_possible(message.body, app.conf.task_serializer)
    headers = {**message.headers, **headers}
    queue = app.amqp.default_queue.name
    properties = {"correlation_id": request.id}
    return Wire(body, content_type, encoding, headers, properties, routing_key=queue, queue=queue)


def _dumps_if_possible(body: Any, serializer: str) -> Any:
    """Encode an eager task's body; arguments that no message could carry become their repr."""
    try:
        return dumps(body, serializer=serializer)
    except Exception:  # noqa: BLE001 - eager tasks take arguments that only this process can hold
        args, kwargs, _ = body
        shown = [saferepr(arg) for arg in args], {str(key): saferepr(arg) for key, arg in kwargs.items()}
        return dumps((*shown, {}), serializer="json")


def with_arguments(wire: Wire, args: Any, kwargs: Any) -> Wire:
    """Return the wire form with other arguments, encoded as the original was; links and chord stay."""
    embed = loads(wire.body, wire.content_type, wire.content_encoding, force=True)[2]
    name = registry.type_to_name[wire.content_type]
    content_type, encoding, body = dumps((args, kwargs, embed), serializer=name)
    headers = {**wire.headers, "argsrepr": saferepr(args), "kwargsrepr": saferepr(kwargs)}
    return replace(wire, body=body, content_type=content_type, content_encoding=encoding, headers=headers)


def publish(
    app: Celery,
    wire: Wire,
    changes: Mapping[str, Any],
    *,
    due: datetime | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Publish a message again with some headers changed; everything else is as it came.

    Celery's own sender does it, so that its publish signals, retry policy and queue declarations hold.
    Raises whatever publishing raises.
    """
    headers, compression = _own_headers(wire)
    properties = {"priority": None, **wire.properties}
    delivery_mode = properties.pop("delivery_mode", None)
    if due is not None:
        headers["eta"] = min(due, datetime.now(timezone.utc) + _hop(app)).isoformat()
    message = task_message({**headers, **changes}, properties, wire.body, None)
    with confirmed.producer(app) as producer:
        app.amqp.send_task_message(
            producer,
            headers["task"],
            message,
            compression=compression,
            delivery_mode=delivery_mode,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
            **_delayed(app, wire, _route(app, wire, options or {}), due),
        )


def out_of_reach(app: Celery) -> tuple[type[Exception], ...]:
    """Return what publishing raises while the broker cannot be reached."""
    connection = app.producer_pool.connections.connection
    recoverable: tuple[type[Exception], ...] = connection.recoverable_connection_errors
    return (OperationalError, ConnectionError, *recoverable)


def _own_headers(wire: Wire) -> tuple[dict[str, Any], str | None]:
    headers = {name: value for name, value in wire.headers.items() if name not in BROKER_HEADERS}
    return headers, headers.pop("compression", None)


def _route(app: Celery, wire: Wire, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = _chosen(options)
    if {"queue", "exchange", "routing_key"} & set(chosen):
        return chosen
    if wire.exchange:
        return {**_exchange(app, wire), "routing_key": wire.routing_key, **chosen}
    return {"queue": wire.queue or app.amqp.default_queue.name, **chosen}


def _chosen(options: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k in ("queue", "exchange", "routing_key", "priority")}


def _exchange(app: Celery, wire: Wire) -> dict[str, Any]:
    """Return the exchange a delivery came through; on Redis only one that is declared has its type."""
    queue = app.amqp.queues.get(wire.queue)
    declared = queue is not None and queue.exchange.name == wire.exchange
    return {"exchange": wire.exchange, "declare": [queue.exchange] if declared else None}


def _delayed(app: Celery, wire: Wire, route: dict[str, Any], due: datetime | None) -> dict[str, Any]:
    """Have RabbitMQ delay what is due later where the app's queues need it; the rest is the worker's.

    RabbitMQ delays whole seconds, and never through a direct exchange.
    """
    seconds = int((due - datetime.now(timezone.utc)).total_seconds()) if due else 0
    if seconds < 1 or not _uses_native_delay(app):
        return route
    queue = route.get("queue", wire.queue)
    queue = queue if isinstance(queue, Queue) else app.amqp.queues.get(queue)
    if queue is None or queue.exchange.type == "direct":
        return route
    from kombu.transport.native_delayed_delivery import calculate_routing_key

    key = _DELAY_PREFIX.sub("", route.get("routing_key") or queue.routing_key)
    rest = {name: value for name, value in route.items() if name not in ("queue", "declare")}
    exchange = Exchange("celery_delayed_27", type="topic")
    return {**rest, "exchange": exchange, "routing_key": calculate_routing_key(seconds, key)}


def _hop(app: Celery) -> timedelta:
    """Return for how long at most a message waits in a worker; one that comes early is sent on again.

    Redis delivers a second time what is not acknowledged within the visibility timeout, and RabbitMQ closes
    the channel of a consumer that waits for half an hour.
    """
    return min(timedelta(seconds=visibility_timeout(app)) / 3, _LONGEST_HOP)


def visibility_timeout(app: Celery) -> float:
    """Return after how many seconds Redis gives an unacknowledged message to somebody else."""
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout", _VISIBILITY_TIMEOUT))


def _uses_native_delay(app: Celery) -> bool:
    """Return whether the app has quorum queues, which Celery 5.5 and newer delay in the broker."""
    try:
        from celery.utils.quorum_queues import detect_quorum_queues
    except ImportError:
        return False
    driver = app.producer_pool.connections.connection.transport.driver_type
    return bool(detect_quorum_queues(app, driver)[0])


def bury(app: Celery, wire: Wire, changes: Mapping[str, Any]) -> None:
    """Publish a message, with its final state, to its queue's own dead queue, `<queue>.dead`."""
    name = f"{wire.queue}.dead"
    headers, compression = _own_headers(wire)
    with confirmed.producer(app) as producer:
        producer.publish(
            wire.body,
            exchange="",
            routing_key=name,
            declare=[Queue(name, durable=True)],
            headers={**headers, **changes},
            compression=compression,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
            retry=True,
            retry_policy=app.conf.task_publish_retry_policy,
            delivery_mode=2,
            **{k: v for k, v in wire.properties.items() if k != "delivery_mode"},
        )


def parked(wire: Wire, changes: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as the store keeps it until it is published, with where `options` send it."""
    route = {name: getattr(value, "name", value) for name, value in _chosen(options).items()}
    headers = {**wire.headers, **changes, "eta": None}
    return {**to_json(replace(wire, headers=headers)), "route": route}


def to_json(wire: Wire) -> dict[str, Any]:
    """Return the wire form as a dead letter keeps it."""
    body = wire.body.encode("utf-8") if isinstance(wire.body, str) else wire.body
    try:
        text, body_encoding = body.decode("utf-8"), "utf-8"
    except UnicodeDecodeError:
        text, body_encoding = base64.b64encode(body).decode("ascii"), "base64"
    return {
        "body": text,
        "body_encoding": body_encoding,
        "content_type": wire.content_type,
        "content_encoding": wire.content_encoding,
        "headers": json.loads(kombu_json.dumps(wire.headers)),
        "properties": json.loads(kombu_json.dumps(wire.properties)),
        "exchange": wire.exchange,
        "routing_key": wire.routing_key,
        "queue": wire.queue,
    }


def from_json(message: Mapping[str, Any]) -> Wire:
    """Return the wire form that a dead letter kept."""
    text: str = message["body"]
    return Wire(
        body=base64.b64decode(text) if message["body_encoding"] == "base64" else text.encode("utf-8"),
        content_type=message["content_type"],
        content_encoding=message["content_encoding"],
        headers=kombu_json.loads(json.dumps(message["headers"])),
        properties=kombu_json.loads(json.dumps(message["properties"])),
        exchange=message["exchange"],
        routing_key=message["routing_key"],
        queue=message["queue"],
    )


def expiry(app: Celery, headers: Mapping[str, Any]) -> datetime | None:
    """Return when a message expires, or None; a time without a zone is in the app's."""
    expires = headers.get("expires")
    if not isinstance(expires, str):
        return None
    try:
        at = datetime.fromisoformat(expires.replace("Z", "+00:00"))
    except ValueError:
        return None
    aware: datetime = maybe_make_aware(at, app.timezone)
    return aware
