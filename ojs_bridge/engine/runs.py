"""Between the engine and an adapter: the answers to a delivery, and the ports that the adapter fills."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypedDict, TypeVar

from ..errors import InvalidRetryPolicy, InvalidState
from ..messages import OWN_META
from ..rules.decision import DeadLettered, Decision, RetryAt, SnoozeUntil
from ..rules.edits import Edits, words_of
from ..rules.failures import Failure, Snoozed
from ..rules.job import Header, Job
from ..rules.policy import PartialPolicy, RetryPolicy, partial_to_ojs
from ..store import Letter, Parked, Reservation
from .layers import TaskPolicy


class Run(NamedTuple):
    """The handler runs now under this policy; it began at the monotonic time `since`.

    `task` has the settings of the task, and those of the job itself. The worker of an `abandoned` run is
    dead, and another process ends the run. Where another process began the attempt, `began` is the time at
    which it did, by its own clock, if that is known.
    """

    job: Job
    policy: RetryPolicy
    task: TaskPolicy
    since: float
    reservation: Reservation | None = None
    abandoned: bool = False
    began: datetime | None = None


def run_of(job: Job | InvalidState, chain: str, task: TaskPolicy) -> Run:
    """Return the run of a job that is sent, with the settings of its task; one that waited has its chain.

    Raises the InvalidState of a job that cannot be read, and InvalidRetryPolicy.
    """
    if isinstance(job, InvalidState):
        raise job
    task = task.of_job(job.retry)
    if not (job.chain or job.next_retry_at):
        job = job._replace(chain=chain)
    return Run(job, task.policy, task, time.monotonic())


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker that ran this attempt is gone: the handler does not run, and this failure is judged.

    If the worker was told to stop before, it is no failure, and the job begins anew.
    """

    run: Run
    failure: Failure | Snoozed


@dataclass(frozen=True, slots=True)
class Postpone:
    """The delivery came before its time, or while another worker holds it: deliver it again at `at`.

    A worker holds it since `began`, by its own clock.
    """

    job: Job
    at: datetime
    reservation: Reservation | None = None
    holder: str = ""
    began: datetime | None = None

    @property
    def reason(self) -> str:
        """Why the delivery does not run."""
        return f"not due before {self.at.isoformat()}"


@dataclass(frozen=True, slots=True)
class Held:
    """A hold keeps the reserved attempt from its begin: the handler does not run, and the job waits."""

    run: Run
    decision: SnoozeUntil

    @property
    def job(self) -> Job:
        """The job that is held."""
        return self.run.job

    @property
    def reason(self) -> str:
        """Why the delivery does not run."""
        return self.decision.reason


@dataclass(frozen=True, slots=True)
class Drop:
    """The delivery is a late copy of an attempt that was settled: acknowledge it, and do nothing else."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The message has a state or a policy that cannot be read; the decision is to keep it."""

    job: Job
    decision: DeadLettered


#: An answer of the engine to a delivery.
Admission: TypeAlias = Run | Lost | Held | Postpone | Drop | Refuse


class Message(Protocol):
    """A message of one framework, as its adapter publishes it."""

    def kept(self) -> Mapping[str, Any]:
        """Return the message as the store keeps it, in JSON."""


M = TypeVar("M", bound=Message)


class Changes(TypedDict, total=False):
    """The fields of an Override, for calls that take them as keyword arguments."""

    queue: str | None
    args: Sequence[Any] | None
    kwargs: Mapping[str, Any] | None
    meta: Mapping[str, Any] | None
    retry: PartialPolicy | None
    edits: Edits | None


