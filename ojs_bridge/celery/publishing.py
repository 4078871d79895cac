"""Messages from the store are published: replayed dead letters, and parked retries that are due."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from amqp.exceptions import FrameSyntaxError
from celery import Celery
from kombu.exceptions import SerializationError

from ..engine.ports import Override
from ..errors import Unpublishable, Unreachable
from ..messages import HEADER
from ..spec.job import Header
from ..store import Letter, Parked
from . import sending, wire


@dataclass(frozen=True)
class CeleryPublisher:
    """Publishes dead letters and parked retries through the app they came from."""

    _app: Celery
    _now: Callable[[], datetime]

    @property
    def system(self) -> str:
        """The kind of the broker."""
        return sending.system(self._app)

    def knows(self, type_: str) -> bool:
        """Return whether the app has this task, or no tasks but Celery's own."""
        tasks = self._app.tasks
        return type_ in tasks or all(name.startswith("celery.") for name in tasks)

    def ping(self) -> bool:
        """Connect to the broker anew; raises any error."""
        with self._app.connection_for_write() as connection:
            connection.connect()
        return True

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish the letter's message under its own id, at attempt 1; a past expiry is dropped."""
        kept = _kept(letter.message)
        if override.args is not None or override.kwargs is not None:
            kept = _with_arguments(kept, letter, override)
        changes: dict[str, Any] = {
            **(override.meta or {}),
            "retries": 0,
            "eta": None,
            HEADER: header.text,
        }
        expires = wire.expiry(self._app, kept.headers)
        if expires and expires <= self._now():
            changes["expires"] = None
        self._publish(kept, changes, {"queue": override.queue} if override.queue else None)

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Publish a parked retry's message, due now, or with the whole delay as its `eta`."""
        changes = {"eta": due.isoformat() if due else None, HEADER: json.dumps(state)}
        kept = _kept(parked.message)
        self._publish(kept, changes, parked.message.get("route"), due)

    def _publish(
        self,
        kept: wire.Wire,
        changes: Mapping[str, Any],
        route: Mapping[str, Any] | None = None,
        due: datetime | None = None,
    ) -> None:
        try:
            sending.publish(self._app, kept, changes, self._now(), due=due, options=route)
        except sending.out_of_reach(self._app) as error:
            raise Unreachable(repr(error)) from error
        except (SerializationError, FrameSyntaxError, struct.error, ValueError, TypeError) as error:
            raise Unpublishable(repr(error)) from error


def _kept(message: Mapping[str, Any]) -> wire.Wire:
    """Return a message from the store; raises Unpublishable for a damaged message."""
    try:
        return wire.from_json(message)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unpublishable(f"its message is damaged: {error!r}") from error


def _with_arguments(kept: wire.Wire, letter: Letter, override: Override) -> wire.Wire:
    reading = letter.reading
    if reading.args is None:
        raise Unpublishable(f"args: those of dead letter {letter.id!r} cannot be replaced: {reading.note}")
    args = reading.args if override.args is None else override.args
    return wire.with_arguments(kept, args, reading.kwargs if override.kwargs is None else override.kwargs)
