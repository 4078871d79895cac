"""The ports of the engine: what the adapter of a framework offers to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from ..spec.job import Header
from ..store import Letter, Parked


@dataclass(frozen=True, slots=True)
class Override:
    """What a replay changes of a job (spec section dlq 6.3); None keeps, `meta` and `retry` are merged."""

    queue: str | None = None
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    meta: Mapping[str, Any] | None = None
    retry: Mapping[str, Any] = field(default_factory=dict)


class Publisher(Protocol):
    """Publishes messages of one framework.

    Raises Unreachable and Unpublishable; any other error is of this message alone, and may be over later.
    """

    def knows(self, type_: str) -> bool:
        """Return whether a job type has a handler here, or this process has none of its own at all."""

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish a dead letter's original message with its retry state replaced by `header`."""

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Publish a parked retry's message with `state` as its retry state.

        Due now, or at a time until which the framework itself delays it, whoever its workers are.
        """


class DeadQueues(Protocol):
    """The dead queues of one framework's app or broker; every method raises Unreachable."""

    def read(self, most: int) -> Sequence[Letter]:
        """Return at most so many letters of all queues that are known here, and leave them as they are."""

    def take(self, letter: Letter, then: Callable[[Letter], object]) -> bool:
        """Have a letter to oneself, call `then`, and delete the letter; what `then` raises keeps it.

        False, and `then` is not called, when it is not there any more or somebody else holds it.
        """