@dataclass(frozen=True, slots=True)
class Override:
    """The changes of a replay (spec section dlq 6.3). None keeps what the job has.

    `queue`, `args` and `kwargs` are replaced. `meta`, the headers or options, and `retry`, a partial policy
    that is kept in the spec's JSON form, are merged over the job's own. `edits` change arguments by their
    names, in place of `args` and `kwargs`. Raises InvalidRetryPolicy, and ValueError that names the field.
    """

    queue: str | None = None
    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    meta: Mapping[str, Any] | None = None
    retry: PartialPolicy | None = None
    edits: Edits | None = None

    def __post_init__(self) -> None:
        queue, args = self.queue, self.args
        if queue is not None and not (isinstance(queue, str) and queue):
            raise ValueError(f"queue: {queue!r} must be the name of a queue")
        if args is not None and (isinstance(args, str) or not isinstance(args, Sequence)):
            raise ValueError(f"args: {args!r} must be a list")
        for name, values in (("kwargs", self.kwargs), ("meta", self.meta)):
            if values is not None and not (
                isinstance(values, Mapping) and all(isinstance(key, str) for key in values)
            ):
                raise ValueError(f"{name}: {values!r} must be an object with names")
        if own := OWN_META & set(self.meta or ()):
            raise ValueError(f"meta: {min(own)!r} is the bridge's or the framework's own")
        if self.retry is not None:
            try:
                object.__setattr__(self, "retry", partial_to_ojs(self.retry) or None)
            except InvalidRetryPolicy as error:
                raise error.under("retry") from None
        if self.edits is not None:
            edits = self.edits if isinstance(self.edits, Edits) else Edits.of(self.edits)
            object.__setattr__(self, "edits", edits or None)
            if edits and not (args is None and self.kwargs is None):
                raise ValueError("changes: args and kwargs are replaced already, so leave the edits out")

    @classmethod
    def of(cls, changes: Mapping[str, Any] | None) -> Override:
        """Return the changes in a JSON object; raises ValueError for a field that is unknown."""
        known = cls.__slots__
        if unknown := (changes or {}).keys() - set(known):
            raise ValueError(f"override: {min(unknown)!r} is unknown; {', '.join(known)} are known")
        return cls(**(changes or {}))

    def to_ojs(self) -> dict[str, Any]:
        """Return the changes in JSON, as `of` reads them."""
        fields = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        return {**fields, "edits": self.edits.to_json()} if self.edits else fields

    def words(self) -> list[str]:
        """Return the names of what it changes, without any value; edits say how."""
        if self.edits:
            return words_of(self.to_ojs())
        return sorted([name for name in self.__slots__ if getattr(self, name) is not None])


@dataclass(frozen=True, slots=True)
class Onward:
    """A job that goes on with a header and is due at a time; without a decision it came before its time."""

    job: Job
    header: Header
    at: datetime
    decision: RetryAt | SnoozeUntil | None


@dataclass(frozen=True, slots=True)
class Settlement(Generic[M]):
    """What was carried out: a job goes on by another message, or has ended, and its delivery can leave.

    `job` is the job after the decision, and `in_place` whether a dead letter has its place.
    """

    run: Run | Refuse
    job: Job
    decision: Decision
    message: M | None = None
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Backlog:
    """The number of messages in a queue that no worker has, and since when the oldest is due, where known."""

    queue: str
    depth: int
    oldest_at: datetime | None = None


class Outlet(Protocol[M]):
    """What the engine needs of one delivery to make its messages, and to send them."""

    framework: str

    @property
    def unreachable(self) -> tuple[type[Exception], ...]:
        """The errors of a store or a broker that cannot be reached."""

    @property
    def can_wait(self) -> bool:
        """Whether the broker still has the message, so that the decision can wait for an outage to end."""

    @property
    def at_once(self) -> bool:
        """Whether the framework runs a job that goes on at once, without a message."""

    @property
    def parts(self) -> Sequence[object]:
        """What the message says: if that nests too deeply, no process has room for it."""

    def message(self, onward: Onward | None) -> M:
        """Return the message of a job that goes on, or the message as it came."""

    def publish(self, message: M, at: datetime) -> None:
        """Publish a message, which is due at a time."""

    def bury(self, job: Job, /) -> bool:
        """Put a dead letter that the store has not into the broker's dead queue; False if it is not there."""


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
        """Publish the message of a parked job with `state` as its retry state.

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
