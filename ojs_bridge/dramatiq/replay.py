"""Dead letters of a Dramatiq broker: how their message is kept and published again."""

from __future__ import annotations

import base64
import dataclasses
import math
import time
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import dramatiq
from dramatiq.broker import Broker, MessageProxy

from ..engine.publishing import Override
from ..errors import Unpublishable, Unreachable
from ..spec.job import Header
from ..store import Letter, Parked
from .consumer import confirm, have_queue
from .dead_places import forget_shown
from .encoding import encodable
from .outages import outages, told
from .translate import parked_options, replayed_options

FRAMEWORK = "dramatiq"


def original(message: MessageProxy | dramatiq.Message[Any]) -> dict[str, Any]:
    """Return a delivered message as a dead letter keeps it: the bytes of the broker's own encoder."""
    encoded = encodable(message).encode()
    try:
        return {"encoded": encoded.decode("utf-8"), "encoding": "utf-8"}
    except UnicodeDecodeError:
        return {"encoded": base64.b64encode(encoded).decode("ascii"), "encoding": "base64"}


def decoded(message: Mapping[str, Any]) -> dramatiq.Message[Any]:
    """Return the Dramatiq message that a dead letter kept."""
    text: str = message["encoded"]
    raw = base64.b64decode(text) if message["encoding"] == "base64" else text.encode("utf-8")
    return dramatiq.Message.decode(raw)


@dataclasses.dataclass(frozen=True)
class DramatiqPublisher:
    """Publishes dead letters and parked retries on the broker they came from. Raises Unreachable."""

    _broker: Broker

    def knows(self, type_: str) -> bool:
        """Return whether there is such an actor, or none at all."""
        return type_ in self._broker.actors or not self._broker.actors

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Enqueue the letter's message under its own id, with fresh attempts and a new timestamp."""
        message = _kept(letter.message)
        # First: what is enqueued may have failed again before this thread goes on.
        forget_shown(self._broker, message.message_id)
        self._enqueue(
            dataclasses.replace(
                message,
                queue_name=override.queue or message.queue_name,
                args=message.args if override.args is None else tuple(override.args),
                kwargs=message.kwargs if override.kwargs is None else dict(override.kwargs),
                options=replayed_options({**message.options, **(override.meta or {})}, header),
                message_timestamp=int(time.time() * 1000),
            )
        )

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Enqueue a parked retry's message, due now or delayed until a time."""
        message = _kept(parked.message)
        self._enqueue(dataclasses.replace(message, options=parked_options(message.options, state)), due)

    def _enqueue(self, message: dramatiq.Message[Any], due: datetime | None = None) -> None:
        try:
            message.encode()
        except Exception as error:
            raise Unpublishable(told(error)) from error
        confirm(self._broker)
        self._broker.declare_queue(message.queue_name)
        have_queue(self._broker, message.queue_name)
        try:
            self._broker.enqueue(message, delay=_milliseconds_to(due))
        except outages() as error:
            raise Unreachable(told(error)) from error


def _kept(message: Mapping[str, Any]) -> dramatiq.Message[Any]:
    """Return the message that the store kept; raises Unpublishable for a damaged one."""
    try:
        return decoded(message)
    except Exception as error:
        raise Unpublishable(f"its message is damaged: {told(error)}") from error


def _milliseconds_to(due: datetime | None) -> int | None:
    """Return the delay until a time, None for one that is over."""
    seconds = (due - datetime.now(timezone.utc)).total_seconds() if due else 0
    # One more, because the broker's own clock reading loses the fraction of its millisecond.
    return math.ceil(seconds * 1000) + 1 if seconds > 0 else None
