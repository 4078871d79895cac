"""The dead queues of Celery: each queue has its own, `<queue>.dead`, for the letters that no store has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

from celery import Celery, Task
from kombu.connection import Connection

from ..adapters import parameters_of
from ..adapters.dead_queues import HeldQueues, QueuesOnRabbitMQ, found_letter
from ..bridge import Bridge
from ..engine.layers import TaskPolicy
from ..messages import HEADER
from ..rules.job import Job, count_of, decoded
from ..store import Letter
from . import compat
from .wire import (
    BROKER_HEADERS,
    NAME,
    Wire,
    carried,
    chain_of,
    dead_name,
    delivered,
    queues_of,
    time_in,
    to_json,
)

logger = logging.getLogger("ojs_bridge")


class CeleryDeadQueues:
    """The dead queues of all queues that an app consumes, routes to or has sent to."""

    def __init__(
        self,
        app: Celery,
        bridge: Bridge,
        reaching: Callable[[], AbstractContextManager[DeadPlaces]],
        policy_of: Callable[[Task | None], TaskPolicy],
    ) -> None:
        self._app = app
        self._bridge = bridge
        self._reaching = reaching
        self._policy_of = policy_of

    def read(self, most: int) -> Sequence[Letter]:
        """Return at most `most` letters; on RabbitMQ the oldest of each queue, on Redis the newest."""
        all_letters: list[Letter] = []
        with self._reaching() as places:
            for queue in sorted(queues_of(self._app)):
                found = places.read(dead_name(queue), most - len(all_letters))
                letters = (self._letter(message, queue) for message in found)
                all_letters += [letter for letter in letters if letter is not None]
        return all_letters

    def take(self, letter: Letter, then: Callable[[Letter], object]) -> bool:
        """Claim a letter, call `then`, and delete the letter; False for a letter that is gone or claimed."""
        queue = letter.queue

        def is_it(message: Any) -> bool:
            if str(message.headers.get("id")) != letter.job_id:
                return False
            found = self._letter(message, queue)
            return found is not None and found.message == letter.message

        with self._reaching() as places:
            return places.take(dead_name(queue), is_it, lambda: then(letter))

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
        run = engine.admit(decoded(wire.headers.get(HEADER), bare), bare, policy)
        return found_letter(run, NAME, self._kept(wire), at=None, now=engine.now())

    def _wire(self, message: Any, queue: str) -> Wire:
        """Return the wire form of a dead message, with the queue that it came from."""
        parts = carried(message, message.body, None, self._app)
        wire = delivered(self._app, parts, message.properties, {"routing_key": queue})
        own = {name: value for name, value in wire.headers.items() if name not in BROKER_HEADERS}
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


def is_readable(message: Any) -> bool:
    """Return whether a message belongs to a Celery job."""
    if not message.errors and message.headers.get("id") and message.headers.get("task"):
        return True
    logger.warning("a message in a dead queue is of no Celery job, and stays there")
    return False


class InQueues(HeldQueues[Any]):
    """Dead queues as any transport of kombu has them."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.errors = connection.channel_errors

    def read(self, name: str, most: int) -> list[Any]:
        """Return at most `most` messages of Celery's jobs, and leave them where they are."""
        return [*filter(is_readable, super().read(name, most))]

    def take(self, name: str, is_it: Callable[[Any], bool], then: Callable[[], object]) -> bool:
        """Claim a message, call `then` and delete it, unless `then` raises; False without a message."""
        return super().take(name, lambda message: is_readable(message) and is_it(message), then)

    def get(self, channel: Any, name: str) -> Any:
        """Return the next message of a queue, or None."""
        return channel.basic_get(name, no_ack=False)

    def shown(self, channel: Any, message: Any) -> Any:
        """Return kombu's message."""
        return channel.message_to_python(message) if hasattr(channel, "message_to_python") else message

    def delete(self, channel: Any, message: Any) -> None:
        """Acknowledge a message."""
        channel.basic_ack(message.delivery_tag)

    def put_back(self, channel: Any) -> None:
        """Put back what was not acknowledged: kombu's memory transport would lose it."""
        channel.basic_recover(requeue=True)

    def oldest(self, _: str) -> list[Mapping[str, Any]]:
        """Return nothing: only Redis shows the headers of the oldest messages."""
        return []


class OnRabbitMQ(InQueues, QueuesOnRabbitMQ[Any]):
    """Dead queues on RabbitMQ."""

    def headers_of(self, message: Any) -> Mapping[str, Any]:
        """Return the headers of a message."""
        return message.properties.get("application_headers") or {}

    def publish(self, channel: Any, name: str, message: Any, headers: dict[str, Any]) -> None:
        """Publish a message with other headers, and wait until RabbitMQ has confirmed it."""
        properties = {**message.properties, "application_headers": headers}
        channel.basic_publish_confirm(type(message)(message.body, **properties), "", name)
