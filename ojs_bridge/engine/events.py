"""The events of the Open Job Spec, their listeners, the log about a job, and errors that touch no job."""

from __future__ import annotations

import logging
import os
import queue
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias

from typing_extensions import assert_never

from ..errors import StoreError
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import Failure, safe_repr
from ..rules.job import Job, format_time
from ..rules.responses import ANSWERS
from ..store import Parked
from .threads import BetweenForks, is_aimed, keep_going, starting

logger = logging.getLogger("ojs_bridge")

#: The largest number of events that wait for the listeners.
MAX_WAITING = 10_000
#: The seconds between two looks at whether the listeners have heard all events.
_FLUSH_PAUSE = 0.005
#: Where events come from: `ojs://{service}/workers/{instance}`.
SOURCE = f"ojs://ojs-bridge/workers/{socket.gethostname()}"


@dataclass(frozen=True, slots=True)
class Event:
    """One event of the Open Job Spec: its type, the job's id as subject, and the data the type requires."""

    type: str
    subject: str
    time: datetime
    data: Mapping[str, Any]
    id: str = field(default_factory=lambda: f"evt_{uuid.uuid4()}")

    def to_ojs(self) -> dict[str, Any]:
        """Return the event's JSON form."""
        return {
            "specversion": "1.0",
            "id": self.id,
            "type": self.type,
            "source": SOURCE,
            "time": format_time(self.time),
            "subject": self.subject,
            "datacontenttype": "application/json",
            "data": dict(self.data),
        }


Listener: TypeAlias = Callable[[Event], object]
"""A listener is a plain callable. Its return value is ignored, and its errors are logged."""


def started(job: Job, at: datetime) -> Event:
    """Return the event of an attempt that begins."""
    return _event("job.started", job, at, attempt=job.attempt, worker_id=worker_id())


def worker_id() -> str:
    """Return the name of this process."""
    return f"{socket.gethostname()}:{os.getpid()}"


def of(job: Job, decision: Decision, *, max_attempts: int, seconds: float, at: datetime) -> list[Event]:
    """Return the events of a decision that was carried out, in order; the run took `seconds`."""
    duration = {"attempt": job.attempt, "duration_ms": round(seconds * 1000, 3)}
    match decision:
        case Complete():
            return [_event("job.completed", job, at, **duration)]
        case SnoozeUntil():
            if decision.hold:
                return [
                    _event("job.held", job, at, attempt=job.attempt, hold=decision.hold, **_wait(decision))
                ]
            return [_event("job.snoozed", job, at, **duration, **_wait(decision))]
        case GiveBack():
            return [_event("job.released", job, at, **duration, reason=decision.reason)]
        case RetryAt():
            failed = _failed(job, decision.failure, at, duration, retryable=True)
            data = {"max_attempts": max_attempts, "error": _error(decision.failure), **_wait(decision)}
            return [failed, _event("job.retrying", job, at, **duration, **data)]
        case Discarded() | DeadLettered():
            retryable = decision.cause == "exhausted"
            failed = _failed(job, decision.failure, at, duration, retryable=retryable)
            return [failed, *_ended(job, decision, at, duration)]
        case _:
            assert_never(decision)


def _wait(decision: RetryAt | SnoozeUntil) -> dict[str, Any]:
    delay = round(decision.delay * 1000, 3)
    return {"next_retry_at": format_time(decision.at), "delay_ms": delay, "reason": decision.reason}


def _error(failure: Failure) -> dict[str, str]:
    return {"code": failure.code, "type": failure.type, "message": failure.message}


def _failed(
    job: Job, failure: Failure, at: datetime, duration: Mapping[str, Any], *, retryable: bool
) -> Event:
    return _event("job.failed", job, at, **duration, error={**_error(failure), "retryable": retryable})


def _ended(
    job: Job, decision: Discarded | DeadLettered, at: datetime, duration: Mapping[str, Any]
) -> list[Event]:
    dead = isinstance(decision, DeadLettered)
    discarded = _event(
        "job.discarded",
        job,
        at,
        total_attempts=job.attempt,
        last_error=_error(decision.failure),
        dead_lettered=dead,
        cause=decision.cause,
        reason=decision.reason,
        response_code=decision.failure.code,
        duration_ms=duration["duration_ms"],
    )
    return [discarded, _event("dead_letter.added", job, at)] if dead else [discarded]


