"""What a task raised, in the bridge's words and in Celery's."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from celery import Task
from celery.exceptions import Retry

from ..errors import Response
from ..failures import ErrorMap, Failure, Outcome, outcome_of, text_of
from .wish import Wish

NOT_NAMED = "which the task's autoretry_for does not name"


class HandlerFailed(Exception):
    """Stands for what a task raised and Celery's pools cannot carry, such as MemoryError or SystemExit."""


def outcome(task: Task, raised: BaseException, wish: Wish | None, errors: ErrorMap, now: datetime) -> Outcome:
    """Return what came of a run whose task raised; a wish's own word asks for a retry."""
    if wish is None or not wish.raised_as(raised):
        return _ruled(task, outcome_of(raised, errors), raised)
    asked = outcome_of(wish.cause or wish.error, errors)
    if not isinstance(asked, Failure):
        return asked
    after = wish.after(now, task.app.timezone)
    return replace(asked, code="RETRY", retry_after=after if after is not None else asked.retry_after)


def _ruled(task: Task, outcome: Outcome, exc: BaseException) -> Outcome:
    """Apply a native task's autoretry_for: what it does not name was never retried, and still is not."""
    named = tuple(getattr(task, "autoretry_for", ()))
    if not named or not isinstance(outcome, Failure) or isinstance(exc, Response):
        return outcome
    excluded = tuple(getattr(task, "dont_autoretry_for", ()))
    if isinstance(exc, named) and not isinstance(exc, excluded):
        return outcome
    return replace(outcome, final=NOT_NAMED)


def shown(raised: BaseException, wish: Wish | None) -> Exception:
    """Return the exception that Celery is shown, one that its pools can carry and that is an end."""
    if wish and raised is wish.signal:
        raised = wish.error
    if isinstance(raised, Exception) and not isinstance(raised, (MemoryError, Retry)):
        found: Exception = raised
        return found
    return HandlerFailed(f"{type(raised).__name__}: {text_of(raised)}").with_traceback(raised.__traceback__)
