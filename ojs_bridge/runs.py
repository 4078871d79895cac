"""What the bridge says of a delivery before its handler runs, and the policy it says it under."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, TypeAlias

from .decision import DeadLetter
from .failures import ErrorMap, Failure
from .job import Job
from .policy import PartialPolicy, RetryPolicy
from .store import Turn


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """What one task or actor is retried under: its own settings over the app's, resolved once."""

    partials: tuple[PartialPolicy | None, ...]
    policy: RetryPolicy
    errors: ErrorMap

    def for_job(self, retry: PartialPolicy | None) -> RetryPolicy:
        """Return the policy of a job that brings its own partial one; raises InvalidRetryPolicy."""
        return RetryPolicy.merge(*self.partials, retry) if retry else self.policy


class Run(NamedTuple):
    """The handler is to run now, under this policy; `since` is the monotonic time it began.

    `turn` is what was reserved for it. The worker of an `abandoned` run is dead, and another process ends it.
    """

    job: Job
    policy: RetryPolicy
    errors: ErrorMap
    since: float
    turn: Turn | None = None
    abandoned: bool = False


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker that ran this attempt is gone: the handler is not to run, its failure is to be judged."""

    run: Run
    failure: Failure


@dataclass(frozen=True, slots=True)
class Postpone:
    """The delivery came before its time, or while somebody else holds its turn: deliver it again at `at`."""

    job: Job
    at: datetime
    turn: Turn | None = None
    holder: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """The delivery is a late copy of what has been dealt with: acknowledge it, and nothing else."""

    job: Job
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The message cannot be run under any policy that somebody can read; its decision is to keep it."""

    job: Job
    decision: DeadLetter


#: What becomes of a delivery before its handler runs.
Begun: TypeAlias = Run | Lost | Postpone | Drop | Refuse
