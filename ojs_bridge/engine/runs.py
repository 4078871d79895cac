"""The answers of the engine to a delivery, before its handler runs, and the policy of its task."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from ..spec.decision import DeadLetter
from ..spec.failures import ErrorMap, Failure
from ..spec.job import Job
from ..spec.policy import AnyPartial, RetryPolicy, said_by
from ..store import Reservation
from .retry_on import EVERY_FAILURE, UNSAID, RetryOn

#: The field that says how often, and those that say when, each of which needs the others.
ATTEMPTS = "max_attempts"
WAITS = frozenset({"backoff_coefficient", "backoff_strategy", "initial_interval", "jitter", "max_interval"})
NUMBERS = WAITS | {ATTEMPTS}


@dataclass(frozen=True, slots=True)
class Native:
    """The retries of a task under its framework alone.

    `beneath` holds what the framework does where nothing is said: it lies under all other layers. `options`
    holds what the task's own options say: they lie over the app's default.
    """

    options: AnyPartial
    beneath: Mapping[str, Any] = field(default_factory=dict)
    retry_on: RetryOn = EVERY_FAILURE

    def under(self, said: Collection[str]) -> dict[str, Any]:
        """Return what still counts of `beneath` where owners have said these fields."""
        gone = frozenset() if NUMBERS.isdisjoint(said) else WAITS
        return {name: value for name, value in self.beneath.items() if name not in gone}

    def rule(self, said: Collection[str]) -> RetryOn:
        """Return which failures are retried where owners have said these fields, and no `retry_on`."""
        return EVERY_FAILURE if self.retry_on is UNSAID and ATTEMPTS in said else self.retry_on


#: A task that has nothing of its framework's own.
NOTHING = Native({})


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """The settings that one task or actor is retried under: its own over the app's, resolved once.

    `said` are the fields that an owner has said, rather than the framework, and `named` those of them that
    were said of this task: a message's native options do not win over these. With `afresh` a job that was on
    its way when the bridge came, and is beyond its limit, begins at attempt 1.
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
        return replace(self, partials=(*self.partials, native), policy=self.for_job(native))

    def for_job(self, retry: AnyPartial | None) -> RetryPolicy:
        """Return the policy of a job that brings its own partial one; raises InvalidRetryPolicy."""
        if not retry:
            return self.policy
        # A job that says how often it is tried leaves it to its task when.
        said = self.said | said_by(retry) - {ATTEMPTS}
        return RetryPolicy.merge(self.native.under(said), *self.partials, retry)

    def rule(self, retry: AnyPartial | None) -> RetryOn:
        """Return which failures of a job are retried: all, if it says how often and no owner said which."""
        asks = self.retry_on is UNSAID and ATTEMPTS in said_by(retry)
        return EVERY_FAILURE if asks else self.retry_on

    def keeps_limit(self, retry: AnyPartial | None) -> bool:
        """Return whether how often a job runs is the framework's to say, as no owner has said it."""
        return bool(self.native.beneath) and ATTEMPTS not in self.said | said_by(retry)

    def keeps_waits(self, retry: AnyPartial | None) -> bool:
        """Return whether when a job is retried is the framework's to say."""
        return bool(self.native.beneath) and NUMBERS.isdisjoint(self.said | said_by(retry) - {ATTEMPTS})


class Run(NamedTuple):
    """The handler is to run now, under this policy of its task; `since` is the monotonic time it began.

    The worker of an `abandoned` run is dead, and another process ends it.
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
        """Return the run at attempt 1 if its job, which knows nothing of the bridge, is beyond its limit."""
        is_beyond = self.job.attempt > self.policy.runs
        return self._replace(job=self.job._replace(attempt=1)) if is_beyond else self


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker that ran this attempt is gone: the handler is not to run, its failure is to be judged.

    `since` is when the worker began it, by its own clock, as far as that is known.
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
    """The delivery is a late copy of what has been dealt with: acknowledge it, and nothing else."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The message has no policy that can be read; its decision is to keep it."""

    job: Job
    decision: DeadLetter


#: What becomes of a delivery before its handler runs.
Begun: TypeAlias = Run | Lost | Postpone | Drop | Refuse
