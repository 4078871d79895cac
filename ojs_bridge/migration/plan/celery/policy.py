"""The retry policy nearest to what Celery does with a task, and how it differs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery import Task

from ....celery.options import native_partial
from ....spec.policy import RetryPolicy, partial_to_ojs
from ..comparing import differing, policy_wait
from ..nearest import steady
from ..planned import ENDLESS
from .native import Reading
from .ways import autoretries, retry_kwargs


def policy_of(reading: Reading) -> dict[str, Any] | None:
    """Return the partial policy that does what Celery does, or comes nearest to it; None if none does.

    Without `max_attempts` it is endless, as the task's own options are.
    """
    runs = reading.native.runs
    if reading.open:
        return None
    if runs == 1:
        return {"max_attempts": 1}
    attempts = {} if runs == ENDLESS else {"max_attempts": runs}
    return _needed({**_backoff(reading), **attempts}, native_partial(reading.task))


def retry_on_of(reading: Reading) -> str | None:
    """Return which failures are retried; None for those that `autoretry_for` names, or where none is."""
    is_asked = reading.asks and not autoretries(reading.task) and reading.native.runs != 1
    return "asked" if is_asked and not reading.open else None


def _backoff(reading: Reading) -> dict[str, Any]:
    if autoretries(reading.task):
        return {k: x for k, x in native_partial(reading.task).items() if k != "max_attempts"}
    return steady(reading.native.waits[0].most)  # type: ignore[union-attr]


def _needed(partial: Mapping[str, Any], beneath: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that the spec's default, and what `install` reads off the task, do not give."""
    default, given = RetryPolicy().to_ojs(), partial_to_ojs(beneath)
    return {
        name: value
        for name, value in partial_to_ojs(partial).items()
        if name == "max_attempts" or not value == default[name] == given.get(name, value)
    }


def differences_of(reading: Reading, policy: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the bridge, under a policy, differs from what Celery does; nothing, if it does not."""
    today = reading.native.waits
    then = RetryPolicy.merge(native_partial(reading.task), policy)
    found = [*differing(today, [policy_wait(then, n) for n in range(1, len(today) + 1)])]  # type: ignore[arg-type]
    yield from found
    if found and then.jitter:
        yield (
            "OJS's jitter is a factor from 0.5 to 1.5, Celery's draws from none to all of the delay: "
            "initial_interval is half of Celery's, for the same mean"
        )
    yield from _ignored(reading.task)


def _ignored(task: Task) -> Iterator[str]:
    """Yield what `autoretry_for` gives to Celery's `retry`, and the bridge does not read."""
    given = retry_kwargs(task) if autoretries(task) else {}
    for name in (name for name in given if name not in ("max_retries", "countdown")):
        yield f"retry_kwargs={{{name!r}: ...}} counts for each automatic retry today; the bridge ignores it"
