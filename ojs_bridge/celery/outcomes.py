"""The outcome of a task for the bridge, for Celery and its result backend, and how a pool ends a task."""

from __future__ import annotations

import functools
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from numbers import Real
from typing import Any

from billiard import common, current_process, pool
from billiard.exceptions import TimeLimitExceeded
from celery import Task, states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded, WorkerShutdown, WorkerTerminate
from celery.result import AsyncResult
from celery.utils.serialization import get_pickleable_exception
from typing_extensions import assert_never

from ..engine.engine import Engine
from ..engine.events import log_error, strikes
from ..engine.reservations import TakenOver
from ..engine.runs import Onward, Run, Settlement
from ..engine.threads import let_through
from ..errors import StoreError
from ..messages import HEADER, parameters_of
from ..rules.decision import Complete, DeadLettered, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import (
    ErrorMap,
    Failure,
    HandlerFailed,
    Outcome,
    can_be_shown,
    name_of,
    outcome_of,
)
from ..rules.job import Job
from . import compat, sending
from . import wire as wires
from .attach import FRAMEWORK, attach
from .wire import KEY, OUTCOME, Carried, Wire, known
from .wish import Failed, Wish, countdown_of, eager_signature, until

logger = logging.getLogger("ojs_bridge")

#: Green pools end a task with exceptions of these modules.
GREEN = ("gevent", "greenlet", "eventlet")
#: The attribute of a request whose job is on its way again: its task, and when its run began.
_RETRIED = "ojs_retried"
_SOFT_TIMEOUT = compat.soft_timeout_signal(pool)


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


def outcome_asked(wish: Wish, run: Run, now: datetime) -> Outcome:
    """Return the outcome of a run whose task has called `self.retry(...)`."""
    # Unless an owner has set waits, those of the policy are for autoretry_for alone.
    default = wish.default_delay if run.task.layers.waits_are_native else None
    cause = _causeless(wish, run) if wish.cause is None else wish.cause
    return _asked(cause, wish.after(now, wish.task.app.timezone), run.task.errors, default)


def task_outcome(task: Task, raised: BaseException, run: Run, now: datetime) -> Outcome:
    """Return the outcome of a run whose task raised; Celery's Retry asks for a retry."""
    if issubclass(type(raised), Retry):
        return _asked(_reason(raised), _hint(raised, now, task.app.timezone), run.task.errors)
    return outcome_of(raised, run.task.errors, run.task.layers.retries.rules_out(raised))


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


def _reason(signal: Any) -> BaseException:
    reason: BaseException = signal.exc if issubclass(type(signal.exc), BaseException) else signal
    return reason


def _hint(signal: Any, now: datetime, zone: Any) -> timedelta | None:
    """Return the delay that Celery's Retry asks for; None if it is no time."""
    with suppress(ValueError):
        return countdown_of(signal.when) if isinstance(signal.when, Real) else until(signal.when, now, zone)
    return None


def shown_exception(raised: BaseException, wish: Wish | None = None) -> Exception:
    """Return the exception for Celery: it ends the job.

    What Celery cannot show, store or send to its main process would lose the job. Another one stands for it.
    """
    if wish is not None and raised is wish.signal:
        raised = wish.error
    elif issubclass(type(raised), Retry):
        raised = _reason(raised)
    if not issubclass(type(raised), (MemoryError, Retry)) and can_be_shown(raised):
        with suppress(BaseException):
            get_pickleable_exception(raised)
            if isinstance(raised, Exception):
                return raised
    return HandlerFailed.of(raised)


def is_the_tasks_own(exc: BaseException, task: Task, request: Any) -> bool:
    """Return whether the task itself raised this, and not Celery's pool, to end it."""
    if issubclass(type(exc), SystemExit):
        return not _is_aimed(exc)
    if issubclass(type(exc), Exception) or not name_of(type(exc)).startswith(GREEN):
        return True
    # A task may use timeouts itself; the pool has one only for a hard time limit.
    limited = bool((request.timelimit or (None,))[0] or task.time_limit)
    return "Timeout" in name_of(type(exc)) and not limited


