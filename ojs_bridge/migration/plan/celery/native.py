"""What Celery alone does with a task that fails, in numbers and in words; or that it is not known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from celery import Task

from ..planned import NOT_KNOWN, Native, Open, Runs, Wait
from .asking import Ask
from .reading import Code, Fleet, read_code
from .ways import Way, asked_way, automatic_way, autoretries


@dataclass(frozen=True, slots=True)
class Reading:
    """What was read of a task, and what Celery does with it."""

    task: Task
    #: The plain calls of `self.retry` in its code.
    asks: tuple[Ask, ...]
    ways: tuple[Way, ...]
    native: Native
    #: What leaves something open.
    open: tuple[Open, ...]
    code: Code


def read(fleet: Fleet, task: Task) -> Reading:
    """Read a task's options and its code, neither of which is run."""
    code = read_code(fleet, task)
    ways = tuple(_ways(task, code.asks))
    opened = [*code.open, *(code.of_retries if ways else ()), *_limits_unlike(code, ways)]
    if opened:
        return Reading(task, (), (), Native.unknown(), tuple(dict.fromkeys(opened)), code)
    native = _native(task, code, ways)
    rest = [*code.of_waits, *code.of_end]
    if native.waits == NOT_KNOWN and not code.of_waits:
        rest.append(_waits_unlike(task, code))
    return Reading(task, tuple(code.asks), ways, native, tuple(rest), code)


def _limits_unlike(code: Code, ways: Sequence[Way]) -> Iterator[Open]:
    if len({way.runs for way in ways}) > 1:
        yield Open(code.where(code.asks[-1].line), "its max_retries is not that of the task's other retries")


def _waits_unlike(task: Task, code: Code) -> Open:
    if code.asks:
        return Open(code.where(code.asks[-1].line), "its wait is not that of the task's other retries")
    return Open(task.name, "retry_kwargs has an eta: how long a retry waits depends on when it is asked for")


def _ways(task: Task, asks: Iterable[Ask]) -> Iterator[Way]:
    if autoretries(task):
        yield automatic_way(task)
    yield from (asked_way(task, ask) for ask in asks)


def _native(task: Task, code: Code, ways: Sequence[Way]) -> Native:
    runs: Runs = ways[0].runs if ways else 1
    listed = [way.listed() for way in ways]
    alike = all(waits == listed[0] for waits in listed)
    return Native.computed(
        runs,
        _never if runs == 1 else ways[0].wait if alike else None,
        retries="nothing" if runs == 1 else "; ".join(_retried(task, code)),
        final="every error" if runs == 1 else _final(task),
        at_the_end=NOT_KNOWN if code.of_end else _listed(_end(task, code.asks)),
    )


def _never(_: int) -> Wait:
    """Return the wait of what is never retried."""
    return Wait.of(0.0)


def _retried(task: Task, code: Code) -> Iterator[str]:
    if autoretries(task):
        excluded = _names(getattr(task, "dont_autoretry_for", ()))
        but = f", but not {excluded} (dont_autoretry_for)" if excluded else ""
        yield f"{_names(task.autoretry_for)} (autoretry_for){but}"
    if code.asks:
        yield f"what its code calls self.retry for, in {_listed(code.where(ask.line) for ask in code.asks)}"


def _final(task: Task) -> str:
    if not autoretries(task):
        return "every error that reaches Celery without self.retry"
    excluded = _names(getattr(task, "dont_autoretry_for", ()))
    rest = () if Exception in tuple(task.autoretry_for) else ("every other error",)
    return _listed([*filter(None, [excluded]), *rest]) or "nothing"


def _end(task: Task, asks: Iterable[Ask]) -> Iterator[str]:
    error = " with MaxRetriesExceededError" if any(not ask.has_exc for ask in asks) else ""
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


def _listed(names: Iterable[str]) -> str:
    """Return names as a sentence lists them: a, b and c."""
    *most, last = [*names] or [""]
    return f"{', '.join(most)} and {last}" if most else last


def _names(classes: Iterable[type]) -> str:
    return _listed(
        cls.__qualname__ if cls.__module__ == "builtins" else f"{cls.__module__}.{cls.__qualname__}"
        for cls in classes
    )
