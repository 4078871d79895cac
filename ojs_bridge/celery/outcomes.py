"""The outcome of a task for the bridge and for Celery, and the exceptions by which a pool ends a task."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from numbers import Real
from typing import Any

from billiard import common, current_process, pool
from celery import Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate

from ..engine.engine import Engine
from ..engine.harmless import let_through
from ..engine.reservations import TakenOver
from ..engine.runs import Run
from ..rules.decision import Complete
from ..rules.failures import ErrorMap, Failure, Outcome, outcome_of, text_of
from ..rules.job import Job
from . import compat
from .wish import Wish, countdown_of, until

logger = logging.getLogger("ojs_bridge")

#: Green pools end a task with exceptions of these modules.
_GREEN = ("gevent", "greenlet", "eventlet")
_SOFT_TIMEOUT = compat.soft_timeout_signal(pool)


class HandlerFailed(Exception):
    """Stands for an exception that Celery's pools cannot carry, such as MemoryError or SystemExit."""


class LostAttempt(Exception):
    """The worker that ran this attempt is gone: the attempt has failed, and its task is not run."""


class RefusedJob(Exception):
    """The message's retry state or policy cannot be read, so its task was not run."""


def ignored(why: str) -> Exception:
    """Return the exception by which Celery acknowledges a message and stores nothing."""
    signal: Exception = Ignore(why)
    return signal


def given_back(why: str) -> Exception:
    """Return the exception by which Celery gives a message back to its queue."""
    signal: Exception = Reject(why, requeue=True)
    return signal


def dropped(job: Job, late: TakenOver, *, returnable: bool) -> Exception:
    """Log that the outcome of a run does not count; return what has Celery store nothing."""
    logger.warning("job %s: %s", job, late)
    # The worker that took the run over may have died since. The next delivery finds out.
    return given_back(str(late)) if returnable else ignored(str(late))


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A run that succeeded; it is settled after Celery has stored its result and sent what follows."""

    engine: Engine
    run: Run

    def settle(self) -> None:
        """Settle the run; never raises."""
        self.engine.settling.settle(self.run, Complete())


def task_outcome(task: Task, raised: BaseException, wish: Wish | None, run: Run, now: datetime) -> Outcome:
    """Return the outcome of a run whose task raised; the wish's exception, or Celery's, asks for a retry."""
    zone = task.app.timezone
    if wish is not None and wish.raised_as(raised):
        # Unless an owner has set waits, those of the policy are for autoretry_for alone.
        default = wish.default_delay if run.layers.waits_are_native else None
        cause = wish.cause or _causeless(wish, run)
        return _asked(cause, wish.after(now, zone), run.task.errors, default)
    if isinstance(raised, Retry):
        return _asked(_reason(raised), _hint(raised, now, zone), run.task.errors)
    return outcome_of(raised, run.task.errors, run.layers.retries.rules_out(raised))


def _causeless(wish: Wish, run: Run) -> BaseException:
    """Return what stands in the history for a call of `self.retry(...)` without an error."""
    if run.job.attempt >= run.policy.runs:
        return wish.error
    asked: BaseException = Retry("self.retry() was called without an error")
    return asked


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
    """Return the delay that Celery's Retry asks for; None if it is no time."""
    with suppress(ValueError):
        return countdown_of(signal.when) if isinstance(signal.when, Real) else until(signal.when, now, zone)
    return None


def shown_exception(raised: BaseException, wish: Wish | None) -> Exception:
    """Return the exception for Celery: its pools can carry it, and it ends the job."""
    if wish and raised is wish.signal:
        raised = wish.error
    elif isinstance(raised, Retry):
        raised = _reason(raised)
    if isinstance(raised, Exception) and not isinstance(raised, (MemoryError, Retry)):
        found: Exception = raised
        return found
    return HandlerFailed(f"{type(raised).__name__}: {text_of(raised)}").with_traceback(raised.__traceback__)


def is_the_tasks_own(exc: BaseException, task: Task, request: Any) -> bool:
    """Return whether the task itself raised this, and not Celery's pool, to end it."""
    if isinstance(exc, (WorkerShutdown, WorkerTerminate)):
        return False
    if isinstance(exc, SystemExit):
        return not _pool_ends_the_process()
    if isinstance(exc, Exception) or not type(exc).__module__.startswith(_GREEN):
        return True
    # A task may use timeouts itself; the pool has one only for a hard time limit.
    limited = bool((request.timelimit or (None,))[0] or task.time_limit)
    return "Timeout" in type(exc).__name__ and not limited


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let no soft time limit strike while an outcome is carried out; the hard one still may."""
    if _SOFT_TIMEOUT is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(_SOFT_TIMEOUT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(_SOFT_TIMEOUT, before or signal.SIG_DFL)


def _pool_ends_the_process() -> bool:
    """Return whether billiard may have raised SystemExit, to end a terminated child."""
    fired = compat.terminate_handler_fired(common, None)
    # An older billiard does not say so; only its child processes end this way.
    return bool(fired()) if fired else current_process().name != "MainProcess"


def _is_aimed(exc: BaseException) -> bool:
    """Return whether Celery or its pool raises this from outside, to end what the thread does."""
    if isinstance(exc, SystemExit):
        return isinstance(exc, (WorkerShutdown, WorkerTerminate)) or _pool_ends_the_process()
    if isinstance(exc, Exception):
        return isinstance(exc, SoftTimeLimitExceeded)
    return type(exc).__module__.startswith(_GREEN)


let_through(_is_aimed)
