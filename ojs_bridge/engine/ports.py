"""The ports of the engine, which the adapter of each framework fills."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

from ..rules.decision import DeadLettered, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import Failure
from ..rules.job import Header, Job
from ..store import Letter, Parked
from .runs import Refuse, Run


@dataclass(frozen=True, slots=True)
class Override:
    """The changes of a replay (spec section dlq 6.3); None keeps, `meta` and `retry` are merged."""

    queue: str | None = None
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    meta: Mapping[str, Any] | None = None
    retry: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Onward:
    """A job that goes on with a header and is due at a time; without a decision it came before its time."""

    job: Job
    header: Header
    at: datetime
    decision: RetryAt | SnoozeUntil | None

    @property
    def reason(self) -> str:
        """Why the job goes on."""
        return self.decision.reason if self.decision else "came before its time"

    @property
    def failure(self) -> Failure | None:
        """The failure that the job is retried for."""
        return self.decision.failure if isinstance(self.decision, RetryAt) else None


@dataclass(frozen=True, slots=True)
class Ended:
    """A job as it has ended, with its last failure recorded."""

    begun: Run | Refuse
    job: Job
    decision: Discarded | DeadLettered


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of messages in a queue that no worker has, and since when the oldest is due, where known."""

    queue: str
    depth: int
    oldest_at: datetime | None = None


class Outlet(Protocol):
    """One delivery; its adapter sends it on or ends it for the engine.

    For a job that goes on, the engine calls `prepare`, then `publish` or `kept`, and last `sent`.
    """

    framework: str

    @property
    def unreachable(self) -> tuple[type[Exception], ...]:
        """The errors of a store or a broker that cannot be reached."""

    @property
    def can_wait(self) -> bool:
        """Whether the broker still has the message, so that the decision can wait for an outage to end."""

    def prepare(self, onward: Onward) -> bool:
        """Prepare to send a job on; False if the framework itself runs it again at once."""

    def publish(self, onward: Onward) -> None:
        """Publish a job that goes on, until it is due."""

    def kept(self, onward: Onward | None) -> Mapping[str, Any]:
        """Return the message as the store keeps it: as the job goes on, or as it came."""

    def sent(self, onward: Onward) -> None:
        """Have the delivery leave its queue: the job goes on elsewhere."""

    def complete(self) -> None:
        """Have the delivery leave its queue: its handler succeeded."""

    def release(self, decision: GiveBack) -> None:
        """Have the delivery go back to its queue as it is."""

    def discard(self, ended: Ended) -> None:
        """End a job that is not kept."""

    def dead_letter(self, ended: Ended, *, in_store: bool) -> None:
        """End a job that is a dead letter, in the store or else in the broker's dead queue."""


class Publisher(Protocol):
    """Publishes messages of one framework.

    Raises Unreachable, Unpublishable and Unroutable. Any other error concerns this message alone, and may be
    over later.
    """

    @property
    def system(self) -> str:
        """The kind of the broker: rabbitmq, redis, or another name of the framework's."""

    def knows(self, type_: str) -> bool:
        """Return whether a job type has a handler in this process, or the process has no handlers at all."""

    def backlog(self, queues: Collection[str]) -> Sequence[Backlog] | None:
        """Ask the broker, on a connection of its own, for the backlog of queues and of those known here.

        A queue that does not exist is empty. None for a broker that cannot be asked; raises any error.
        """

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Publish the message of a dead letter with `header` in the place of its retry state."""

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Publish the message of a parked retry with `state` as its retry state.

        It is due now, or the framework itself delays it, even without the bridge, until it is due.
        """


class DeadQueues(Protocol):
    """The dead queues of one framework's app or broker; every method raises Unreachable."""

    def read(self, most: int) -> Sequence[Letter]:
        """Return at most so many letters of all queues that are known here, and leave them there."""

    def take(self, letter: Letter, then: Callable[[Letter], object]) -> bool:
        """Claim a letter, call `then`, and delete the letter unless `then` raises.

        Returns False, and does not call `then`, if the letter is gone, or another process holds it.
        """
