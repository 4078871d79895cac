"""The layers of a job's policy: who said which field, from the framework to the job itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..rules.backoff import CustomJitter, Rng
from ..rules.policy import AnyPartial, RetryPolicy, said_by
from .retry_on import ASKED, EVERY_FAILURE, RetryOn

#: The field that says how often a job runs, and the fields that together say when.
ATTEMPTS = "max_attempts"
INTERVALS = frozenset({"initial_interval", "max_interval"})
WAITS = INTERVALS | {"backoff_coefficient", "backoff_strategy", "jitter"}
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


@dataclass(frozen=True)
class Layers:
    """The partial policies of a job in their order: a later one wins field by field.

    `framework` is what the framework does without any option, and `options` and `message` are the native
    options of the task and of its message. An owner says the others: `app`, `install`, `task` and `job`.
    `retry_on` says which failures are retried; None is Celery's way: those that the code asks for, until an
    owner says how often a job runs.
    """

    framework: Mapping[str, Any] = field(default_factory=dict)
    app: AnyPartial | None = None
    options: AnyPartial | None = None
    message: Mapping[str, Any] | None = None
    install: Sequence[AnyPartial] = ()
    task: AnyPartial | None = None
    job: AnyPartial | None = None
    retry_on: RetryOn | None = EVERY_FAILURE

    def policy(self) -> RetryPolicy:
        """Merge the layers; raises InvalidRetryPolicy."""
        framework, message = self.framework, self.message
        if not NUMBERS.isdisjoint(self._numbers):
            framework = _without(framework, WAITS)
        if message and not INTERVALS.isdisjoint(self._said["install"] | self._said["task"]):
            message = _without(message, INTERVALS)
        layers = (framework, self.app, self.options, message, *self.install, self.task, self.job)
        if WAITS.isdisjoint(self._numbers):
            return RetryPolicy.merge(*layers)
        return RetryPolicy.merge(*(in_ojs(each) if isinstance(each, Mapping) else each for each in layers))

    def owner(self, name: str) -> str | None:
        """Return the owner that has set a field: job, task, install or app; None if none has."""
        return next((owner for owner, said in self._said.items() if name in said), None)

    @property
    def limit_is_native(self) -> bool:
        """Whether the framework says how often the job runs, because no owner has said it."""
        return bool(self.framework) and self.owner(ATTEMPTS) is None

    @property
    def waits_are_native(self) -> bool:
        """Whether the framework says when the job is retried, because no owner has set a number."""
        return bool(self.framework) and NUMBERS.isdisjoint(self._numbers)

    @property
    def is_native(self) -> bool:
        """Whether the framework says both: how often the job runs, and when it is retried."""
        return self.limit_is_native and self.waits_are_native

    @property
    def retries(self) -> RetryOn:
        """The failures that are retried."""
        if self.retry_on is None:
            return ASKED if self.owner(ATTEMPTS) is None else EVERY_FAILURE
        return self.retry_on

    @cached_property
    def _said(self) -> dict[str, frozenset[str]]:
        """The fields that each owner has set, the last owner first."""
        return {
            "job": said_by(self.job),
            "task": said_by(self.task),
            "install": said_by(*self.install),
            "app": said_by(self.app),
        }

    @cached_property
    def _numbers(self) -> frozenset[str]:
        """The fields by which owners say when a job runs.

        A job that says how often it runs leaves it to its task when it runs.
        """
        job, *others = self._said.values()
        return (job - {ATTEMPTS}).union(*others) & NUMBERS


def _without(partial: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in partial.items() if name not in names}
