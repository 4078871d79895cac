"""The answers of the engine to a delivery, before its handler runs, and the policy of its task."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from ..spec.backoff import CustomJitter, Rng
from ..spec.decision import DeadLetter
from ..spec.failures import ErrorMap, Failure
from ..spec.job import Job
from ..spec.policy import AnyPartial, RetryPolicy, said_by
from ..store import Reservation
from .retry_on import EVERY_FAILURE, UNSAID, RetryOn

#: The field that says how often a job runs, and the fields that together say when.
ATTEMPTS = "max_attempts"
WAITS = frozenset({"backoff_coefficient", "backoff_strategy", "initial_interval", "jitter", "max_interval"})
NUMBERS = WAITS | {ATTEMPTS}


@dataclass(frozen=True, slots=True)
class NativeJitter:
    """A framework's own way to draw a wait. It counts until an owner sets one of the fields in WAITS.

    Then, and where a policy is told in JSON, `initial_interval` is `interval`, with which the specification's
    jitter has the same mean below the cap. `said` is True if the task's own options ask for a jitter.
    """

    draw: CustomJitter
    interval: str
    said: bool | None

    def __call__(self, n: int, seconds: float, rng: Rng) -> float:
        """Return the delay of a retry with jitter, in seconds."""
        return self.draw(n, seconds, rng)


def in_ojs(partial: Mapping[str, Any]) -> dict[str, Any]:
    """Return a partial policy without a framework's own jitter."""
    jitter = partial.get("jitter")
    if not isinstance(jitter, NativeJitter):
        return dict(partial)
    return {**partial, "initial_interval": jitter.interval, "jitter": jitter.said}


def told_in_ojs(policy: RetryPolicy) -> RetryPolicy:
    """Return a policy with the specification's jitter in the place of a framework's own."""
    if not isinstance(policy.jitter, NativeJitter):
        return policy
    return RetryPolicy.merge(policy, {"initial_interval": policy.jitter.interval, "jitter": True})


@dataclass(frozen=True, slots=True)
class Native:
    """The retries of a task under its framework alone.

    `beneath` is what the framework does without any option: it lies under all other layers. `options` is what
    the task's own options say: they lie over the app's default.
    """

    options: AnyPartial
    beneath: Mapping[str, Any] = field(default_factory=dict)
    retry_on: RetryOn = EVERY_FAILURE

    def under(self, said: Collection[str]) -> dict[str, Any]:
        """Return what still counts of `beneath` if an owner has set these fields."""
        gone = frozenset() if NUMBERS.isdisjoint(said) else WAITS
        return {name: value for name, value in self.beneath.items() if name not in gone}

    def rule(self, said: Collection[str]) -> RetryOn:
        """Return which failures are retried if an owner has set these fields, and no `retry_on`."""
        return EVERY_FAILURE if self.retry_on is UNSAID and ATTEMPTS in said else self.retry_on


#: A task without retries of its framework.
NOTHING = Native({})


def merged(native: Native, said: Collection[str], *partials: AnyPartial | None) -> RetryPolicy:
    """Return the policy of these layers, of which an owner has `said` some; raises InvalidRetryPolicy."""
    layers = (native.under(said), *partials)
    if WAITS.isdisjoint(said):
        return RetryPolicy.merge(*layers)
    return RetryPolicy.merge(*(in_ojs(each) if isinstance(each, Mapping) else each for each in layers))


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """The settings of one task or actor: its own over the app's, resolved once.

    `said` are the fields that an owner has set, rather than the framework. `named` are the fields that an
    owner has set for this very task: a message's native options do not win over them. With `afresh` a job
    that was on its way when the bridge came, and is beyond its limit, begins at attempt 1.
    """

    partials: tuple[AnyPartial | None, ...]
    policy: RetryPolicy
    errors: ErrorMap
    retry_on: RetryOn = EVERY_FAILURE
    native: Native = NOTHING
    said: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    afresh: bool = False

    def with_native(self, native: AnyPartial) -> TaskPolicy:
        """Return the settings of a message that brings native options; raises InvalidRetryPolicy."""
        partials = (*self.partials, native)
        return replace(self, partials=partials, policy=merged(self.native, self.said, *partials))

    def for_job(self, retry: AnyPartial | None) -> RetryPolicy:
        """Return the policy of a job that brings its own partial one; raises InvalidRetryPolicy."""
        if not retry:
            return self.policy
        # A job that says how often it runs leaves it to its task when it runs.
        said = self.said | said_by(retry) - {ATTEMPTS}
        return merged(self.native, said, *self.partials, retry)

    def rule(self, retry: AnyPartial | None) -> RetryOn:
        """Return which failures of a job are retried: all, if it says how often, and no owner has a rule."""
        asks = self.retry_on is UNSAID and ATTEMPTS in said_by(retry)
        return EVERY_FAILURE if asks else self.retry_on

    def keeps_limit(self, retry: AnyPartial | None) -> bool:
        """Return whether the framework says how often a job runs, because no owner has said it."""
        return bool(self.native.beneath) and ATTEMPTS not in self.said | said_by(retry)

    def keeps_waits(self, retry: AnyPartial | None) -> bool:
        """Return whether the framework says when a job is retried, because no owner has said it."""
        return bool(self.native.beneath) and NUMBERS.isdisjoint(self.said | said_by(retry) - {ATTEMPTS})

    def is_native(self, retry: AnyPartial | None) -> bool:
        """Return whether the framework says both: how often a job runs, and when it is retried."""
        return self.keeps_limit(retry) and self.keeps_waits(retry)


class Run(NamedTuple):
    """The handler runs now under this policy; it began at the monotonic time `since`.

    The worker of an `abandoned` run is dead, and another process ends the run.
    """

    job: Job
    policy: RetryPolicy
    task: TaskPolicy
    since: float
    reservation: Reservation | None = None
    abandoned: bool = False

    @property
    def retry_on(self) -> RetryOn:
        """The failures that are retried."""
        return self.task.rule(self.job.retry)

    def afresh(self) -> Run:
        """Return the run at attempt 1 if its job is beyond its limit."""
        is_beyond = self.job.attempt > self.policy.runs
        return self._replace(job=self.job._replace(attempt=1)) if is_beyond else self


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker that ran this attempt is gone: the handler does not run, and this failure is judged.

    `since` is when the worker began the run, by its own clock, if that is known.
    """

    run: Run
    failure: Failure
    since: datetime | None = None


@dataclass(frozen=True, slots=True)
class Postpone:
    """The delivery came before its time, or while another worker holds it: deliver it again at `at`."""

    job: Job
    at: datetime
    reservation: Reservation | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """The delivery is a late copy of an attempt that was settled: acknowledge it, and do nothing else."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The message has a state or a policy that cannot be read; the decision is to keep it."""

    job: Job
    decision: DeadLetter


#: An answer of the engine to a delivery.
Begun: TypeAlias = Run | Lost | Postpone | Drop | Refuse
