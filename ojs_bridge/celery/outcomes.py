"""What a task raised, in the bridge's words and in Celery's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from numbers import Real
from typing import Any

from celery import Task
from celery.exceptions import Retry

from ..engine.runs import Run
from ..spec.failures import ErrorMap, Failure, Outcome, outcome_of, text_of
from .wish import Wish, countdown_of, until


class HandlerFailed(Exception):
    """Stands for what a task raised and Celery's pools cannot carry, such as MemoryError or SystemExit."""


def outcome(task: Task, raised: BaseException, wish: Wish | None, run: Run, now: datetime) -> Outcome:
    """Return what came of a run whose task raised; a wish's own word, or Celery's, asks for a retry."""
    zone = task.app.timezone
    if wish is not None and wish.raised_as(raised):
        # Where an owner has said nothing of waits, the policy's are about autoretry_for.
        default = wish.default_delay if run.task.keeps_waits(run.job.retry) else None
        return _asked(wish.cause or wish.error, wish.after(now, zone), run.task.errors, default)
    if isinstance(raised, Retry):
        return _asked(_reason(raised), _hint(raised, now, zone), run.task.errors)
    return outcome_of(raised, run.task.errors, run.retry_on.rules_out(raised))


def _asked(
    cause: BaseException, after: timedelta | None, errors: ErrorMap, default: timedelta | None = None
) -> Outcome:
    asked = outcome_of(cause, errors)
    if not isinstance(asked, Failure):
        return asked
    said = asked.retry_after if after is None else after
    return replace(asked, code="RETRY", retry_after=default if said is None else said)


def _reason(signal: Retry) -> BaseException:
    found: BaseException = signal.exc if isinstance(signal.exc, BaseException) else signal
    return found


def _hint(signal: Retry, now: datetime, zone: Any) -> timedelta | None:
    """Return when Celery's signal says that the retry is due; what it says may be no time."""
    with suppress(ValueError):
        return countdown_of(signal.when) if isinstance(signal.when, Real) else until(signal.when, now, zone)
    return None


def shown(raised: BaseException, wish: Wish | None) -> Exception:
    """Return the exception that Celery is shown, one that its pools can carry and that is an end."""
    if wish and raised is wish.signal:
        raised = wish.error
    elif isinstance(raised, Retry):
        raised = _reason(raised)
    if isinstance(raised, Exception) and not isinstance(raised, (MemoryError, Retry)):
        found: Exception = raised
        return found
    return HandlerFailed(f"{type(raised).__name__}: {text_of(raised)}").with_traceback(raised.__traceback__)
