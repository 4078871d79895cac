"""The events of the Open Job Spec, the listeners that hear of them, and the lines of the log."""

from __future__ import annotations

import logging
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, TypeAlias

from typing_extensions import assert_never

from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import Failure
from ..rules.job import Job, format_time
from .forks import BetweenForks, starting
from .logs import in_line

logger = logging.getLogger("ojs_bridge")

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
    return _event(
        "job.started", job, at, attempt=job.attempt, worker_id=f"{socket.gethostname()}:{os.getpid()}"
    )


def of(job: Job, decision: Decision, *, max_attempts: int, seconds: float, at: datetime) -> list[Event]:
    """Return the events of a decision that was carried out, in order; the run took `seconds`."""
    duration = {"attempt": job.attempt, "duration_ms": round(seconds * 1000, 3)}
    match decision:
        case Complete():
            return [_event("job.completed", job, at, **duration)]
        case SnoozeUntil():
            due = format_time(decision.at)
            told = {
                "next_retry_at": due,
                "delay_ms": round(decision.delay * 1000, 3),
                "reason": decision.reason,
            }
            return [_event("job.snoozed", job, at, **duration, **told)]
        case GiveBack():
            return [_event("job.released", job, at, **duration, reason=decision.reason)]
        case RetryAt():
            failed = _failed(job, decision.failure, at, duration, retryable=True)
            due = format_time(decision.at)
            told = {
                "max_attempts": max_attempts,
                "next_retry_at": due,
                "delay_ms": round(decision.delay * 1000, 3),
                "error": _error(decision.failure),
                "reason": decision.reason,
            }
            return [failed, _event("job.retrying", job, at, **duration, **told)]
        case Discarded() | DeadLettered():
            retryable = decision.cause == "exhausted"
            failed = _failed(job, decision.failure, at, duration, retryable=retryable)
            return [failed, *_ended(job, decision, at, duration)]
        case _:
            assert_never(decision)


def _error(failure: Failure) -> dict[str, str]:
    return {"code": failure.type, "type": failure.type, "message": failure.message}


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
    return [discarded, dead_letter("added", job, at)] if dead else [discarded]


def dead_letter(what: str, job: Job, at: datetime, **data: Any) -> Event:
    """Return a `dead_letter.*` event: added, retried or deleted."""
    return _event(f"dead_letter.{what}", job, at, **data)


def pruned(count: int, at: datetime, *, policy: str) -> Event:
    """Return the event of many dead letters that were deleted (spec section dlq 8).

    `policy` is retention's `delete` or `archive`, or an operator's `purge`.
    """
    return Event("dead_letter.pruned", "", at, {"count": count, "pruning_policy": policy})


def cancelled(job: Job, at: datetime) -> Event:
    """Return the event of a parked retry that an operator has cancelled."""
    return _event("job.cancelled", job, at, attempt=job.attempt)


def _event(type_: str, job: Job, at: datetime, **data: Any) -> Event:
    return Event(type_, job.id, at, {"job_type": job.type, "queue": job.queue, **data})


def log(job: Job, decision: Decision) -> None:
    """Write one line for a decision: WARNING for a retry, ERROR for an end, never a job's arguments."""
    match decision:
        case RetryAt():
            level, word = logging.WARNING, "retrying"
        case SnoozeUntil():
            level, word = logging.INFO, "snoozed"
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

    At most `limit` events wait. Further events are dropped, and the log has their number, so that a listener
    that blocks costs neither memory nor jobs.
    """

    def __init__(self, listeners: Sequence[Listener], *, limit: int = 10_000) -> None:
        #: Empty where nobody listens: then there is no event to make.
        self.listeners = tuple(listeners)
        self._limit = limit
        self._listening = BetweenForks()
        self._pid = 0
        self._queue: queue.Queue[Event] = queue.Queue(limit)
        self._dropped = 0

    def emit(self, events: Sequence[Event]) -> None:
        """Queue events for the listeners; never blocks, never raises."""
        try:
            if self._pid != os.getpid():
                self._start()
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
        if before == 0 or before // self._limit < self._dropped // self._limit:
            with suppress(Exception):
                logger.error("%s: %d events dropped so far", why, self._dropped)

    def flush(self, seconds: float) -> bool:
        """Wait until the listeners have heard every event, so long at most; return whether they have."""
        if self._pid != os.getpid():
            return True
        deadline = time.monotonic() + seconds
        with self._queue.all_tasks_done:
            while self._queue.unfinished_tasks:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._queue.all_tasks_done.wait(left)
        return True

    def _start(self) -> None:
        """Start the thread of this process: a fork inherits neither the thread nor its parent's events."""
        with starting.lock:
            if self._pid == os.getpid():
                return
            self._queue = queue.Queue(self._limit)
            threading.Thread(target=self._run, args=(self._queue,), name="ojs-events", daemon=True).start()
            self._pid = os.getpid()

    def _run(self, events: queue.Queue[Event]) -> None:
        while True:
            self.tell(events.get())
            events.task_done()

    def tell(self, event: Event) -> None:
        """Call each listener with an event; never raises."""
        for listener in self.listeners:
            try:
                with self._listening.lock:
                    listener(event)
            except BaseException:  # noqa: BLE001 - it is logged
                # Not even a sys.exit() may end the thread: the other listeners need it.
                with suppress(Exception):
                    log_failure(listener, event)
