"""The ways in which Celery retries a task: `autoretry_for`, and each plain `self.retry(...)` in its code."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery import Task

from ....celery.options import automatic
from ...native.formulas import celery_wait
from ..planned import ENDLESS, MOST, NOT_KNOWN, Runs, Wait
from .asking import Ask


@dataclass(frozen=True, slots=True)
class Way:
    """One of the ways in which a task is retried."""

    runs: Runs
    #: What is waited before retry n; None where that is known only when the task runs.
    wait: Callable[[int], Wait] | None

    def listed(self) -> list[Wait] | None:
        """Return the first waits."""
        count = min(self.runs - 1, MOST) if isinstance(self.runs, int) else MOST
        return None if self.wait is None else [self.wait(n) for n in range(1, count + 1)]


def autoretries(task: Task) -> bool:
    """Return whether Celery has put its automatic retries around a task."""
    return bool(getattr(task, "autoretry_for", ())) and "_orig_run" in vars(task)


def retry_kwargs(task: Task) -> dict[str, Any]:
    """Return what `autoretry_for` gives to `retry`."""
    return dict(automatic(task, "retry_kwargs", default=None) or {})


def backoff_of(task: Task) -> int:
    """Return the factor that Celery makes of `retry_backoff`, in seconds; 0 for none."""
    factor = float(automatic(task, "retry_backoff", default=False))
    return int(max(1.0, factor)) if factor else 0


def automatic_way(task: Task) -> Way:
    """Return how `autoretry_for` retries."""
    given = retry_kwargs(task)
    return Way(_runs(task, given.get("max_retries")), _automatic_wait(task, given))


def asked_way(task: Task, ask: Ask) -> Way:
    """Return how a call of `self.retry` retries."""
    seconds = task.default_retry_delay if ask.countdown is None else ask.countdown
    return Way(_runs(task, ask.max_retries), None if seconds == NOT_KNOWN else _constant(seconds))


def _automatic_wait(task: Task, given: dict[str, Any]) -> Callable[[int], Wait] | None:
    if given.get("eta"):
        return None
    factor = backoff_of(task)
    if factor:
        longest = automatic(task, "retry_backoff_max", default=600)
        jitter = automatic(task, "retry_jitter", default=True)
        return lambda n: celery_wait(n, factor, int(longest), jitter=bool(jitter))
    countdown = given.get("countdown")
    return _constant(task.default_retry_delay if countdown is None else countdown)


def _runs(task: Task, max_retries: float | None) -> Runs:
    """Return how often a task runs; Celery compares, so that what is below 0 is 0 and 2.5 is 2."""
    return runs_of(task.max_retries if max_retries is None else max_retries)


def runs_of(limit: float | None) -> Runs:
    """Return how often a job runs under a `max_retries`."""
    return ENDLESS if limit is None or limit == math.inf else max(math.floor(limit), 0) + 1


def _constant(seconds: float | None) -> Callable[[int], Wait]:
    wait = Wait.of(max(float(seconds or 0), 0.0))
    return lambda _: wait
