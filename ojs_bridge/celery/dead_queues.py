"""The messages in an app's dead queues, `<queue>.dead`, as dead letters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from celery import Celery

from ..bridge import Bridge
from ..engine.runs import TaskPolicy
from ..errors import Unreachable
from ..messages import HEADER, parameters_of
from ..operations.broker_letters import found_letter
from ..rules.job import Job, count_of, decoded
from ..store import Letter
from . import compat, sending
from .dead_places import DeadPlaces, dead_places_of
from .wire import Wire, carried, chain_of, delivered, expiry, to_json

logger = logging.getLogger("ojs_bridge")

FRAMEWORK = "celery"


class CeleryDeadQueues:
    """The dead queues of all queues that an app consumes, routes to or has sent to."""

    def __init__(self, app: Celery, bridge: Bridge, policy_of: Callable[[str], TaskPolicy]) -> None:
        self._app = app
        self._bridge = bridge
        self._policy_of = policy_of

    def read(self, most: int) -> Sequence[Letter]:
        """Return at most `most` letters; on RabbitMQ the oldest of each queue, on Redis the newest."""
        found: list[Letter] = []
        with self._reaching() as places:
            for queue in sorted(queues_of(self._app)):
                held = places.read(sending.dead_name(queue), most - len(found))
                letters = (self._letter(message, queue) for message in held)
                found += [letter for letter in letters if letter is not None]
        return found

    def take(self, letter: Letter, then: Callable[[Letter], object]) -> bool:
        """Claim a letter, call `then`, and delete the letter; False for a letter that is gone or claimed."""
        queue = letter.queue

        def is_it(message: Any) -> bool:
            if str(message.headers.get("id")) != letter.job_id:
                return False
            found = self._letter(message, queue)
            return found is not None and found.message == letter.message

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
        begun = engine.admit(decoded(wire.headers.get(HEADER), bare), bare, self._policy_of(bare.type))
        return found_letter(begun, FRAMEWORK, self._kept(wire), at=None, now=engine.now())

    def _wire(self, message: Any, queue: str) -> Wire:
        """Return the wire form of a dead message, with the queue that it came from."""
        parts = carried(message, message.body, None, self._app)
        found = delivered(self._app, parts, message.properties, {"routing_key": queue})
        own = {name: value for name, value in found.headers.items() if name not in sending.BROKER_HEADERS}
        return replace(found, headers=own, queue=queue)

    def _kept(self, wire: Wire) -> dict[str, Any]:
        task = self._app.tasks.get(wire.headers["task"])
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
            expires=expiry(self._app, headers),
            chain=chain_of(headers),
        )


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
