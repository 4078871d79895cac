"""What Celery alone does with a task that fails, in numbers and in words."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from celery import Task

from ..planned import Native
from .retry_calls import RetryCall
from .search import search
from .ways import Way, autoretries, together, ways_of


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of a task: its calls of `self.retry`, its ways of being retried, and what Celery does."""

    task: Task
    calls: tuple[RetryCall, ...]
    ways: tuple[Way, ...]
    native: Native
    #: What may call `self.retry`, too, and could not be read, in words.
    unread: tuple[str, ...]
    #: What of its retries the task's code sets itself, and where.
    sets: tuple[str, ...]


def read(task: Task) -> Reading:
    """Read a task's options and its code, neither of which is run."""
    found = search(task)
    ways = ways_of(task, found.calls)
    runs, wait = together(ways)
    calls = tuple(found.calls)
    native = Native.computed(
        runs,
        wait,
        retries="nothing" if runs == 1 else "; ".join(_retried(task, calls)),
        final="every error" if runs == 1 else _final(task),
        at_the_end=listed(_end(task, calls)),
    )
    unread, sets = (tuple(dict.fromkeys(texts)) for texts in (found.unread, found.sets))
    return Reading(task, calls, tuple(ways), native, unread, sets)


def _retried(task: Task, calls: Iterable[RetryCall]) -> Iterator[str]:
    if autoretries(task):
        excluded = _names(getattr(task, "dont_autoretry_for", ()))
        but = f", but not {excluded} (dont_autoretry_for)" if excluded else ""
        yield f"{_names(task.autoretry_for)} (autoretry_for){but}"
    places = [*dict.fromkeys(call.where for call in calls)]
    if places:
        yield f"what its code calls self.retry for, in {listed(places)}"


def _final(task: Task) -> str:
    if not autoretries(task):
        return "every error that reaches Celery without self.retry"
    excluded = _names(getattr(task, "dont_autoretry_for", ()))
    rest = () if Exception in tuple(task.autoretry_for) else ("every other error",)
    return listed([*filter(None, [excluded]), *rest]) or "nothing"


def _end(task: Task, calls: Iterable[RetryCall]) -> Iterator[str]:
    error = " with MaxRetriesExceededError" if any(not call.has_exc for call in calls) else ""
    if is_unseen(task):
        yield "its result is ignored"
    elif not task.app.conf.result_backend:
        yield "no result backend keeps its result"
    else:
        yield f"its result says FAILURE{error}"
    yield "an errback of its signature is called"
    if task.acks_late and not acknowledges_failures(task):
        yield "its message is rejected, so that only a queue's own dead letter exchange keeps it"
    else:
        yield "its message is gone"


def is_unseen(task: Task) -> bool:
    """Return whether nothing stores a task's failure."""
    return bool(task.ignore_result and not task.store_errors_even_if_ignored)


def acknowledges_failures(task: Task) -> bool:
    """Return whether the message of a run that failed is acknowledged; Celery 5.7 has two options for it."""
    newer = getattr(task, "acks_on_failure", None)
    return bool(task.acks_on_failure_or_timeout if newer is None else newer)


def listed(names: Iterable[str]) -> str:
    """Return names as a sentence lists them: a, b and c."""
    *most, last = [*names] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _names(classes: Iterable[type]) -> str:
    return listed(
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        for cls in classes
    )
