"""A Celery message, as the broker delivers it and as the store keeps it."""

from __future__ import annotations

import base64
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any, TypeAlias

from celery import Celery, Task
from celery.utils.saferepr import saferepr
from celery.utils.time import maybe_make_aware
from kombu.entity import Queue, binding
from kombu.serialization import dumps, loads, registry
from kombu.utils import json as kombu_json

from ..errors import InvalidState, Unpublishable
from ..messages import CREATED, HEADER
from ..rules.job import Job, count_of, decoded
from . import compat

#: The framework's name, in a letter, and where an engine knows its publishers.
NAME = "celery"
#: The property in which a request takes its message along to the process that runs the task.
KEY = "ojs_wire"
#: The property with a decision that could not be carried out yet.
OUTCOME = "ojs_outcome"
#: The option of an eager retry with the number of its retries so far; a snooze does not count.
EAGER_RETRIES = "ojs_eager_retries"

#: The properties that belong to a message, and not to its transport.
_PROPERTIES = ("correlation_id", "reply_to", "priority", "delivery_mode")
#: The routing key prefix of RabbitMQ's native delayed delivery: 28 bits of delay.
DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")
#: Kombu's JSON marks a value of another type with this.
_KOMBUS_OWN = '"__type__"'
#: The exchanges from which RabbitMQ delivers what it has delayed.
DELAYED = "celery_delayed_"
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

#: The arguments of a run, by place and by name.
Arguments: TypeAlias = tuple[Sequence[Any], Mapping[str, Any]]
#: Body, content type, content encoding, headers and publication of a delivery, which a request takes along.
Carried: TypeAlias = tuple[bytes | str, str, str, Mapping[str, Any], str]


@dataclass(frozen=True, slots=True)
class Wire:
    """A message and the place that it came from."""

    body: bytes | str
    content_type: str
    content_encoding: str
    headers: dict[str, Any]
    properties: dict[str, Any] = field(default_factory=dict)
    exchange: str = ""
    routing_key: str = ""
    queue: str = ""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message as it came, or, with changed headers, as it goes on.

    `parameters` are the names of what its task takes. An eager retry has the signature by which it runs. A
    job that has not begun keeps the time that its user has set.
    """

    wire: Wire
    changes: Mapping[str, Any] | None = None
    parameters: Iterable[str] = ()
    signature: Any = None
    keeps_eta: bool = False

    def kept(self) -> dict[str, Any]:
        """Return the message as the store keeps it."""
        wire = self.wire
        if self.changes is not None:
            eta = wire.headers.get("eta") if self.keeps_eta else None
            wire = replace(wire, headers={**wire.headers, **self.changes, "eta": eta})
        return {**to_json(wire), "parameters": [*self.parameters]}


def carried(
    message: Any, body: Any, headers: Mapping[str, Any] | None, app: Celery, publication: str = ""
) -> Carried:
    """Return the parts of a received message that its request has not; they are not copied."""
    content_type, encoding = message.content_type, message.content_encoding
    if not isinstance(body, (bytes, str)):
        name = compat.type_to_name(registry).get(content_type, app.conf.task_serializer)
        content_type, encoding, body = _dumps_if_possible(body, name)
    return body, content_type, encoding, message.headers if headers is None else headers, publication


def delivered(app: Celery, parts: Carried, properties: Mapping[str, Any], info: Mapping[str, Any]) -> Wire:
    """Return the wire form of a message that a worker received."""
    body, content_type, encoding, headers, _ = parts
    return Wire(
        body=body,
        content_type=content_type,
        content_encoding=encoding,
        headers=dict(headers),
        properties={name: properties[name] for name in _PROPERTIES if name in properties},
        exchange=info.get("exchange") or "",
        routing_key=info.get("routing_key") or "",
        queue=queue_of(app, info),
    )


def queue_of(app: Celery, info: Mapping[str, Any]) -> str:
    """Return the queue that a delivery came from; the delivery names its exchange and routing key only."""
    exchange, routing_key = info.get("exchange") or "", info.get("routing_key") or ""
    key = DELAY_PREFIX.sub("", routing_key)
    if not exchange:
        return key
    delayed = exchange.startswith(DELAYED)
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
    """Return the message that an eagerly applied task would have had."""
    message = compat.as_task_v2(app.amqp)(
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
    """Encode a body; arguments that cannot be encoded become their repr."""
    try:
        return dumps(body, serializer=serializer)
    except Exception:  # noqa: BLE001 - eager tasks take arguments that only this process can hold
        args, kwargs, _ = body
        shown = [saferepr(arg) for arg in args], {str(key): saferepr(arg) for key, arg in kwargs.items()}
        return dumps((*shown, {}), serializer="json")


def arguments_of(wire: Wire) -> Arguments:
    """Return the arguments in a message."""
    args, kwargs, _ = loads(wire.body, wire.content_type, wire.content_encoding, force=True)
    return args, kwargs


def with_arguments(wire: Wire, args: Any, kwargs: Any) -> Wire:
    """Return the message with other arguments in the same encoding; its links and its chord stay."""
    headers = {**wire.headers, "argsrepr": saferepr(args), "kwargsrepr": saferepr(kwargs)}
    *_, embed = loads(wire.body, wire.content_type, wire.content_encoding, force=True)
    name = compat.type_to_name(registry)[wire.content_type]
    content_type, encoding, body = dumps((args, kwargs, embed), serializer=name)
    return replace(wire, body=body, content_type=content_type, content_encoding=encoding, headers=headers)


def is_broadcast(app: Celery, delivery_info: Mapping[str, Any] | None) -> bool:
    """Return whether each worker has a copy of its own of a message, because its exchange is a fanout."""
    exchange = (delivery_info or {}).get("exchange")
    if not exchange:
        return False
    return any(is_fanout(queue) for queue in app.amqp.queues.values() if queue.exchange.name == exchange)


def is_fanout(queue: Queue) -> bool:
    """Return whether a queue is bound to a fanout, as kombu's Broadcast is."""
    return bool(queue.exchange.type == "fanout")


