"""Messages from the store are published: replayed dead letters, and parked retries that are due."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from amqp.exceptions import ChannelError, FrameSyntaxError
from celery import Celery
from kombu.connection import Connection
from kombu.exceptions import SerializationError

from ..bridge import Bridge
from ..engine.runs import Backlog, Override
from ..errors import Unpublishable, Unreachable
from ..messages import CREATED, HEADER
from ..rules.job import Header, Job, count_of, decoded
from ..store import Letter, Parked
from . import sending, wire
from .dead_queues import NOT_FOUND, oldest_in, queues_of


@dataclass(frozen=True)
class CeleryPublisher:
    """Publishes dead letters and parked retries through the app they came from."""

    _app: Celery
    _bridge: Bridge

    @property
    def system(self) -> str:
        """The kind of the broker."""
        kind = sending.driver_type(self._app)
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
        due = map(self._due, oldest_in(connection, queue) if depth else ())
        return Backlog(queue, depth, min((at for at in due if at is not None), default=None))

    def _due(self, headers: Mapping[str, Any]) -> datetime | None:
        """Return when the job of a message was due or sent, if its headers say so."""
        retries = count_of(headers.get("retries")) or 0
        created = wire.time_in(self._app, headers.get(CREATED))
        bare = Job(str(headers.get("id")), str(headers.get("task")), "", 1 + retries, created_at=created)
        job = decoded(headers.get(HEADER), bare, headers.get("retries"))
        return job.due_at if isinstance(job, Job) else None

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish the letter's message under its own id, at attempt 1; a past expiry is dropped."""
        kept = wire.from_json(letter.message)
        if override.args is not None or override.kwargs is not None:
            kept = _with_arguments(kept, letter, override)
        changes: dict[str, Any] = {**(override.meta or {}), "retries": 0, "eta": None, HEADER: header.text}
        expires = wire.time_in(self._app, kept.headers.get("expires"))
        if expires and expires <= self._bridge.engine.now():
            changes["expires"] = None
        if queue := override.queue:
            kept = replace(kept, exchange="", routing_key=queue, queue=queue)
        self._publish(kept, changes)

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Publish a parked retry's message, due now, or with the whole delay as its `eta`."""
        changes = {"eta": due.isoformat() if due else None, HEADER: json.dumps(state)}
        self._publish(wire.from_json(parked.message), changes, due)

    def _publish(self, kept: wire.Wire, changes: Mapping[str, Any], due: datetime | None = None) -> None:
        try:
            sending.publish(self._app, sending.Outgoing(kept, changes), self._bridge.engine.now(), due)
        except sending.out_of_reach(self._app) as error:
            raise Unreachable(repr(error)) from error
        except (SerializationError, FrameSyntaxError, struct.error, ValueError, TypeError) as error:
            raise Unpublishable(repr(error)) from error


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


def _with_arguments(kept: wire.Wire, letter: Letter, override: Override) -> wire.Wire:
    reading = letter.reading
    if reading.args is None:
        raise Unpublishable(f"args: those of dead letter {letter.id!r} cannot be replaced: {reading.note}")
    args = reading.args if override.args is None else override.args
    return wire.with_arguments(kept, args, reading.kwargs if override.kwargs is None else override.kwargs)
