"""The dead queues of Celery: each queue has its own, `<queue>.dead`, for the letters that no store has."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from celery import Celery, Task
from kombu.connection import Connection
from kombu.utils.json import loads

from ..bridge import Bridge
from ..engine.layers import TaskPolicy
from ..errors import Unreachable
from ..messages import HEADER, parameters_of
from ..operations.broker_letters import await_turn, claimed_on_redis, found_letter, renewed, tell_if_hidden
from ..rules.job import Job, count_of, decoded
from ..store import Letter
from . import compat, sending
from .taking import client_of
from .wire import Wire, carried, chain_of, delivered, time_in, to_json

logger = logging.getLogger("ojs_bridge")

FRAMEWORK = "celery"

_LOCKED = 405


class CeleryDeadQueues:
    """The dead queues of all queues that an app consumes, routes to or has sent to."""

    def __init__(self, app: Celery, bridge: Bridge, policy_of: Callable[[Task | None], TaskPolicy]) -> None:
        self._app = app
        self._bridge = bridge
        self._policy_of = policy_of

    def read(self, most: int) -> Sequence[Letter]:
        """Return at most `most` letters; on RabbitMQ the oldest of each queue, on Redis the newest."""
        all_letters: list[Letter] = []
        with self._reaching() as places:
            for queue in sorted(sending.queues_of(self._app)):
                held = places.read(sending.dead_name(queue), most - len(all_letters))
                letters = (self._letter(message, queue) for message in held)
                all_letters += [letter for letter in letters if letter is not None]
        return all_letters

    def take(self, letter: Letter, then: Callable[[Letter], object]) -> bool:
        """Claim a letter, call `then`, and delete the letter; False for a letter that is gone or claimed."""
        queue = letter.queue

        def is_it(message: Any) -> bool:
            if str(message.headers.get("id")) != letter.job_id:
                return False
            held = self._letter(message, queue)
            return held is not None and held.message == letter.message

        with self._reaching() as places:
            return places.take(sending.dead_name(queue), is_it, lambda: then(letter))

    @contextmanager
    def _reaching(self) -> Iterator[DeadPlaces]:
        """Give the dead queues, through a new connection to the broker that the app writes to."""
        try:
            with self._app.connection_for_write() as connection:
                yield dead_places_of(connection)
        except sending.out_of_reach(self._app) as error:
            raise Unreachable(f"{type(error).__name__}: {error}") from error

    def _letter(self, message: Any, queue: str) -> Letter | None:
        """Return the dead letter of a message; None for a message that cannot be read."""
        try:
            return self._read(message, queue)
        except Exception as error:  # noqa: BLE001 - it may be anything that no worker could read
            logger.warning("a message in %s cannot be read, and stays there: %r", queue, error)
            return None

    def _read(self, message: Any, queue: str) -> Letter:
        wire = self._wire(message, queue)
        bare = self._ended(wire)
        engine = self._bridge.engine
        policy = self._policy_of(compat.task_in(self._app.tasks, bare.type))
        begun = engine.admit(decoded(wire.headers.get(HEADER), bare), bare, policy)
        return found_letter(begun, FRAMEWORK, self._kept(wire), at=None, now=engine.now())

    def _wire(self, message: Any, queue: str) -> Wire:
        """Return the wire form of a dead message, with the queue that it came from."""
        parts = carried(message, message.body, None, self._app)
        wire = delivered(self._app, parts, message.properties, {"routing_key": queue})
        own = {name: value for name, value in wire.headers.items() if name not in sending.BROKER_HEADERS}
        return replace(wire, headers=own, queue=queue)

    def _kept(self, wire: Wire) -> dict[str, Any]:
        task = compat.task_in(self._app.tasks, wire.headers["task"])
        return {**to_json(wire), "parameters": [*parameters_of(task.run)] if task else []}

    def _ended(self, wire: Wire) -> Job:
        """Return the job as Celery alone describes it; the counter has its last run already."""
        headers = wire.headers
        attempt = count_of(headers.get("retries")) or 1
        return Job(
            id=str(headers["id"]),
            type=str(headers["task"]),
            queue=wire.queue,
            attempt=attempt,
            fence=attempt - 1,
            expires=time_in(self._app, headers.get("expires")),
            chain=chain_of(headers),
        )


class DeadPlaces(Protocol):
    """The dead queues of a connection's broker, by name; a queue that does not exist is empty."""

    def read(self, name: str, most: int) -> list[Any]:
        """Return at most `most` messages, and leave them where they are."""

    def take(self, name: str, is_it: Callable[[Any], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then` and delete it, unless `then` raises; False without a message."""


def dead_places_of(connection: Connection) -> DeadPlaces:
    """Return where a connection's broker keeps dead queues."""
    return _OnRedis(connection) if connection.transport.driver_type == "redis" else _InQueues(connection)


def oldest_in(connection: Connection, name: str) -> list[Mapping[str, Any]]:
    """Return the headers of the oldest message of each priority in a queue; only Redis shows them."""
    return _OnRedis(connection).oldest(name) if connection.transport.driver_type == "redis" else []


class _OnRedis:
    """Dead queues on Redis: a list for each priority, the newest message first."""

    def __init__(self, connection: Connection) -> None:
        self._channel = connection.channel()
        self._client = client_of(self._channel)

    def read(self, name: str, most: int) -> list[Any]:
        return [message for _, _, message in islice(self._all(name, most), most)] if most else []

    def oldest(self, name: str) -> list[Mapping[str, Any]]:
        """Return the headers of the oldest message of each list."""
        items = (item for key in self._keys(name) for item in self._client.lrange(key, -1, -1))
        return [message.headers for item in items if (message := self._message(item)) is not None]

    def take(self, name: str, is_it: Callable[[Any], bool], then: Callable[[], object]) -> bool:
        place = next(((key, item) for key, item, message in self._all(name) if is_it(message)), None)
        if place is None:
            return False
        key, item = place
        with claimed_on_redis(self._client, f"{key}.ojs.{hashlib.sha256(item).hexdigest()}") as is_ours:
            if not is_ours or item not in self._client.lrange(key, 0, -1):
                return False
            then()
            self._client.lrem(key, -1, item)
        return True

    def _all(self, name: str, most: int = 0) -> Iterator[tuple[str, bytes, Any]]:
        """Yield the key, the item and the message of each item, from each list at most `most`, or all."""
        for key in self._keys(name):
            for item in self._client.lrange(key, 0, most - 1):
                message = self._message(item)
                if message is not None:
                    yield key, item, message

    def _keys(self, name: str) -> list[str]:
        channel, list_of = self._channel, compat.q_for_pri(self._channel)
        prefix = channel.global_keyprefix or ""
        return [f"{prefix}{list_of(name, step)}" for step in channel.priority_steps]

    def _message(self, item: bytes) -> Any:
        try:
            message = self._channel.Message(loads(item.decode("utf-8")), channel=self._channel)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("a message in a dead queue cannot be read, and stays there: %r", error)
            return None
        return message if _is_readable(message) else None


class _InQueues:
    """Dead queues on RabbitMQ and others: a reader holds what it reads until it gives it back."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def read(self, name: str, most: int) -> list[Any]:
        with _looking(self._connection, name) as messages:
            held = [*islice(messages, most)]
        if held and self._connection.transport.driver_type == "amqp":
            channel = self._connection.channel()
            tell_if_hidden(name, lambda: channel.queue_declare(name, passive=True).message_count)
        return [*filter(_is_readable, held)]

    def take(self, name: str, is_it: Callable[[Any], bool], then: Callable[[], object]) -> bool:
        with _looking(self._connection, name) as messages:
            for message in messages:
                if _is_readable(message) and is_it(message):
                    then()
                    message.ack()
                    return True
        return False


def _is_readable(message: Any) -> bool:
    """Return whether a message belongs to a Celery job."""
    if not message.errors and message.headers.get("id") and message.headers.get("task"):
        return True
    logger.warning("a message in a dead queue is of no Celery job, and stays there")
    return False


@contextmanager
def _looking(connection: Connection, name: str) -> Iterator[Iterator[Any]]:
    """Give a queue's messages, the oldest first; those that are not acknowledged go back to their places."""
    is_amqp = connection.transport.driver_type == "amqp"
    if is_amqp:
        await_turn(lambda: _has_turn(connection, name))
    channel = connection.channel()

    def messages() -> Iterator[Any]:
        try:
            while (message := channel.basic_get(name, no_ack=False)) is not None:
                if is_amqp and _is_renewed(channel, name, message):
                    continue
                convert = getattr(channel, "message_to_python", None)
                yield convert(message) if convert else message
        except connection.channel_errors as error:
            if getattr(error, "reply_code", None) != sending.NOT_FOUND:
                raise

    try:
        yield messages()
    finally:
        # Kombu's memory transport would lose the messages. For RabbitMQ 4.3 closing alone is a failed
        # delivery, which a quorum queue may delay.
        if not is_amqp or channel.is_open:
            channel.basic_recover(requeue=True)
        channel.close()


def _is_renewed(channel: Any, name: str, message: Any) -> bool:
    """Publish a message that was often delivered anew, to the end of its queue; False if it stays."""
    headers = renewed(message.properties.get("application_headers") or {})
    if headers is None:
        return False
    properties = {**message.properties, "application_headers": headers}
    try:
        channel.basic_publish_confirm(type(message)(message.body, **properties), "", name)
    except Exception as error:  # noqa: BLE001 - a full queue refuses it; its old place is as good
        logger.warning("a message in %s is delivered often, and cannot be put there anew: %r", name, error)
        return False
    channel.basic_ack(message.delivery_tag)
    return True


def _has_turn(connection: Connection, name: str) -> bool:
    try:
        connection.channel().queue_declare(f"{name}.ojs", exclusive=True)
    except connection.channel_errors as error:
        return getattr(error, "reply_code", None) != _LOCKED
    return True