def to_json(wire: Wire) -> dict[str, Any]:
    """Return a message as the store keeps it."""
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
    """Return a message that the store kept; raises Unpublishable for a damaged message."""
    try:
        # Only Kombu's JSON has some values, such as times.
        whole = json.dumps(message)
        message = kombu_json.loads(whole) if _KOMBUS_OWN in whole else message
        text: str = message["body"]
        return Wire(
            body=base64.b64decode(text) if message["body_encoding"] == "base64" else text.encode("utf-8"),
            content_type=message["content_type"],
            content_encoding=message["content_encoding"],
            headers=dict(message["headers"]),
            properties=dict(message["properties"]),
            exchange=message["exchange"],
            routing_key=message["routing_key"],
            queue=message["queue"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unpublishable(f"its message is damaged: {error!r}") from error


def read(
    task: Task, request: Any, headers: Mapping[str, Any], wire: Wire | None
) -> tuple[Job | InvalidState, Job]:
    """Return a request's job by the state in its headers, or the error in that, and as Celery alone has it.

    An eagerly applied task has no delivery, but the message (`wire`) that it would have had.
    """
    app, retries = task.app, count_of(request.retries) or 0
    own = wire.headers if wire else headers
    bare = Job(
        # A producer may send an id of another type.
        id=str(request.id),
        type=task.name,
        queue=wire.queue if wire else queue_of(app, request.delivery_info or {}),
        attempt=1 + retries,
        fence=retries,
        created_at=time_in(app, own.get(CREATED)),
        expires=time_in(app, own.get("expires")),
        chain=chain_of(own),
    )
    return decoded(headers.get(HEADER), bare, request.retries), bare


def dead_name(queue: str) -> str:
    """Return the name of a queue's own dead queue."""
    return f"{queue}.dead"


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


def chain_of(headers: Mapping[str, Any]) -> str:
    """Return the mark of a job that `self.replace(...)` has sent: its id is that of the job before."""
    nesting = headers.get("replaced_task_nesting")
    return f"r{nesting}" if nesting else ""


def known(request: Any) -> Job:
    """Return a job as its request alone describes it, for the log; Celery has two kinds of requests."""
    fields = getattr(request, "request_dict", None) or vars(request)
    return Job(str(request.id), str(fields.get("task") or ""), "", 1 + (count_of(fields.get("retries")) or 0))


def time_in(app: Celery, text: object) -> datetime | None:
    """Return the time that a header says, or None; a time without a zone is in the app's."""
    if not isinstance(text, str):
        return None
    try:
        at = datetime.fromisoformat(text.replace("Z", "+00:00"))
        aware: datetime = maybe_make_aware(at, app.timezone)
        return aware.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
