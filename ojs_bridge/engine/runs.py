"""The answers of the engine to a delivery, before its handler runs, and the policy of its task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

from ..rules.decision import DeadLettered
from ..rules.failures import ErrorMap, Failure
from ..rules.job import Job
from ..rules.policy import AnyPartial, RetryPolicy
from ..store import Reservation
from .layers import Layers


@dataclass(frozen=True, slots=True)
class TaskPolicy:
    """The settings of one task or actor, resolved once: the policy of its layers, and its error map.

    With `afresh` a job that was on its way when the bridge came, and is beyond its limit, begins at
    attempt 1.
    """

    layers: Layers
    policy: RetryPolicy
    errors: ErrorMap
    afresh: bool = False

    def of_message(self, native: Mapping[str, Any]) -> TaskPolicy:
        """Return the settings of a message that brings native options; raises InvalidRetryPolicy."""
        layers = replace(self.layers, message=native)
        return replace(self, layers=layers, policy=layers.policy())

    def of_job(self, retry: AnyPartial | None) -> TaskPolicy:
        """Return the settings of a job that may bring its own partial policy; raises InvalidRetryPolicy."""
        if not retry:
            return self
        layers = replace(self.layers, job=retry)
        return replace(self, layers=layers, policy=layers.policy())


class Run(NamedTuple):
    """The handler runs now under this policy; it began at the monotonic time `since`.

    `task` has the settings of the task, and those of the job itself. The worker of an `abandoned` run is
    dead, and another process ends the run.
    """

    job: Job
    policy: RetryPolicy
    task: TaskPolicy
    since: float
    reservation: Reservation | None = None
    abandoned: bool = False

    @property
    def layers(self) -> Layers:
        """Who said which field of the policy."""
        return self.task.layers


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
    decision: DeadLettered


#: An answer of the engine to a delivery.
Begun: TypeAlias = Run | Lost | Postpone | Drop | Refuse
