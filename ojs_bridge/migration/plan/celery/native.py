"""A Celery task under Celery alone, in numbers and words, and the retry policy nearest to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from celery import Task

from ....celery import compat
from ....celery.native_options import automatic, options_as_policy
from ....engine.layers import Layers, in_ojs
from ....rules.policy import RetryPolicy, partial_to_ojs
from .. import ENDLESS, MOST, NOT_KNOWN, Native, Open, Runs, once
from ..waits import Wait, celery_wait, differing, policy_wait, steady
from .flow import Ask, Way
from .reading import Fleet, read_code

#: A task that counts its retries is followed through so many runs.
_RUNS = 200


@dataclass(frozen=True, slots=True)
class Reading:
    """A task, and Celery's retries of it."""

    task: Task
    native: Native
    #: The wait before retry n; None where nothing retries, or where the code says the waits when it runs.
    wait: Callable[[int], Wait] | None = None
    #: The lines that leave the retries open.
    open: tuple[Open, ...] = ()
    #: Whether anything asks for retries.
    is_retried: bool = False


def read(fleet: Fleet, task: Task) -> Reading:
    """Read a task's options and its code; nothing is run."""
    code = read_code(fleet, task)
    runs = [*_limits(task, code.asks)]
    opened = [*code.open, *(code.of_retries if runs else ())]
    if autoretries(task) and retry_kwargs(task).get("eta"):
        opened.append(
            Open(task.name, "retry_kwargs has an eta: the wait depends on when a retry is asked for")
        )
    if len({*runs}) > 1:
        opened.append(Open(code.asks[-1].where, "its limit is not that of other retries"))
    if not opened and runs:
        ways = fleet.ways_of(task)
        limit, opened = _limit(task, runs[0], ways)
        if not opened:
            return _retried_task(task, code.asks, limit, ways)
    if opened:
        return Reading(task, Native.unknown(), open=once(opened))
    return Reading(task, _native(task, (), 1, _constant(task, 0)))


def _limits(task: Task, asks: Iterable[Ask]) -> Iterator[Runs]:
    """Yield the number of runs by `autoretry_for`, and by each call of `self.retry`."""
    if autoretries(task):
        yield _runs(task, retry_kwargs(task).get("max_retries"))
    for ask in asks:
        yield _runs(task, ask.max_retries)


def _limit(task: Task, runs: Runs, way: Callable[[int], Way]) -> tuple[Runs, list[Open]]:
    """Return the number of runs of a task whose code may count them, or the lines that leave it open."""
    counted = [*way(0).answers]
    if not counted or runs == 1:
        return runs, []
    depends = Open(counted[0][0], "what it does depends on request.retries")
    if not isinstance(runs, int) or runs > _RUNS:
        return runs, [depends]
    ways = [way(n) for n in range(runs - 1)]
    if opened := [found for one in ways for found in one.open]:
        return runs, opened
    if all(one.answers == ways[0].answers for one in ways):
        return runs, []
    asking = [bool(one.asks) for one in ways]
    last = asking.index(False) if False in asking else len(asking)
    same = {_runs(task, ask.max_retries) for one in ways for ask in one.asks.values()} <= {runs}
    is_known = same and not any(asking[last:]) and not autoretries(task)
    return last + 1, [] if is_known else [depends]


def _retried_task(task: Task, asks: Sequence[Ask], runs: Runs, way: Callable[[int], Way]) -> Reading:
    """Return the reading of a task that asks for retries so often."""
    waits = [_waits_at(task, way, n) for n in range(1, _listed(runs, way) + 1)]
    if all(len(found) == 1 for found in waits):
        wait = partial(_only_wait, task, way)
        return Reading(task, _native(task, asks, runs, wait), wait, is_retried=True)
    native = _native(task, asks, runs, _constant(task, 0))
    return Reading(task, replace(native, waits=NOT_KNOWN, span=NOT_KNOWN), is_retried=True)


def _listed(runs: Runs, way: Callable[[int], Way]) -> int:
    """Return the number of waits that say all of them."""
    if not isinstance(runs, int):
        return MOST
    return min(runs - 1, MOST if way(0) is way(1) else _RUNS)


def _only_wait(task: Task, way: Callable[[int], Way], n: int) -> Wait:
    (wait,) = _waits_at(task, way, n)
    return wait


def _waits_at(task: Task, way: Callable[[int], Way], n: int) -> set[Wait]:
    """Return the waits before retry n; none if one of them is computed in no plain way."""
    found = set()
    if autoretries(task):
        found.add((_backoff(task) or _constant(task, retry_kwargs(task).get("countdown")))(n))
    asks = [*way(n - 1).asks.values()]
    is_known = all(ask.countdown is None or type(ask.countdown) in (int, float) for ask in asks)
    return found | {_constant(task, ask.countdown)(n) for ask in asks} if is_known else set()


def autoretries(task: Task) -> bool:
    """Return whether Celery has put its automatic retries around a task."""
    return bool(getattr(task, "autoretry_for", ())) and compat.orig_run.is_own(task)