def requeues(task: Task, crash: Exception) -> bool:
    """Return whether Celery puts a message back whose hard time limit has struck (5.7 and newer)."""
    return isinstance(crash, TimeLimitExceeded) and not getattr(task, "acks_on_timeout", True)


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


def unless_terminated(settle: Callable[[], object]) -> None:
    """Settle a success, unless the pool ends the process before its result is stored: that is no success."""
    fired = isinstance(sys.exc_info()[1], SystemExit) and compat.terminate_handler_fired(common, None)
    if not (fired and fired()):
        settle()


def _is_aimed(exc: BaseException) -> bool:
    """Return whether Celery or its pool raises this from outside, to end what the thread does."""
    if issubclass(type(exc), (WorkerShutdown, WorkerTerminate)):
        return True
    if issubclass(type(exc), SystemExit):
        # Billiard may have raised it, to end a terminated child.
        fired = compat.terminate_handler_fired(common, None)
        # An older billiard does not say so; only its child processes end this way.
        return bool(fired()) if fired else current_process().name != "MainProcess"
    if issubclass(type(exc), Exception):
        return issubclass(type(exc), SoftTimeLimitExceeded)
    return name_of(type(exc)).startswith(GREEN)


let_through(_is_aimed)


def carried_on(task: Task, request: Any, since: datetime | None) -> bool:
    """Return whether the dead worker of a job had stored its success; if so, the job's chord counts it.

    Celery sends the chain and the links before it stores the success. A success from before `since`, when the
    worker began, is of an earlier job with the same id. Never raises.
    """
    if since is None or task.ignore_result or isinstance(task.backend, DisabledBackend):
        return False
    try:
        result = task.AsyncResult(request.id)
        if result.state != states.SUCCESS or not _is_after(since, result, task):
            return False
        value = result.result
    except Exception:
        logger.exception("job %s: whether it has succeeded cannot be found out", known(request))
        return False
    count_in_chord(task, request, value)
    return True


def count_in_chord(task: Task, request: Any, result: Any) -> None:
    """Let a job's chord count its success, perhaps a second time; never raises."""
    if not request.chord:
        return
    try:
        compat.on_chord_part_return(task.backend)(request, states.SUCCESS, result)
    except Exception:
        logger.exception("job %s: its chord cannot count its success", known(request))


def _is_after(since: datetime, result: AsyncResult, task: Task) -> bool:
    at: datetime | None = result.date_done
    if at is None:
        return False
    # A time without a zone is the app's, or the database server's: one in the future proves nothing.
    aware = at if at.tzinfo else at.replace(tzinfo=task.app.timezone)
    now: datetime = task.app.now()
    return since <= aware <= now


def reopen_chord(task: Task, request: Any) -> None:
    """Let a chord on Redis replace the failure of a replayed member by its success; never raises.

    A chord that has failed sends its body when no failure is left in it.
    """
    if not (request.chord and request.group and _is_redis(task.backend)):
        return
    try:
        _reopen(task.backend, request.id, request.group)
    except Exception:
        logger.exception("job %s: its chord cannot count the replay", known(request))


def _is_redis(backend: Any) -> bool:
    module = sys.modules.get("celery.backends.redis")
    return module is not None and isinstance(backend, module.RedisBackend)


