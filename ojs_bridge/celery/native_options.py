"""Celery's own retry options as a retry policy, and the options that a task may not set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Task
from celery.exceptions import TaskPredicate

from ..engine.layers import Layers, NativeJitter
from ..engine.retry_on import RetryOn
from ..errors import ConfigurationError
from ..rules.backoff import Rng
from ..rules.duration import format_duration
from ..rules.policy import LARGEST
from . import compat

#: The module of Celery's own task classes.
NATIVE = "celery.app.task"
#: Where a task keeps its `run` with Celery's automatic retries around it, when it runs without them.
AUTORETRYING = "_ojs_autoretrying"
#: The shortest and the longest interval, in seconds: a policy has none of zero, and a calendar ends.
_SHORTEST = 0.001
_LONGEST = 100 * 365 * 86_400

#: The main process raises these for a child that it killed, or that died; no task sees them.
KILLED = (TimeLimitExceeded, WorkerLostError)

_REFUSED = (
    "autoretry_for",
    "default_retry_delay",
    "dont_autoretry_for",
    "max_retries",
    "retry_backoff",
    "retry_backoff_max",
    "retry_jitter",
    "retry_kwargs",
    "retry_on_worker_lost",
)


#: Options that requeue a job after the policy has ended it, so that it would never end.
_REQUEUEING = {
    "reject_on_worker_lost": False,
    "acks_on_failure_or_timeout": True,
    "acks_on_failure": True,
    "acks_on_timeout": True,
}


def refuse_native(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError for a task that has Celery's own retry options beside a retry policy."""
    for option, needed in _REQUEUEING.items():
        if options.get(option, needed) not in (needed, None):
            raise ConfigurationError(
                f"task {name}: {option}={options[option]!r} would requeue what the policy has ended, for ever"
            )
    found = [option for option in _REFUSED if option in options]
    if found:
        raise ConfigurationError(
            f"task {name}: {', '.join(found)} would retry beside the ojs policy; put it in the policy, "
            "where max_attempts = max_retries + 1, initial_interval and max_interval are the backoff, and "
            "non_retryable_errors names what is not retried"
        )


def explicit(task: Task, option: str) -> bool:
    """Return whether a task, or a class of the user's that it inherits from, sets an option itself."""
    classes = (cls for cls in type(task).__mro__ if cls.__module__ != NATIVE)
    return option in vars(task) or any(option in vars(cls) for cls in classes)


def automatic(task: Task, option: str, *, default: Any) -> Any:
    """Return an option of the automatic retries as Celery has read it, when it made the task.

    Celery does not read a later annotation or assignment.
    """
    if compat.orig_run.name in vars(task):
        run = vars(task).get(AUTORETRYING, vars(task).get("run"))
        return compat.kept_option(run, option, getattr(task, option, default))
    return getattr(task, option, default)


def native_of(task: Task) -> Layers:
    """Return how Celery alone retries a task: by the task's options, or else by Celery's defaults."""
    delay = task.default_retry_delay or 0
    framework = {"max_attempts": attempts(task.max_retries), **_schedule("none", delay, delay, jitter=False)}
    return Layers(framework, options=options_as_policy(task), retry_on=_native_rule(task))


def _native_rule(task: Task) -> RetryOn | None:
    """Return which failures Celery retries: those in `autoretry_for`; None for what code asks for."""
    named = _autoretry_for(task)
    if not named:
        return None
    excluded = tuple(automatic(task, "dont_autoretry_for", default=()))
    return RetryOn(named, f"task {task.name}: autoretry_for", never=(*excluded, *KILLED))


def _autoretry_for(task: Task) -> tuple[type[BaseException], ...]:
    """Return the errors for which Celery itself retries a task."""
    return tuple(automatic(task, "autoretry_for", default=())) if compat.orig_run.name in vars(task) else ()


def options_as_policy(task: Task) -> dict[str, Any]:
    """Return a task's native options as a partial policy; without options it has no fields."""
    named = bool(_autoretry_for(task))
    given = dict(automatic(task, "retry_kwargs", default=None) or {}) if named else {}
    partial = _attempts(task, given.get("max_retries"))
    if not named and not explicit(task, "default_retry_delay"):
        return partial
    factor = float(automatic(task, "retry_backoff", default=False))
    if named and factor:
        longest = int(automatic(task, "retry_backoff_max", default=600))
        first = min(int(max(1.0, factor)), longest)
        jitter = bool(automatic(task, "retry_jitter", default=True))
        schedule = _schedule("exponential", first, longest, jitter=jitter)
        if jitter:
            # Half of a delay is the mean of Celery's draws.
            schedule["jitter"] = NativeJitter(_full_jitter, _interval(first / 2), said=True)
        return {**partial, **schedule}
    countdown = given.get("countdown")
    delay = task.default_retry_delay if countdown is None else countdown
    return {**partial, **_schedule("none", delay or 0, delay or 0, jitter=False)}


def retry_kwargs(task: Task, raised: BaseException) -> dict[str, Any]:
    """Return the rest of a task's `retry_kwargs`: its limit and its waits are in the policy.

    Only an error that Celery retries by itself has them.
    """
    never = (TaskPredicate, *automatic(task, "dont_autoretry_for", default=()))
    if not isinstance(raised, _autoretry_for(task)) or isinstance(raised, never):
        return {}
    given = dict(automatic(task, "retry_kwargs", default=None) or {})
    return {name: value for name, value in given.items() if name not in ("max_retries", "countdown", "throw")}


def _attempts(task: Task, asked: float | None) -> dict[str, Any]:
    """Return the `max_attempts` that a task's own options ask for."""
    if asked is None and not explicit(task, "max_retries"):
        return {}
    return {"max_attempts": attempts(task.max_retries if asked is None else asked)}


def attempts(max_retries: float | None) -> int:
    """Return the number of runs for `max_retries`; Celery reads None as no limit, -1 as 0 and 2.5 as 2."""
    if max_retries is None or max_retries >= LARGEST:
        return LARGEST
    return max(math.floor(max_retries), 0) + 1


def _schedule(strategy: str, first: float, longest: float, *, jitter: bool) -> dict[str, Any]:
    return {
        "backoff_strategy": strategy,
        "backoff_coefficient": 2.0,
        "initial_interval": _interval(first),
        "max_interval": _interval(longest),
        "jitter": jitter,
    }


def _full_jitter(_n: int, seconds: float, rng: Rng) -> float:
    """Draw as Celery does: whole seconds, from none to all of a delay, each as likely as another."""
    return float(int(rng.random() * (int(seconds) + 1)))


def _interval(seconds: float) -> str:
    return format_duration(timedelta(seconds=min(max(seconds, _SHORTEST), _LONGEST)))
