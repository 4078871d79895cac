"""The ways in which Celery retries a task: `autoretry_for`, and each `self.retry(...)` in its code."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from celery import Task

from ....celery.options import automatic
from ...native.formulas import celery_wait
from ..planned import MOST, SETTLED, Wait
from .arithmetic import NotKnown
from .retry_calls import RetryCall


@dataclass(frozen=True, slots=True)
class Way:
    """One of the ways in which a task is retried."""

    #: Such as `autoretry_for`, or `self.retry in line 12`.
    name: str
    #: In total, the first run included; None without end.
    runs: int | None
    #: What is waited before retry n; None where that is known only when the task runs.
    wait: Callable[[int], Wait] | None
    #: Whether the task's code says the wait itself: to the bridge that is a hint.
    is_hint: bool = False

    def allows(self, n: int) -> bool:
        """Return whether there is a retry n."""
        return self.runs is None or n < self.runs

    @property
    def listed(self) -> range:
        """The retries whose waits are listed."""
        return range(1, min(self.runs or MOST + 1, MOST + 1))

    @property
    def longest(self) -> float | None:
        """The most that is waited before one of the listed retries or the last; None if it is not known."""
        if self.wait is None:
            return None
        retries = [*self.listed, *([] if self.runs is None else [self.runs - 1])]
        return max((self.wait(n).most for n in retries if n), default=0.0)


def autoretries(task: Task) -> bool:
    """Return whether Celery has put its automatic retries around a task."""
    return bool(getattr(task, "autoretry_for", ())) and "_orig_run" in vars(task)


def ways_of(task: Task, calls: Sequence[RetryCall]) -> list[Way]:
    """Return the ways in which a task is retried; none for one that runs once."""
    found: dict[object, Way] = {}
    for way in (*([_autoretry(task)] if autoretries(task) else ()), *(_call(task, call) for call in calls)):
        waits = way.wait and tuple(map(way.wait, way.listed))
        found.setdefault((way.name, way.runs, waits), way)
    return list(found.values())


def retry_kwargs(task: Task) -> dict[str, Any]:
    """Return what `autoretry_for` gives to `retry`."""
    return dict(automatic(task, "retry_kwargs", default=None) or {})


def backoff_of(task: Task) -> int:
    """Return the factor that Celery makes of `retry_backoff`, in seconds; 0 for none."""
    factor = float(automatic(task, "retry_backoff", default=False))
    return int(max(1.0, factor)) if factor else 0


def _autoretry(task: Task) -> Way:
    given = retry_kwargs(task)
    return Way("autoretry_for", _runs(task, given.get("max_retries")), _autoretry_wait(task, given))


def _autoretry_wait(task: Task, given: dict[str, Any]) -> Callable[[int], Wait] | None:
    if given.get("eta"):
        return None
    factor = backoff_of(task)
    if factor:
        longest = automatic(task, "retry_backoff_max", default=600)
        jitter = automatic(task, "retry_jitter", default=True)
        return lambda n: celery_wait(n, factor, int(longest), jitter=bool(jitter))
    countdown = given.get("countdown")
    return _constant(task.default_retry_delay if countdown is None else countdown)


def _call(task: Task, call: RetryCall) -> Way:
    name, runs = f"self.retry in {call.where}", _runs(task, call.max_retries)
    if {"eta", "countdown"} & {*call.unknown}:
        return Way(name, runs, None, is_hint=True)
    if call.countdown is None:
        return Way(name, runs, _constant(task.default_retry_delay))
    way = Way(name, runs, call.countdown, is_hint=True)
    return way if _is_known(way) else Way(name, runs, None, is_hint=True)


def _runs(task: Task, max_retries: float | None) -> int | None:
    """Return how often a task runs; Celery compares, so that what is below 0 is 0 and 2.5 is 2."""
    return runs_of(task.max_retries if max_retries is None else max_retries)


def runs_of(limit: float | None) -> int | None:
    """Return how often a job runs under a `max_retries`."""
    return None if limit is None or limit == math.inf else max(math.floor(limit), 0) + 1


def _constant(seconds: float | None) -> Callable[[int], Wait]:
    wait = Wait.of(max(float(seconds or 0), 0.0))
    return lambda _: wait


def _is_known(way: Way) -> bool:
    """Return whether the countdown of each retry that is listed can be worked out."""
    try:
        return all(way.wait and way.wait(n) for n in range(1, min(way.runs or MOST + 1, SETTLED + 1)))
    except NotKnown:
        return False


def together(ways: Sequence[Way]) -> tuple[int | None, Callable[[int], Wait] | None]:
    """Return how often a task runs at most, and what it waits before retry n in one way or another.

    That is None if some wait is known only when the task runs.
    """
    runs = _most([way.runs for way in ways] or [1])
    known = [way for way in ways if way.wait]
    if runs != 1 and (not known or _most([way.runs for way in known]) != runs):
        return runs, None
    return runs, lambda n: _one_or_another([way.wait(n) for way in known if way.wait and way.allows(n)])


def _most(runs: Sequence[int | None]) -> int | None:
    return None if None in runs else max(x for x in runs if x is not None)


def _one_or_another(waits: Sequence[Wait]) -> Wait:
    least, most = min(wait.least for wait in waits), max(wait.most for wait in waits)
    return Wait(least, sum(wait.mean for wait in waits) / len(waits), most)