def replayed(job: Job, at: datetime, rule: str = "") -> Event:
    """Return the event of a replay: an operator's `retried`, or a rule's `replayed`."""
    if rule:
        return _event("dead_letter.replayed", job, at, replay_count=job.replay_count, rule=rule)
    return _event("dead_letter.retried", job, at, replay_count=job.replay_count)


def deleted(job: Job, at: datetime) -> Event:
    """Return the event of a dead letter that an operator has deleted."""
    return _event("dead_letter.deleted", job, at)


def pruned(count: int, at: datetime, *, policy: str) -> Event:
    """Return the event of many dead letters that were deleted (spec section dlq 8).

    `policy` is retention's `delete` or `archive`, or an operator's `purge`.
    """
    return Event("dead_letter.pruned", "", at, {"count": count, "pruning_policy": policy})


def paused(queue: str, at: datetime, *, is_over: bool) -> Event:
    """Return the event of a queue that an operator has paused, or let go on."""
    data = {"queue": queue}
    return Event("queue.resumed", queue, at, data) if is_over else Event("queue.paused", queue, at, data)


def breaker(change: str, dependency: str, at: datetime, **facts: Any) -> Event:
    """Return the event of a breaker that has `opened` or `closed`, or is `half_open`: probes run."""
    data = {"dependency": dependency, **facts}
    match change:
        case "opened":
            return Event("breaker.opened", dependency, at, data)
        case "half_open":
            return Event("breaker.half_open", dependency, at, data)
        case _:
            return Event("breaker.closed", dependency, at, data)


def group(state: str, fingerprint: str, at: datetime, facts: Mapping[str, Any]) -> Event:
    """Return the event of a group of errors that is new, came back or grows: its subject."""
    match state:
        case "new":
            return Event("group.new", fingerprint, at, facts)
        case "came_back":
            return Event("group.came_back", fingerprint, at, facts)
        case _:
            return Event("group.growing", fingerprint, at, facts)


def cancelled(job: Job, at: datetime) -> Event:
    """Return the event of a parked job that an operator has cancelled."""
    return _event("job.cancelled", job, at, attempt=job.attempt)


def _event(type_: str, job: Job, at: datetime, **data: Any) -> Event:
    return Event(type_, job.id, at, {"job_type": job.type, "queue": job.queue, **data})


#: The fields of a record. A line about a job has those that are known of it.
FIELDS = ("job_id", "job_type", "queue", "attempt", "decision", "error_type", "delay_ms")


def add_facts(record: logging.LogRecord) -> bool:
    """Give a record the facts of the job that its line begins with; the line itself has the job's id.

    A record never takes the job along: a handler may keep a record's arguments, and a job has its errors.
    """
    args = record.args
    if isinstance(args, tuple) and args and str(record.msg).startswith("job %s"):
        job, *rest = args
        facts = {"job_id": getattr(job, "id", job)}
        if isinstance(job, (Job, Parked)):
            facts.update(job_type=job.type, queue=job.queue, attempt=job.attempt)
        vars(record).update({name: value for name, value in facts.items() if value})
        record.args = (in_line(str(facts["job_id"])), *rest)
    return True


def in_line(text: str) -> str:
    """Return a text that cannot begin a new line in the log."""
    return text if text.isprintable() else repr(text)[1:-1]


logging.getLogger("ojs_bridge").addFilter(add_facts)


def log(job: Job, decision: Decision) -> None:
    """Write one line for a decision: WARNING for a retry, ERROR for an end, never a job's arguments."""
    match decision:
        case RetryAt():
            level, word = logging.WARNING, "retrying"
        case SnoozeUntil():
            level, word = logging.INFO, "held" if decision.hold else "snoozed"
        case GiveBack():
            level, word = logging.INFO, "given back"
        case Discarded():
            level, word = logging.ERROR, "discarded"
        case DeadLettered():
            level, word = logging.ERROR, "dead-lettered"
        case Complete():
            return
        case _:
            assert_never(decision)
    if logger.isEnabledFor(level):
        failure, delay = getattr(decision, "failure", None), getattr(decision, "delay", None)
        facts = {
            "decision": word,
            **({"error_type": failure.type} if failure else {}),
            **({} if delay is None else {"delay_ms": round(delay * 1000, 3)}),
        }
        said = in_line(job.type), word, in_line(decision.reason)
        logger.log(level, "job %s (%s) %s: %s", job, *said, extra=facts)