def _reopen(backend: Any, job_id: str, group_id: str) -> None:
    # The state of a chord: its parts, what is added to its size, its size, and since Celery 5.7 the jobs that
    # are counted and the job that sends the body.
    key_of = compat.get_key_for_group(backend)
    parts, more, size, counted, claim = (key_of(group_id, f".{key}") for key in "jtsdc")
    redis, is_ordered = backend.client, compat.chord_zset(backend)
    stored = redis.zrange(parts, 0, -1) if is_ordered else redis.lrange(parts, 0, -1)
    read = {part: backend.decode(part) for part in stored}
    failed = {part: of for part, (_, of, state, _) in read.items() if state in states.EXCEPTION_STATES}
    own = [part for part, of in failed.items() if of == job_id]
    if not own:
        return
    whole, extra = redis.get(size), int(redis.get(more) or 0)
    marks = [mark for mark in redis.smembers(counted) if mark.startswith(f"{job_id}:".encode())]
    with redis.pipeline() as pipe:
        for part in own:
            pipe.zrem(parts, part) if is_ordered else pipe.lrem(parts, 0, part)
        if marks:
            pipe.srem(counted, *marks)
        if whole is None or len(stored) >= int(whole) + extra:
            # The chord has failed. Celery counts again if this was its last failure.
            pipe.delete(claim, size)
            if len(failed) == len(own):
                pipe.set(size, len(stored) - extra, ex=backend.expires or None)
        pipe.execute()


def retried(
    task: Task, request: Any, run: Run, delay: float, cause: Exception | None, shown: Exception, again: Any
) -> Exception:
    """Return the exception that tells Celery of a job that is on its way again; raises no error."""
    try:
        signal: Exception = Retry(exc=cause, when=delay, is_eager=request.is_eager, sig=again)
        # Celery raises a Retry while it handles the task's error, and shows the error's traceback.
        signal.__context__ = shown
        mark = compat.mark_as_retry_of(task.backend)
        if not isinstance(mark, _InTime) and not isinstance(task.backend, DisabledBackend):
            setattr(task.backend, compat.mark_as_retry.name, _InTime(mark))
        began = datetime.now(timezone.utc) - timedelta(seconds=time.monotonic() - run.since)
        setattr(request, _RETRIED, (task, began))
    except BaseException as error:
        if strikes(error):
            raise
        log_error(error, "job %s is sent on, though Celery cannot tell of it", run.job)
        return ignored("its job is sent on")
    return signal


@dataclass(frozen=True)
class _InTime:
    """A backend's `mark_as_retry`: for a job that is on its way again it never raises, nor comes too late."""

    mark: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> None:
        request: Any = options.get("request")
        retried: Any = getattr(request, _RETRIED, None)
        try:
            if retried is not None:
                task, began = retried
                result = task.AsyncResult(request.id)
                if result.state in states.READY_STATES and _is_after(began, result, task):
                    # Its next run has ended. This state would be the last one.
                    return
            self.mark(*args, **options)
        except BaseException as error:
            if retried is None or strikes(error):
                raise
            log_error(error, "job %s is sent on, though its state cannot be stored", known(request))


def report_retry(task: Task, request: Any, signal: Retry) -> None:
    """Do for a job whose process died what Celery does when a task raises Retry; may raise anything."""
    try:
        raise signal
    except Retry:
        compat.handle_error_state_of(compat.TraceInfo(states.RETRY, signal))(task, request)


