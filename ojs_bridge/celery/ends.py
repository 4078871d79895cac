"""How a delivery of a Celery task ends, and what Celery, its backends and its chords are told of it."""

from __future__ import annotations

import logging
import pickle
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any, NamedTuple, TypeAlias

from billiard.exceptions import TimeLimitExceeded
from celery import Task, states
from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.result import AsyncResult
from celery.utils.serialization import get_pickleable_exception

from ..engine.events import log_error, strikes
from ..engine.runs import Run, Settlement
from ..errors import StoreError
from ..rules.decision import DeadLettered, Decision, Discarded, RetryAt, SnoozeUntil
from ..rules.failures import HandlerFailed, can_be_shown, safe_repr
from . import compat
from .wire import Outgoing, Wire, known
from .wish import Wish, reason_of, whole

logger = logging.getLogger("ojs_bridge")

#: The attribute of a job's error that says whether the worker acknowledges the message, or rejects it into
#: the dead-letter exchange of its queue. Without it the task's own options say so, as under Celery alone.
#: Celery sends nothing but the error of a failed job from the process that ran it to the main process.
_ACKNOWLEDGED = "ojs_acknowledged"


class LostAttempt(Exception):
    """The worker that ran this attempt is gone: the attempt has failed, and its task is not run."""


class RefusedJob(Exception):
    """The message's retry state or policy cannot be read, so its task was not run."""


class Unsettled(NamedTuple):
    """A decision that could not be carried out; `process` is the number of the process that made it.

    `wire` is the message of its retry. A success has a `result`.
    """

    process: int
    decision: Decision
    shown: Exception
    wire: Wire | None = None
    result: Any = None


class Done(NamedTuple):
    """Celery acknowledges the message, and stores nothing."""

    why: str


class GivenBack(NamedTuple):
    """Celery gives the message back to its queue."""

    why: str


class Kept(NamedTuple):
    """The worker keeps the message, and tries again: its job cannot begin, or its `outcome` has no place."""

    why: str
    needs_store: bool = False
    outcome: Unsettled | None = None


class Again(NamedTuple):
    """The job is on its way again: `when` is a number of seconds, or a time.

    A job that its task's own code sends has a signature, and so has an eager one.
    """

    run: Run
    when: Any
    cause: Exception | None
    shown: Exception
    signature: Any = None


class Over(NamedTuple):
    """The job has ended with an error.

    The worker acknowledges its message, or rejects it; None if Celery is to do as the task's options say.
    """

    shown: Exception
    is_acknowledged: bool | None = None


#: How a delivery ends.
End: TypeAlias = Done | GivenBack | Kept | Again | Over


def kept_here(error: BaseException, outcome: Unsettled | None = None) -> Kept:
    """Return the end of a delivery that the worker keeps until its job can begin, or its run end."""
    is_store = isinstance(error, StoreError)
    return Kept(str(error) if is_store else safe_repr(error), needs_store=is_store, outcome=outcome)


def kept_or_lost(
    request: Any, error: BaseException, outcome: Unsettled | None = None, *, returnable: bool
) -> End:
    """Return the end of a delivery without another place: the worker keeps it, if the broker still has it."""
    if returnable:
        return kept_here(error, outcome)
    why = safe_repr(error)
    logger.critical("job %s is lost, being acknowledged before it ran: %s", known(request), why)
    return Over(shown_exception(error))


def portable(unsettled: Unsettled) -> Unsettled | None:
    """Return an outcome that can be sent to another process; None if there is no such form of it."""
    failed = unsettled._replace(shown=HandlerFailed.of(unsettled.shown))
    return next(filter(_can_be_sent, (unsettled, failed)), None)


def _can_be_sent(unsettled: Unsettled) -> bool:
    try:
        pickle.loads(pickle.dumps(unsettled))  # noqa: S301 - the line itself has pickled it
    except Exception:  # noqa: BLE001 - a user's class may raise anything
        return False
    return True


class Keep(Reject):  # type: ignore[misc]
    """Raised where a task runs: the worker is to keep the delivery, and to hand it to its pool again.

    Without the bridge's request, and in a worker that stops, it is a Reject like any other: the message goes
    back to its queue.
    """

    def __init__(self, kept: Kept, requeue: bool = True) -> None:
        # What the outcome has is not for those that show the arguments of an error.
        super().__init__(kept.why, requeue)
        self.kept = kept

    def __str__(self) -> str:
        return self.kept.why

    def __reduce__(self) -> Any:
        return Keep, (self.kept, self.requeue)


class SentOn(Retry):  # type: ignore[misc]
    """Raised where a task runs: the job is on its way again. Another process gets Celery's own Retry."""

    task: Task
    run: Run

    def __reduce__(self) -> Any:
        return Retry, super().__reduce__()[1]