def log_failure(listener: Listener, event: Event) -> None:
    """Log the error that a listener has just raised."""
    logger.exception("listener %r failed on %s of job %s", listener, event.type, event.subject)


class Dispatcher:
    """Calls the listeners with each event, in order, on a thread of its own: a slow listener delays no job.

    At most MAX_WAITING events wait. Further events are dropped, and the log has their number, so that a
    listener that blocks costs neither memory nor jobs.
    """

    def __init__(self, listeners: Sequence[Listener]) -> None:
        #: Empty where nobody listens: then there is no event to make.
        self.listeners = tuple(listeners)
        self._listening = BetweenForks()
        self._pid = 0
        self._queue: queue.Queue[Event] = queue.Queue(MAX_WAITING)
        self._dropped = 0

    def emit(self, events: Sequence[Event]) -> None:
        """Queue events for the listeners; never blocks, never raises."""
        try:
            if self._pid != os.getpid():
                self.start()
        except RuntimeError as error:
            self._drop(len(events), f"the thread of the listeners cannot be started: {error}")
            return
        for event in events:
            try:
                self._queue.put_nowait(event)
            except queue.Full:
                self._drop(1, "listeners are too slow")

    def _drop(self, count: int, why: str) -> None:
        before, self._dropped = self._dropped, self._dropped + count
        if before == 0 or before // MAX_WAITING < self._dropped // MAX_WAITING:
            logger.error("%s: %d events dropped so far", why, self._dropped)

    def flush(self, seconds: float) -> bool:
        """Wait until the listeners have heard every event, so long at most; return whether they have."""
        if self._pid != os.getpid():
            return True
        deadline = time.monotonic() + seconds
        # The queue of a green worker is gevent's, and has no condition to wait for.
        while self._queue.unfinished_tasks:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_FLUSH_PAUSE)
        return True

    def start(self) -> None:
        """Start the thread of this process, if anybody listens; raises RuntimeError where none can start.

        A fork inherits neither the thread nor its parent's events.
        """
        with starting.lock:
            if self._pid == os.getpid() or not self.listeners:
                return
            self._queue = queue.Queue(MAX_WAITING)
            keep_going("ojs-events", partial(self._tell_next, self._queue))
            self._pid = os.getpid()

    def _tell_next(self, events: queue.Queue[Event]) -> bool:
        event = events.get()
        try:
            self.tell(event)
        finally:
            events.task_done()
        return True

    def tell(self, event: Event) -> None:
        """Call each listener with an event; never raises."""
        for listener in self.listeners:
            try:
                with self._listening.lock:
                    listener(event)
            except BaseException:  # noqa: BLE001 - it is logged
                # Not even a sys.exit() may end the thread: the other listeners need it.
                log_failure(listener, event)


#: The results of handlers that are worth a look: a handler may have meant them to be raised.
MAY_ANSWER = (BaseException, dict)
_ERROR = {"type", "message", "code", "details"}
_said: set[str] = set()


def hear(result: Any, place: str) -> None:
    """Raise a response that a handler has returned; say once for each place that it has returned an error.

    An error is an exception, or the specification's error object (section 7.3).
    """
    if issubclass(type(result), ANSWERS):
        raise result
    if isinstance(result, dict) and not ({"type", "message"} <= result.keys() <= _ERROR):
        return
    if place not in _said:
        _said.add(place)
        shown = safe_repr(result)[:200]
        logger.warning("%s returned %s: its job has succeeded. Raise what is an error.", place, shown)


def strikes(error: BaseException) -> bool:
    """Return whether an exception is aimed at the thread, and is no error such as a job's time limit."""
    return not isinstance(error, Exception) and is_aimed(error)


def log_error(error: BaseException, text: str, *values: object) -> None:
    """Log an error, an outage of the store in one line."""
    if isinstance(error, StoreError):
        logger.warning(f"{text}: %s", *values, error)
    else:
        logger.error(text, *values, exc_info=error)


def harmless(job: Job, step: Callable[..., object], *arguments: Any, **named: Any) -> None:
    """Take a step after a job's decision was carried out; its error goes to the log, and touches no job.

    A time limit of the job, which is over, goes to the log, too. Other interrupts pass.
    """
    try:
        step(*arguments, **named)
    except BaseException as error:
        if strikes(error):
            raise
        log_error(error, "job %s: an error after its decision was carried out; the job is not affected", job)