class Delivery:
    """One delivery of a task, the engine's outlet: what is published, and how it leaves its queue."""

    framework = FRAMEWORK

    def __init__(self, task: Task, request: Any) -> None:
        self.engine: Engine = attach(task.app).engine
        self.task = task
        self.request = request
        #: Whether the broker still has the message, and takes it back.
        self.can_wait = bool(task.acks_late and not request.is_eager)
        # The properties of the bridge are hidden from the task.
        properties = request.properties = dict(request.properties or {})
        #: The message; None for an eagerly applied task, which has none.
        self.carried: Carried | None = properties.pop(KEY, None)
        #: The decision on a run that has ended, if it could not be carried out yet.
        self.unsettled: Any = properties.pop(OUTCOME, None)
        self.headers: Mapping[str, Any] = (request.headers or {}) if self.carried is None else self.carried[3]
        #: The mark by which two messages of the job's first run differ; "" if the broker gives none.
        self.publication = "" if self.carried is None else self.carried[4]
        self.parts = self.headers, request.args, request.kwargs
        self.begun: Run | None = None
        #: The failure for which the bridge calls the task's own `retry`.
        self.failed: Failed | None = None
        #: The retry that the task has asked for, or that the bridge has asked the task's own `retry` for.
        self.wish: Wish | None = None
        #: The message of a retry that could not be sent yet.
        self.unsent: Wire | None = None
        #: What settles a success, once its result is stored and its chain and links are sent.
        self.ended: Callable[[], None] | None = None
        #: The task's error, as Celery shows it, and the exception that tells Celery of the end.
        self.shown: Exception = Ignore()
        self.signal: Exception = self.shown
        #: The decision on a job that goes on, when it was carried out, and an eager retry's signature.
        self.goes_on: RetryAt | SnoozeUntil | None = None
        self.again: Any = None

    @property
    def unreachable(self) -> tuple[type[Exception], ...]:
        """The errors of a store or a broker that is out of reach."""
        return (StoreError, *sending.out_of_reach(self.task.app))

    def message(self, onward: Onward | None) -> sending.Outgoing | None:
        """Return the message as it came, or as it goes on; None for an eager retry, which runs at once."""
        if onward is not None and self.request.is_eager:
            return None
        wire, parameters = self.wire, parameters_of(self.task.run)
        if onward is None:
            return sending.Outgoing(wire, None, parameters)
        changes: dict[str, Any] = {HEADER: onward.header.text}
        if onward.decision is not None:
            changes["retries"] = onward.job.attempt - 1
        if isinstance(onward.decision, RetryAt):
            wire = (self.wish.wire if self.wish else self.unsent) or wire
        return sending.Outgoing(wire, changes, parameters)

    def publish(self, message: sending.Outgoing, at: datetime) -> None:
        """Publish a message, which is due at a time."""
        publish = functools.partial(sending.publish, self.task.app, message, self.engine.now(), at)
        self.engine.context.storage_retry.run(publish, retry_on=self.unreachable)

    def leave(self, settlement: Settlement[sending.Outgoing]) -> None:
        """Choose the exception that ends the delivery, and bury what the store does not have."""
        job, eager, decision = settlement.job, self.request.is_eager, settlement.decision
        match decision:
            case GiveBack():
                self.signal = given_back(decision.reason)
            case RetryAt() | SnoozeUntil():
                if eager:
                    # A due time would only postpone what runs at once.
                    now = self.engine.keeping.header(job._replace(next_retry_at=None))
                    sig = self.wish and self.wish.signal and self.wish.signal.sig
                    self.again = eager_signature(self.task, self.request, sig, job, now)
                self.goes_on = decision
            case Discarded() | DeadLettered():
                self.signal = self.shown
                if not eager:
                    vars(self.shown)[sending.ACKNOWLEDGED] = self._is_acknowledged(settlement)
            case Complete() | None:
                pass
            case _:
                assert_never(decision)

    def _is_acknowledged(self, settlement: Settlement[sending.Outgoing]) -> bool | None:
        """Return whether the worker acknowledges a job's last message, or rejects it; None as Celery does.

        It is acknowledged if its letter is kept, in the store or in its queue's dead queue, and if its
        handler wants no letter.
        """
        job, decision = settlement.job, settlement.decision
        if settlement.in_store or (isinstance(decision, Discarded) and decision.cause == "handler"):
            return True
        if not isinstance(decision, DeadLettered):
            return False if decision and requeues(self.task, self.shown) else None
        header, app = self.engine.keeping.last_header(job), self.task.app
        changes = {"retries": job.attempt, **({} if header is None else {HEADER: header.text})}
        return sending.is_buried(self.engine, app, self.wire, changes, can_wait=self.can_wait)

    @functools.cached_property
    def wire(self) -> Wire:
        """The message; an eagerly applied task gets the one that it would have had."""
        app, request = self.task.app, self.request
        if self.carried is None:
            return wires.eager(app, self.task.name, request, self.headers)
        return wires.delivered(app, self.carried, request.properties or {}, request.delivery_info or {})

    @property
    def job(self) -> Job | None:
        """The job of this run; None before it has begun."""
        return self.begun and self.begun.job
