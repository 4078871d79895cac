"""Jobs are kept in the store: as dead letters, and as parked retries."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias, TypeVar

from typing_extensions import assert_never

from ..errors import InvalidState, NotExpressible, StoreError
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.job import ErrorEntry, Header, Job, decode
from ..rules.policy import RetryPolicy
from ..store import Document, Letter, Parked, Settle, Store
from .context import Context
from .harmless import Harmless
from .layers import told_in_ojs
from .ports import Message, Onward
from .reservations import Reservations, TakenOver
from .runs import Postpone, Refuse, Run

logger = logging.getLogger("ojs_bridge")

T = TypeVar("T")

#: What becomes of a job that a bulk operation has sent. It recovers if it succeeds after a failed attempt.
Fate: TypeAlias = Literal["began", "failed", "succeeded", "recovered", "died", "discarded"]


class Keeping:
    """Keeps jobs in the store: dead letters, parked retries, and errors for which a message has no room."""

    def __init__(self, context: Context, reservations: Reservations, park_after: timedelta) -> None:
        self.store = context.store
        #: A retry that is due later than that waits in the store.
        self.park_after = park_after
        self._now = context.clock
        self._history = context.history
        self._retry = context.storage_retry
        self._reservations = reservations

    def header(self, job: Job) -> Header:
        """Return a job's `ojs` header; the store keeps the errors for which the header has no room.

        Raises InvalidState if the state is too long for any message.
        """
        return self._history.header(job)

    def last_header(self, ended: Job) -> Header | None:
        """Return the header of a job that has ended; None if its state is too long for any message."""
        try:
            return self._history.header(ended, ended=True)
        except InvalidState:
            logger.exception("job %s: its dead letter keeps the state that it came with", ended)
            return None

    def is_buried(
        self,
        begun: Run | Refuse,
        job: Job,
        decision: DeadLettered,
        framework: str,
        message: Message | None,
    ) -> bool:
        """Write a dead letter to the store; False if the broker's dead queue is to keep it."""
        if self.store is None or message is None:
            return False
        try:
            self.bury(begun, job, decision, framework, message.kept())
        except Exception:
            logger.exception("job %s: kept in the broker's dead queue, not in the store", job)
            return False
        return True

    def bury(
        self,
        begun: Run | Refuse,
        job: Job,
        decision: DeadLettered,
        framework: str,
        message: Mapping[str, Any],
    ) -> None:
        """Write a dead letter to the store with the job's whole history (DLQ-001, DLQ-002).

        `job` is the job as `after` returned it. Its letter replaces an earlier one of the job. Raises
        StoreError, and TakenOver.
        """
        store, policy = self._needed(), begun.policy if isinstance(begun, Run) else RetryPolicy()
        errors = self._history.whole(job)
        letter = letter_of(job, decision, policy, framework, message, errors, at=self._now())
        earlier = self._retry.run(store.get, letter.id)
        if earlier is None or earlier.failed_first_at == letter.failed_first_at:
            self._write(begun, store.bury, letter)
            return
        # Another job had this id, and the store has forgotten its run.
        own = replace(letter, id=f"{letter.id}~{uuid.uuid4().hex}")
        self._write(begun, store.bury, own)
        with Harmless(job):
            self._history.forget(job)

    def parks(self, at: datetime) -> bool:
        """Return whether a job that is due at a time waits in the store rather than in the broker."""
        return self.store is not None and at - self._now() > self.park_after

    def park(
        self,
        begun: Run | Refuse | Postpone,
        onward: Onward,
        framework: str,
        message: Mapping[str, Any],
    ) -> None:
        """Write a parked retry to the store; raises StoreError, and TakenOver."""
        store, job = self._needed(), onward.job
        limit = begun.policy.max_attempts if isinstance(begun, Run) else job.attempt
        parked = parked_of(onward, framework, message, max_attempts=limit, parked_at=self._now())
        self._write(begun, store.park, parked)

    def _write(
        self, begun: Run | Refuse | Postpone, write: Callable[[T, Settle | None], bool], record: T
    ) -> None:
        """Write to the store how a run ends, and settle its reservation in the same step."""
        if not isinstance(begun, Run) or begun.reservation is None:
            self._retry.run(write, record, None)
        elif not self._reservations.settle_with(begun, write, record):
            raise TakenOver(begun.job)

    def _needed(self) -> Store:
        if self.store is None:
            raise StoreError("this bridge has no store")
        return self.store


def letter_of(
    job: Job,
    decision: DeadLettered,
    policy: RetryPolicy,
    framework: str,
    message: Mapping[str, Any],
    errors: tuple[ErrorEntry, ...],
    *,
    at: datetime,
) -> Letter:
    """Return the letter of a job that died at a time, with all its errors and its message (DLQ-002)."""
    letter = Letter(
        id=job.letter_id,
        type=job.type,
        queue=job.queue,
        framework=framework,
        attempt=job.attempt,
        max_attempts=policy.max_attempts,
        cause=decision.cause,
        reason=decision.reason,
        discarded_at=at,
        message=message,
        errors=errors,
        retry=job.retry,
        created_at=job.created_at,
        replay_count=job.replay_count,
        key=job.key,
        fence=job.fence,
        policy=_in_json(policy),
    )
    return replace(letter, fault=letter.group)


def fates_of(job: Job, decision: Decision | None, at: datetime) -> Iterator[Document]:
    """Yield what became of a job that a bulk operation has sent, for a run that begins (None) or ends.

    Each is kept once for a job, however often it comes: the first one stays.
    """
    match decision:
        case None:
            found: tuple[Fate, ...] = ("began",)
        case Complete():
            found = ("succeeded",) if job.attempt == 1 else ("recovered",)
        case RetryAt():
            found = ("failed",)
        case Discarded():
            found = ("failed", "discarded")
        case DeadLettered():
            found = ("failed", "died")
        case SnoozeUntil() | GiveBack():
            found = ()
        case _:
            assert_never(decision)
    for fate in found:
        yield Document(fate_kind(job.operation, fate), job.key, at, {"id": job.letter_id})


def fate_kind(operation: str, fate: Fate) -> str:
    """Return the kind of the records of a fate of an operation's jobs."""
    return f"{operation}.{fate}"


def _in_json(policy: RetryPolicy) -> dict[str, Any] | None:
    try:
        return told_in_ojs(policy).to_ojs()
    except NotExpressible:
        return None


def parked_of(
    onward: Onward, framework: str, message: Mapping[str, Any], *, max_attempts: int, parked_at: datetime
) -> Parked:
    """Return a job's retry as the store keeps it until a time."""
    job = onward.job
    return Parked(
        id=job.id,
        key=job.key,
        fence=job.fence,
        type=job.type,
        queue=job.queue,
        framework=framework,
        attempt=job.attempt,
        max_attempts=max_attempts,
        next_retry_at=onward.at,
        parked_at=parked_at,
        reason=onward.reason,
        state=onward.header.state,
        message=message,
    )


def job_of_parked(parked: Parked) -> Job:
    """Return the job of a parked retry; if its state cannot be read, only what the record itself says."""
    bare = Job(parked.id, parked.type, parked.queue, parked.attempt, fence=parked.fence)
    try:
        return decode(dict(parked.state), bare)
    except InvalidState:
        return bare
