"""Celery's own options of a task as a policy: how often Celery alone runs it, when, after which errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from decimal import Decimal
from numbers import Real
from typing import Any

from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Task

from ..engine.layers import Layers, NativeJitter, RetryOn, is_exception
from ..rules.backoff import Rng
from ..rules.notations import format_interval
from ..rules.policy import LARGEST
from . import compat

#: The module of Celery's own task classes.
NATIVE = "celery.app.task"
#: The one attribute of ours that a task itself has. The plan reads a task whose app has no installation.
_OF_TASK = "_ojs_of_task"
#: The shortest and the longest interval, in seconds: a policy has none of zero, and a calendar ends.
_SHORTEST = 0.001
LONGEST = 100 * 365 * 86_400
#: The main process raises these for a child that it killed, or that died; no task sees them.
KILLED = (TimeLimitExceeded, WorkerLostError)


@dataclass(eq=False)
class OfTask:
    """What the bridge keeps of a task in this process."""

    #: Its own class, if `install` has taken it over.
    taken_from: type[Task] | None = None
    #: Its `run` with Celery's automatic retries around it, if it runs without them.
    autoretrying: Callable[..., Any] | None = None
    #: Its own `acks_late`, if a policy has another for its jobs under the bridge.
    acks_late: bool | None = None
    #: Why it stays native, and the options of its `self.retry(...)` that do not count: the log says so once.
    why_native: str = ""
    said: set[str] = field(default_factory=set)


def of(task: Task) -> OfTask:
    """Return what the bridge keeps of a task."""
    kept: OfTask | None = vars(task).get(_OF_TASK)
    return kept or vars(task).setdefault(_OF_TASK, OfTask())


def explicit(task: Task, option: str) -> bool:
    """Return whether a task, or a class of the user's that it inherits from, sets an option itself."""
    classes = (cls for cls in type(task).__mro__ if cls.__module__ != NATIVE)
    return option in vars(task) or any(option in vars(cls) for cls in classes)


def automatic(task: Task, option: str, *, default: Any) -> Any:
    """Return an option of the automatic retries as Celery has read it, when it made the task.

    Celery does not read a later annotation or assignment.
    """
    if compat.orig_run.name in vars(task):
        run = of(task).autoretrying or vars(task).get("run")
        return compat.kept_option(run, option, getattr(task, option, default))
    return getattr(task, option, default)


def native_of(task: Task) -> Layers:
    """Return how Celery alone retries a task: by the task's options, or else by Celery's defaults."""
    delay = task.default_retry_delay or 0
    framework = {"max_attempts": attempts(task.max_retries), **_schedule("none", delay, delay, jitter=False)}
    return Layers(framework, options=options_as_policy(task), retry_on=_native_rule(task))


def _native_rule(task: Task) -> RetryOn | None:
    """Return which failures Celery retries: those in `autoretry_for`; None for what code asks for."""
    named = autoretry_for(task)
    if not named:
        return None
    excluded = tuple(automatic(task, "dont_autoretry_for", default=()))
    return RetryOn(named, f"task {task.name}: autoretry_for", never=(*excluded, *KILLED))


def autoretry_for(task: Task) -> tuple[type[BaseException], ...]:
    """Return the errors for which Celery itself retries a task."""
    return tuple(automatic(task, "autoretry_for", default=())) if compat.orig_run.name in vars(task) else ()


def options_as_policy(task: Task) -> dict[str, Any]:
    """Return a task's native options as a partial policy; without options it has no fields."""
    named = bool(autoretry_for(task))
    given = dict(automatic(task, "retry_kwargs", default=None) or {}) if named else {}
    asked = given.get("max_retries")
    partial: dict[str, Any] = {}
    if asked is not None or explicit(task, "max_retries"):
        partial["max_attempts"] = attempts(task.max_retries if asked is None else asked)
    if not named and not explicit(task, "default_retry_delay"):
        return partial
    factor = float(automatic(task, "retry_backoff", default=False)) if named else 0
    if factor:
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


def attempts(max_retries: float | None) -> int:
    """Return the number of runs for `max_retries`; Celery reads None as no limit, -1 as 0 and 2.5 as 2."""
    if max_retries is None or not max_retries < LARGEST:
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
    return format_interval(timedelta(seconds=min(max(seconds, _SHORTEST), LONGEST)))


def unreadable(task: Task) -> str | None:
    """Return why Celery's own options of a task's retries cannot be read, or None; never raises."""
    wanted = {"max_retries": task.max_retries, "default_retry_delay": task.default_retry_delay}
    if compat.orig_run.name in vars(task):
        for option in ("autoretry_for", "dont_autoretry_for"):
            if not all(map(is_exception, errors := automatic(task, option, default=()))):
                return f"{option}={errors!r} are no exception classes"
        if not isinstance(given := automatic(task, "retry_kwargs", default={}), Mapping):
            return f"retry_kwargs={given!r} is no dictionary"
        wanted["retry_kwargs['max_retries']"] = given.get("max_retries")
        wanted["retry_kwargs['countdown']"] = given.get("countdown")
        wanted["retry_backoff"] = automatic(task, "retry_backoff", default=False)
    for option, value in wanted.items():
        if not _is_read(option, value):
            return f"{option}={value!r} is no number that Celery can use there"
    return None


def _is_read(option: str, value: Any) -> bool:
    """Return whether Celery can use a number: it compares a limit, and adds seconds to a time."""
    if "max_retries" in option:
        return value is None or isinstance(value, (Real, Decimal))
    return not value or (isinstance(value, (int, float)) and abs(value) < math.inf)