def end_of(
    task: Task, request: Any, settlement: Settlement[Outgoing], shown: Exception, wish: Wish | None
) -> End:
    """Return how a delivery ends after its decision was carried out.

    The message of a job that has ended is acknowledged if its letter has a place, in the store or in its
    queue's dead queue, or if its handler wants no letter.
    """
    run, decision = settlement.run, settlement.decision
    if isinstance(decision, (RetryAt, SnoozeUntil)) and isinstance(run, Run):
        asked = wish and wish.signal
        when = asked.when if asked else whole(decision.delay)
        cause = None if wish is not None and wish.exc is None else shown
        again = settlement.message and settlement.message.signature
        return Again(run, when, cause, shown, again or (asked and asked.sig))
    if request.is_eager:
        return Over(shown)
    if isinstance(decision, DeadLettered):
        return Over(shown, settlement.in_place)
    if isinstance(decision, Discarded) and decision.cause == "handler":
        return Over(shown, is_acknowledged=True)
    return Over(shown, False if requeues(task, shown) else None)


def requeues(task: Task, crash: Exception) -> bool:
    """Return whether Celery puts a message back whose hard time limit has struck (5.7 and newer)."""
    return isinstance(crash, TimeLimitExceeded) and not getattr(task, "acks_on_timeout", True)


def telling(task: Task, request: Any, end: End) -> Exception:
    """Return the exception that tells Celery how a delivery ends; raises no error."""
    match end:
        case Done():
            told: Exception = Ignore(end.why)
        case GivenBack():
            told = Reject(end.why, requeue=True)
        case Kept():
            told = Keep(end)
        case Again():
            try:
                told = SentOn(exc=end.cause, when=end.when, is_eager=request.is_eager, sig=end.signature)
                told.task, told.run = task, end.run
                # Celery raises a Retry while it handles the task's error, and shows the error's traceback.
                told.__context__ = end.shown
                mark = compat.mark_as_retry_of(task.backend)
                if not isinstance(mark, _InTime) and not isinstance(task.backend, DisabledBackend):
                    setattr(task.backend, compat.mark_as_retry.name, _InTime(mark))
            except BaseException as error:
                if strikes(error):
                    raise
                log_error(error, "job %s is sent on, though Celery cannot tell of it", end.run.job)
                told = Ignore("its job is sent on")
        case Over():
            told = end.shown
            # The task may raise one error in many jobs.
            vars(told).pop(_ACKNOWLEDGED, None)
            if end.is_acknowledged is not None:
                vars(told)[_ACKNOWLEDGED] = end.is_acknowledged
    return told


def is_acknowledged(error: BaseException) -> bool | None:
    """Return whether the worker acknowledges the message of an ended job, by what its error says."""
    return vars(error).get(_ACKNOWLEDGED)


def shown_exception(raised: BaseException, wish: Wish | None = None) -> Exception:
    """Return the exception for Celery: it ends the job.

    What Celery cannot show, store or send to its main process would lose the job. Another one stands for it.
    """
    if wish is not None and raised is wish.signal:
        raised = wish.error
    elif issubclass(type(raised), Retry):
        raised = reason_of(raised)
    if not issubclass(type(raised), (MemoryError, Retry)) and can_be_shown(raised):
        with suppress(BaseException):
            get_pickleable_exception(raised)
            if isinstance(raised, Exception):
                return raised
    return HandlerFailed.of(raised)


@dataclass(frozen=True)
class _InTime:
    """A backend's `mark_as_retry`: for a job that is on its way again it never raises, nor comes too late."""

    mark: Callable[..., Any]

    def __call__(self, *args: Any, **options: Any) -> None:
        # Celery handles it now.
        told = sys.exc_info()[1]
        if not isinstance(told, SentOn):
            self.mark(*args, **options)
            return
        try:
            result = told.task.AsyncResult(told.run.job.id)
            began = datetime.now(timezone.utc) - timedelta(seconds=time.monotonic() - told.run.since)
            if result.state not in states.READY_STATES or not _is_after(began, result, told.task):
                self.mark(*args, **options)
            # Else its next run has ended: this state would be the last one.
        except BaseException as error:
            if strikes(error):
                raise
            log_error(error, "job %s is sent on, though its state cannot be stored", told.run.job)


def report_retry(task: Task, request: Any, signal: Retry) -> None:
    """Do for a job whose process died what Celery does when a task raises Retry; may raise anything."""
    try:
        raise signal
    except Retry:
        compat.handle_error_state_of(compat.TraceInfo(states.RETRY, signal))(task, request)


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
    module = sys.modules.get("celery.backends.redis")
    if not (module and request.chord and request.group and isinstance(task.backend, module.RedisBackend)):
        return
    try:
        _reopen(task.backend, request.id, request.group)
    except Exception:
        logger.exception("job %s: its chord cannot count the replay", known(request))


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