def retry_kwargs(task: Task) -> dict[str, Any]:
    """Return the arguments that `autoretry_for` gives to `retry`."""
    return dict(automatic(task, "retry_kwargs", default=None) or {})


def _runs(task: Task, limit: float | None) -> Runs:
    """Return the number of runs. Celery compares numbers, so that a limit below 0 is 0, and 2.5 is 2."""
    limit = task.max_retries if limit is None else limit
    return ENDLESS if limit is None or limit == math.inf else max(math.floor(limit), 0) + 1


def _constant(task: Task, countdown: float | None) -> Callable[[int], Wait]:
    seconds = task.default_retry_delay if countdown is None else countdown
    wait = Wait.of(max(float(seconds or 0), 0.0))
    return lambda _: wait


def _backoff(task: Task) -> Callable[[int], Wait] | None:
    """Return the waits of `retry_backoff`, if it is set."""
    factor = float(automatic(task, "retry_backoff", default=False))
    if not factor:
        return None
    longest = int(automatic(task, "retry_backoff_max", default=600))
    jitter = bool(automatic(task, "retry_jitter", default=True))
    return lambda n: celery_wait(n, int(max(1.0, factor)), longest, jitter=jitter)


def _native(task: Task, asks: Iterable[Ask], runs: Runs, wait: Callable[[int], Wait]) -> Native:
    once = runs == 1
    return Native.computed(
        runs,
        wait,
        retries="nothing" if once else "; ".join(_retried(task, asks)),
        final="every error" if once else _final(task),
        at_the_end=", ".join(_end(task, asks)),
    )


def _retried(task: Task, asks: Iterable[Ask]) -> Iterator[str]:
    if autoretries(task):
        excluded = _names(getattr(task, "dont_autoretry_for", ()))
        but = f", but not {excluded} (dont_autoretry_for)" if excluded else ""
        yield f"{_names(task.autoretry_for)} (autoretry_for){but}"
    if places := [ask.where for ask in asks]:
        yield f"the errors for which its code calls self.retry, in {', '.join(places)}"


def _final(task: Task) -> str:
    if not autoretries(task):
        return "every error that reaches Celery without self.retry"
    excluded = _names(getattr(task, "dont_autoretry_for", ()))
    rest = () if Exception in tuple(task.autoretry_for) else ("every other error",)
    return ", ".join([*filter(None, [excluded]), *rest]) or "nothing"


def _end(task: Task, asks: Iterable[Ask]) -> Iterator[str]:
    error = " with MaxRetriesExceededError" if any(not ask.has_exc for ask in asks) else ""
    if task.ignore_result and not task.store_errors_even_if_ignored:
        yield "its result is ignored"
    elif not task.app.conf.result_backend:
        yield "no result backend keeps its result"
    else:
        yield f"its result says FAILURE{error}"
    if any(ask.goes_on for ask in asks):
        yield "unless its code catches the error of its last retry"
    yield "an errback of its signature is called"
    # Celery 5.7 has two options in the place of one.
    newer = getattr(task, "acks_on_failure", None)
    if task.acks_late and not (task.acks_on_failure_or_timeout if newer is None else newer):
        yield "its message is rejected, so that only a queue's own dead letter exchange keeps it"
    else:
        yield "its message is gone"


def _names(classes: Iterable[type]) -> str:
    return ", ".join(cls.__qualname__ for cls in classes)


def policy_of(reading: Reading) -> dict[str, Any] | None:
    """Return the partial policy nearest to Celery's retries; None where they are not known.

    A policy without `max_attempts` has the task's own limit. An empty one leaves all numbers to the task.
    """
    task, runs, waits = reading.task, reading.native.runs, reading.native.waits
    if reading.open:
        return None
    if runs == 1:
        return {"max_attempts": 1}
    if waits == NOT_KNOWN or (not autoretries(task) and len({*waits}) > 1):
        return {}  # any number would take the place of those in the code
    beneath = in_ojs(options_as_policy(task))
    backoff = beneath if autoretries(task) else steady(waits[0].most)
    limit = {} if runs == ENDLESS else {"max_attempts": runs}
    default, given = RetryPolicy().to_ojs(), partial_to_ojs(beneath)
    fields = partial_to_ojs({**{k: x for k, x in backoff.items() if k != "max_attempts"}, **limit})
    # A field with the spec's default is left out: `install` reads it from the task.
    return {k: x for k, x in fields.items() if k in limit or not x == default[k] == given.get(k, x)}


def differences_of(reading: Reading, policy: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between the bridge under a policy and Celery."""
    today = reading.native.waits if policy else ()
    then = Layers(options=options_as_policy(reading.task), task=policy).policy()
    found = [*differing(today, [policy_wait(then, n) for n in range(1, len(today) + 1)])]  # type: ignore[arg-type]
    yield from found
    if found and then.jitter:
        yield (
            "OJS's jitter multiplies the delay by 0.5 to 1.5, Celery's by 0 to 1: initial_interval is half "
            "of Celery's, for the same mean until the cap is near; an entry without waits keeps Celery's own"
        )
