"""What Celery's own retry options say in the words of a retry policy, and which of them a task may set."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from celery import Task

from ..duration import format_duration
from ..errors import ConfigurationError

#: The module of Celery's own task classes.
NATIVE = "celery.app.task"
#: `max_retries=None` means retries without end.
UNBOUNDED = sys.maxsize

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
    return any(option in vars(cls) for cls in type(task).__mro__ if cls.__module__ != NATIVE)


def native_partial(task: Task) -> dict[str, Any]:
    """Return the partial policy that a task's native options amount to; no options, no fields."""
    partial: dict[str, Any] = {}
    if explicit(task, "max_retries"):
        partial["max_attempts"] = UNBOUNDED if task.max_retries is None else task.max_retries + 1
    named = bool(getattr(task, "autoretry_for", ()))
    if not named and not explicit(task, "default_retry_delay"):
        return partial
    factor = float(getattr(task, "retry_backoff", False))
    if named and factor:
        first = max(1, int(factor))
        longest = max(int(getattr(task, "retry_backoff_max", 600)), first)
        jitter = bool(getattr(task, "retry_jitter", True))
        return {**partial, **_schedule("exponential", first, longest, jitter=jitter)}
    delay = max(float(task.default_retry_delay), 0.001)
    return {**partial, **_schedule("none", delay, delay, jitter=False)}


def _schedule(strategy: str, first: float, longest: float, *, jitter: bool) -> dict[str, Any]:
    return {
        "backoff_strategy": strategy,
        "backoff_coefficient": 2.0,
        "initial_interval": format_duration(timedelta(seconds=first)),
        "max_interval": format_duration(timedelta(seconds=longest)),
        "jitter": jitter,
    }
