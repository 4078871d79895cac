"""A Celery message as it was delivered, and how it is published again to the letter."""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from celery import Celery
from celery.app.amqp import task_message
from kombu.entity import Exchange, Queue
from kombu.serialization import dumps, loads, registry
from kombu.utils import json as kombu_json

#: The message header that carries a job's retry state.
HEADER = "ojs"
#: The key under which a request carries its `Wire` to the process that runs the task.
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

    @property
    def queue(self) -> str:
        """The queue's name, as far as a delivery tells it."""
        return _DELAY_PREFIX.sub("", self.routing_key)

    @property
    def delayed_natively(self) -> bool:
        """Whether RabbitMQ's native delayed delivery brought it."""
        return self.exchange.startswith("celery_delayed")


def delivered(message: Any, body: Any, headers: Mapping[str, Any] | None, app: Celery) -> Wire:
    """Return the wire form of a message that a worker received."""
    raw, content_type, encoding = body, message.content_type, message.content_encoding
    if not isinstance(raw, (bytes, str)):
        content_type, encoding, raw = dumps(raw, serializer=app.conf.task_serializer)
    info = message.delivery_info or {}
    properties = message.properties or {}
    kept = {name: properties[name] for name in _PROPERTIES if name in properties}
    return Wire(
        body=raw,
        content_type=content_type,
        content_encoding=encoding,
        headers=dict(message.headers if headers is None else headers),
        properties=kept,
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
    )


def eager(app: Celery, name: str, request: Any) -> Wire:
    """Return the wire form that an eagerly applied task would have had."""
    message = app.amqp.create_task_message(
        request.id,
        name,
        request.args,
        request.kwargs,
        retries=request.retries,
        callbacks=request.callbacks,
        errbacks=request.errbacks,
    )
    content_type, encoding, body = dumps(message.body, serializer=app.conf.task_serializer)
    headers = {**message.headers, **(request.headers or {})}
    queue = app.amqp.default_queue.name
    return Wire(body, content_type, encoding, headers, {"correlation_id": request.id}, routing_key=queue)


def with_arguments(wire: Wire, args: Any, kwargs: Any) -> Wire:
    """Return the wire form with other arguments, encoded as the original was; links and chord stay."""
    embed = loads(wire.body, wire.content_type, wire.content_encoding, force=True)[2]
    name = registry.type_to_name[wire.content_type]
    content_type, encoding, body = dumps((args, kwargs, embed), serializer=name)
    return replace(wire, body=body, content_type=content_type, content_encoding=encoding)


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
    properties = dict(wire.properties)
    delivery_mode = properties.pop("delivery_mode", None)
    message = task_message({**headers, **changes}, properties, wire.body, None)
    with app.producer_or_acquire(None) as producer:
        app.amqp.send_task_message(
            producer,
            headers["task"],
            message,
            compression=compression,
            delivery_mode=delivery_mode,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
            **_delayed(app, _route(app, wire, options or {}), due),
        )


def _own_headers(wire: Wire) -> tuple[dict[str, Any], str | None]:
    headers = {name: value for name, value in wire.headers.items() if name not in BROKER_HEADERS}
    return headers, headers.pop("compression", None)


def _route(app: Celery, wire: Wire, options: Mapping[str, Any]) -> dict[str, Any]:
    chosen = {k: v for k, v in options.items() if k in ("queue", "exchange", "routing_key", "priority")}
    if {"queue", "exchange", "routing_key"} & set(chosen):
        return chosen
    if wire.exchange and not wire.delayed_natively:
        return {"exchange": wire.exchange, "routing_key": wire.routing_key, **chosen}
    return {"queue": wire.queue or app.amqp.default_queue.name, **chosen}


def _delayed(app: Celery, route: dict[str, Any], due: datetime | None) -> dict[str, Any]:
    """Send what is due later through RabbitMQ's native delayed delivery where the app's queues need it."""
    seconds = math.ceil((due - datetime.now(timezone.utc)).total_seconds()) if due else 0
    if seconds <= 0 or not _uses_native_delay(app):
        return route
    from kombu.transport.native_delayed_delivery import calculate_routing_key

    queue = app.amqp.queues[route["queue"]] if "queue" in route else None
    key = queue.routing_key if queue else route["routing_key"]
    rest = {name: value for name, value in route.items() if name != "queue"}
    exchange = Exchange("celery_delayed_27", type="topic")
    return {**rest, "exchange": exchange, "routing_key": calculate_routing_key(seconds, key)}


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
    with app.producer_or_acquire(None) as producer:
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
    )


def expiry(headers: Mapping[str, Any]) -> datetime | None:
    """Return when a message expires, or None."""
    expires = headers.get("expires")
    if not isinstance(expires, str):
        return None
    try:
        at = datetime.fromisoformat(expires.replace("Z", "+00:00"))
    except ValueError:
        return None
    return at if at.tzinfo else None
