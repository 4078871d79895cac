"""The retry policy nearest to what Celery does with a task, and how it differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from celery import Task

from ....celery.options import UNBOUNDED, native_partial
from ....duration import spoken
from ....policy import RetryPolicy, partial_to_ojs
from ..comparing import alike, differing, policy_wait, told
from ..nearest import nearest, steady
from ..planned import MOST, Wait
from .native import Reading, listed
from .ways import Way, autoretries, retry_kwargs, together

#: The longest hint that is followed where nobody can say how long hints will be.
_UNKNOWN_HINT = 86_400.0


def policy_of(reading: Reading) -> tuple[dict[str, Any], RetryPolicy]:
    """Return the partial policy nearest to what Celery does, and the policy that `install` makes of it."""
    runs = reading.native.runs
    if runs == 1:
        return {"max_attempts": 1}, RetryPolicy.merge(native_partial(reading.task), {"max_attempts": 1})
    attempts = UNBOUNDED if runs is None else min(runs, UNBOUNDED)
    policy = RetryPolicy.merge({**_backoff(reading), "max_attempts": attempts})
    return _needed(policy, native_partial(reading.task)), policy


def _backoff(reading: Reading) -> dict[str, Any]:
    """Return the backoff of the retries whose wait the task's code does not say; else of those it does."""
    task, hints = reading.task, [way for way in reading.ways if way.is_hint]
    longest = max((_UNKNOWN_HINT if x is None else x for x in (way.longest for way in hints)), default=0.0)
    if autoretries(task):
        found = {k: x for k, x in native_partial(task).items() if k != "max_attempts"}
        initial = RetryPolicy.merge(found).initial_interval.total_seconds()
        return steady(initial, longest=longest) if found["backoff_strategy"] == "none" else found
    runs, wait = together(hints)
    if len(hints) < len(reading.ways) or wait is None:
        return steady(float(task.default_retry_delay or 0), longest=longest)
    return nearest([wait(n).mean for n in range(1, min(runs or MOST + 1, MOST + 1))], longest)


def _needed(policy: RetryPolicy, beneath: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the spec's default, and what `install` reads off the task, do not give."""
    default, given = RetryPolicy().to_ojs(), partial_to_ojs(beneath)
    return {
        name: value
        for name, value in policy.to_ojs().items()
        if name == "max_attempts" or not value == default[name] == given.get(name, value)
    }


def differences_of(reading: Reading, policy: RetryPolicy) -> Iterator[str]:
    """Yield how the bridge, under a policy, differs from what Celery does; nothing, if it does not."""
    for text in reading.unread:
        yield f"{text}: whether self.retry is called there is not known"
    for text in reading.sets:
        yield f"its code sets {text}: what it retries by from then on is not known; the policy says it once"
    yield from _runs(reading)
    yield from _waits(reading, policy)
    if reading.native.runs != 1:
        yield from _automatic(reading.task)
        yield from _calls(reading, policy)


def _runs(reading: Reading) -> Iterator[str]:
    if reading.native.runs is None:
        yield f"it is retried without end today, and ends after {UNBOUNDED:,} runs under the policy"
    for way in reading.ways:
        if way.runs != reading.native.runs:
            yield f"{way.name} ends after {way.runs} runs today: a policy has one max_attempts for all"


def _waits(reading: Reading, policy: RetryPolicy) -> Iterator[str]:
    today = reading.native.waits
    _, wait = together([replace(way, wait=_bridged(way, policy)) for way in reading.ways])
    then = [wait(n) for n in range(1, len(today) + 1)] if wait else []
    found = [*differing(today, then)]
    yield from found
    if found and policy.jitter:
        yield (
            "OJS's jitter is a factor from 0.5 to 1.5, Celery's draws from none to all of the delay: "
            "initial_interval is half of Celery's, for the same mean"
        )
    own = [policy_wait(policy, n) for n in range(1, len(today) + 1)]
    if any(way.is_hint for way in reading.ways) and then and not all(map(alike, own, then)):
        yield (
            f"the bridge waits what self.retry says; the policy's own wait, {told(own[0])} before retry 1, "
            "is for other errors"
        )


def _bridged(way: Way, policy: RetryPolicy) -> Callable[[int], Wait] | None:
    """Return what the bridge waits in one way: a hint is followed, and `max_interval` caps it."""
    if not way.is_hint:
        return lambda n: policy_wait(policy, n)
    wait, cap = way.wait, policy.max_interval.total_seconds()
    return wait and (lambda n: Wait(*(min(x, cap) for x in _parts(wait(n)))))


def _parts(wait: Wait) -> Sequence[float]:
    return wait.least, wait.mean, wait.most


def _automatic(task: Task) -> Iterator[str]:
    """Yield what `autoretry_for` gives to Celery's `retry`, and the bridge does not read."""
    given = retry_kwargs(task) if autoretries(task) else {}
    for name in (name for name in given if name not in ("max_retries", "countdown")):
        yield f"retry_kwargs={{{name!r}: ...}} counts for each automatic retry today; the bridge ignores it"


def _calls(reading: Reading, policy: RetryPolicy) -> Iterator[str]:
    cap = spoken(policy.max_interval.total_seconds())
    for call in reading.calls:
        if call.unknown:
            cut = (
                "" if call.unknown == ("max_retries",) else f": the bridge cuts a wait to max_interval, {cap}"
            )
            yield f"{listed(call.unknown)} of self.retry in {call.where} is computed at run time{cut}"
        if not call.throws:
            yield (
                f"self.retry(throw=False) in {call.where} sends the retry at once today, whatever follows; "
                "under the bridge what the task raises after it is judged instead"
            )
    if reading.calls and not autoretries(reading.task):
        yield (
            "an error that reaches Celery without self.retry ends the job today; the bridge retries it too, "
            "unless non_retryable_errors names it"
        )
