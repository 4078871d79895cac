"""What a task raised, in the bridge's words and in Celery's."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime

from celery import Task
from celery.exceptions import Retry

from ..failures import ErrorMap, Failure, Outcome, outcome_of, text_of
from ..retry_on import RetryOn
from .wish import Wish


class HandlerFailed(Exception):
    """Stands for what a task raised and Celery's pools cannot carry, such as MemoryError or SystemExit."""


def outcome(
    task: Task, raised: BaseException, wish: Wish | None, errors: ErrorMap, retry_on: RetryOn, now: datetime
) -> Outcome:
    """Return what came of a run whose task raised; a wish's own word asks for a retry."""
    if wish is None or not wish.raised_as(raised):
        return outcome_of(raised, errors, None if isinstance(raised, Retry) else retry_on.rules_out(raised))
    asked = outcome_of(wish.cause or wish.error, errors)
    if not isinstance(asked, Failure):
        return asked
    after = wish.after(now, task.app.timezone)
    return replace(asked, code="RETRY", retry_after=after if after is not None else asked.retry_after)


def shown(raised: BaseException, wish: Wish | None) -> Exception:
    """Return the exception that Celery is shown, one that its pools can carry and that is an end."""
    if wish and raised is wish.signal:
        raised = wish.error
    if isinstance(raised, Exception) and not isinstance(raised, (MemoryError, Retry)):
        found: Exception = raised
        return found
    return HandlerFailed(f"{type(raised).__name__}: {text_of(raised)}").with_traceback(raised.__traceback__)
