"""An explanation of a policy: what each attempt would lead to, without running anything."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any, Literal, TypeAlias

from ..adapters import frameworks
from ..engine.layers import Layers, TaskPolicy, with_ojs_jitter
from ..engine.runs import Run
from ..rules.decision import DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil, decide
from ..rules.failures import VISIBILITY_TIMEOUT, WORKER_DEATH, ErrorMap, Failure, Outcome, outcome_of
from ..rules.job import Job
from ..rules.notations import spoken
from ..rules.policy import AnyPartial, RetryPolicy
from .parts import instance_of
from .virtual import worker_room

#: How an error turns into an outcome: a task's framework has rules of its own.
Translation: TypeAlias = Callable[[BaseException, Run], Outcome]
Then: TypeAlias = Literal["retry", "snooze", "released", "discarded", "dead_letter"]

_THEN: dict[type[Decision], Then] = {
    DeadLettered: "dead_letter",
    Discarded: "discarded",
    SnoozeUntil: "snooze",
    GiveBack: "released",
}
#: The most retries that are explained one by one; later delays hardly differ.
MOST = 50
#: No decision depends on the time itself.
_NOW = datetime(2000, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True)
class PlannedWait:
    """The wait before a retry, in seconds: as planned, and from `shortest` to `longest` with jitter.

    `since_first` is the sum of the planned ones so far.
    """

    retry: int
    planned: float
    shortest: float
    longest: float
    since_first: float


@dataclass(frozen=True, slots=True)
class Step:
    """What one attempt that fails would lead to; `reason` is in the words of the log."""

    attempt: int
    then: Then
    reason: str
    wait: PlannedWait | None = None

    def __str__(self) -> str:
        if self.wait is None:
            return self.reason if self.then in ("snooze", "released") else f"{self.reason}: {self.then}"
        if self.wait.shortest == self.wait.longest:
            return self.reason
        return f"{self.reason}, {spoken(self.wait.shortest)} to {spoken(self.wait.longest)} with jitter"


@dataclass(frozen=True, slots=True)
class Explanation:
    """What a policy would do about an error, attempt by attempt; as text with `str`.

    Of more than 50 retries the first 50 and the last attempt are explained.
    """

    policy: RetryPolicy
    steps: tuple[Step, ...]

    @property
    def outcome(self) -> Then:
        """How the job would end; "snooze" if it would go on for ever."""
        return self.steps[-1].then

    @property
    def waits(self) -> list[float]:
        """The seconds before each retry, without jitter."""
        return [step.wait.planned for step in self.steps if step.wait]

    def to_json(self) -> dict[str, Any]:
        """Return the explanation as plain data."""
        return {"outcome": self.outcome, "steps": [asdict(step) for step in self.steps]}

    def __str__(self) -> str:
        lines = [*map(str, self.steps)]
        left = self.steps[-1].attempt - len(self.steps)
        if left > 0:
            lines.insert(-1, f"... and {left:,} more attempts")
        elif self.waits:
            lines.append(f"From the first attempt to the last: {spoken(sum(self.waits))}, without jitter.")
        return "\n".join(lines)


def explain(
    policy: AnyPartial | Any, error: BaseException | type[BaseException] | str = "any.error"
) -> Explanation:
    """Explain what would happen to each attempt that fails with an error; nothing is run.

    `policy` is a policy, or a Celery task or Dramatiq actor under the bridge. `error` is an exception, its
    class, or an error type such as `external.timeout` or `builtins.OSError`. Raises InvalidRetryPolicy, and
    TypeError for a task that is not under the bridge.
    """
    task, translate = _settings_of(policy)
    run = Run(Job("", "", ""), task.policy, task, 0.0)
    known = _class_of(error) if isinstance(error, str) else error
    outcome = translate(instance_of(known), run) if known else _failure(str(error), run)
    if outcome is None:
        raise TypeError(f"error: {error!r} is no failure")
    return Explanation(task.policy, tuple(_steps(task, outcome)))


def _class_of(error_type: str) -> type[BaseException] | None:
    """Return the exception class that has this error type, if its module is loaded."""
    module, _, name = error_type.rpartition(".")
    named = getattr(sys.modules.get(module), name, None)
    return named if isinstance(named, type) and issubclass(named, BaseException) else None


def _failure(error_type: str, run: Run) -> Failure:
    """Return the failure of an error type; a task may not ask to retry it, unless the worker was lost."""
    is_lost = error_type in (VISIBILITY_TIMEOUT, WORKER_DEATH)
    return Failure(error_type, final=None if is_lost else run.task.layers.retries.rules_out(Exception()))


def _settings_of(policy: Any) -> tuple[TaskPolicy, Translation]:
    """Return the settings and the translation of a task; a plain policy becomes a task's settings."""
    for framework in frameworks():
        settings: tuple[TaskPolicy, Translation] | None = worker_room(framework).settings_of(policy)
        if settings is not None:
            return settings
    merged = RetryPolicy.merge(policy)
    task = TaskPolicy(Layers(task=merged), merged, ErrorMap())
    return task, lambda error, _run: outcome_of(error, task.errors)


def _steps(task: TaskPolicy, outcome: Outcome) -> Iterator[Step]:
    since_first, runs = 0.0, task.policy.runs
    for attempt in (*range(1, min(runs, MOST + 1)), runs):
        planned, *others = (_decided(task, outcome, attempt, drawn) for drawn in (None, 0.0, _ALMOST_ONE))
        if not isinstance(planned, RetryAt):
            yield Step(attempt, _THEN[type(planned)], planned.reason)
            return
        since_first += planned.delay
        shortest, longest = (getattr(decision, "delay", planned.delay) for decision in others)
        wait = PlannedWait(attempt, planned.delay, shortest, longest, since_first)
        yield Step(attempt, "retry", planned.reason, wait)


_ALMOST_ONE = math.nextafter(1.0, 0.0)


@dataclass(frozen=True, slots=True)
class _Always:
    """A source of randomness that always draws the same number."""

    number: float

    def random(self) -> float:
        return self.number


def _decided(task: TaskPolicy, outcome: Outcome, attempt: int, drawn: float | None) -> Decision:
    """Return the decision about an attempt with a number for its jitter; None is no jitter."""
    policy = task.policy
    if drawn is None:
        policy = with_ojs_jitter(policy).model_copy(update={"jitter": False})
    capped = not task.layers.waits_are_native
    job = Job("", "", "", attempt)
    return decide(policy, job, outcome, now=_NOW, rng=_Always(drawn or 0.0), capped=capped)
