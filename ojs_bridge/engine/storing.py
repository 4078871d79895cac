"""Jobs are kept in the store: as dead letters, as parked retries, and the errors that a message drops."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from typing_extensions import assert_never

from ..errors import InvalidState, NotExpressible, StoreError, Unstorable
from ..rules.decision import (
    Complete,
    DeadLettered,
    Decision,
    Discarded,
    GiveBack,
    RetryAt,
    SnoozeUntil,
    later,
)
from ..rules.job import ErrorEntry, Header, Job, decode, encode, is_cut
from ..rules.policy import RetryPolicy
from ..store import KEEP, Document, Letter, Parked, Settle
from .context import Context
from .events import cancelled, harmless
from .layers import with_ojs_jitter
from .reservations import Reservations, TakenOver
from .runs import Message, Onward, Postpone, Refuse, Run
from .storage_retry import at_once

logger = logging.getLogger("ojs_bridge")

T = TypeVar("T")

NO_STORE = "this bridge has no store"
#: Why a job waits that has not failed.
DELAYED, EARLY = "its user has delayed it", "came before its time"
TOGETHER = "was sent in a transaction"
#: For how many seconds no delayed job is written after the store has failed: each try may take a while, and
#: whoever sends jobs, or receives them, has other things to do.
AWAY_SECONDS = 30.0

#: Makes what the store keeps of a message, with the header with which it goes on.
Keeping: TypeAlias = Callable[[Header], Mapping[str, Any]]

#: What becomes of a job that a bulk operation has sent. It recovers if it succeeds after a failed attempt.
Fate: TypeAlias = Literal["began", "failed", "succeeded", "recovered", "died", "discarded"]


class Away:
    """What a process knows of a store that has failed, where a delayed job can wait elsewhere."""

    _until = 0.0

    @property
    def is_on(self) -> bool:
        """Whether the store has failed within the last half minute."""
        return time.monotonic() < self._until

    def try_once(self, write: Callable[[], object]) -> None:
        """Write to the store in one try, or in none if it is away; raises StoreError."""
        if self.is_on:
            raise StoreError("the store has failed a moment ago")
        try:
            with at_once():
                write()
        except StoreError as error:
            if not isinstance(error, Unstorable):
                self._until = time.monotonic() + AWAY_SECONDS
            raise


class Storing:
    """Keeps jobs in the store: dead letters, parked retries, and errors for which a message has no room."""

    def __init__(self, context: Context, reservations: Reservations, park_after: timedelta) -> None:
        self.store = context.store
        #: A retry that is due later than that waits in the store.
        self.park_after = park_after
        self._now = context.clock
        self._history, self._budget = context.history, context.budget
        self._retry = context.storage_retry
        self._reservations = reservations
        self.away = Away()

    def header(self, job: Job, *, ended: bool = False) -> Header:
        """Return a job's `ojs` header; the store keeps the errors for which the header has no room.

        For a job that has `ended` the store keeps none: its dead letter has all errors. Raises InvalidState
        if the state is too long for any message.
        """
        header = encode(job, history=self._history, budget=self._budget)
        if header.left_out and self.store and not ended:
            try:
                self.store.letters.keep_errors(job.letter_id, header.left_out)
            except StoreError:
                logger.exception(
                    "job %s: %d entries of its error history are not kept", job, len(header.left_out)
                )
        return header

    def last_header(self, ended: Job) -> Header | None:
        """Return the header of a job that has ended; None if its state is too long for any message."""
        try:
            return self.header(ended, ended=True)
        except InvalidState:
            logger.exception("job %s: its dead letter keeps the state that it came with", ended)
            return None

    def whole(self, job: Job) -> tuple[ErrorEntry, ...]:
        """Return every error: those of the message, and the rest from the store."""
        if self.store is None or not _is_kept_elsewhere(job):
            return job.errors
        carried = {job.errors_dropped + index: entry for index, entry in enumerate(job.errors)}
        whole = {place: entry for place, entry in carried.items() if not is_cut(entry)}
        kept = dict(self.store.letters.kept_errors(job.letter_id))
        length = job.errors_dropped + len(job.errors)
        if len(kept) + len(whole) < length and (earlier := self.store.letters.get(job.letter_id)):
            # This job has ended before; its delivery came again because it was not acknowledged in time. The
            # letter of another job under its id has none of its errors.
            times = {entry.get("timestamp") for entry in job.errors}
            if any(entry.get("timestamp") in times for entry in earlier.errors):
                kept = {**dict(enumerate(earlier.errors[:length])), **kept}
        history = {**carried, **kept, **whole}
        return tuple(history[place] for place in sorted(history))

    def forget(self, job: Job) -> None:
        """Delete the errors that the store keeps of a job that has ended; raises StoreError."""
        if self.store and _is_kept_elsewhere(job):
            self.store.letters.forget_errors(job.letter_id)

    def is_buried(
        self,
        run: Run | Refuse,
        job: Job,
        decision: DeadLettered,
        framework: str,
        message: Message | None,
        *,
        can_wait: bool = False,
    ) -> bool:
        """Write a dead letter to the store; False if the broker's dead queue is to keep it.

        No fence guards that queue. So a run with a reservation, whose message can wait, waits for the store:
        then this raises StoreError.
        """
        if self.store is None or message is None:
            return False
        try:
            self.bury(run, job, decision, framework, message.kept())
        except Exception as error:
            is_away = isinstance(error, StoreError) and not isinstance(error, Unstorable)
            if is_away and can_wait and isinstance(run, Run) and run.reservation is not None:
                raise
            logger.exception("job %s: kept in the broker's dead queue, not in the store", job)
            return False
        return True

    def bury(
        self, run: Run | Refuse, job: Job, decision: DeadLettered, framework: str, message: Mapping[str, Any]
    ) -> None:
        """Write a dead letter to the store with the job's whole history (DLQ-001, DLQ-002).

        `job` is the job as `after` returned it. Its letter replaces an earlier one of the job. Raises
        StoreError, and TakenOver.
        """
        if self.store is None:
            raise StoreError(NO_STORE)
        policy = run.policy if isinstance(run, Run) else RetryPolicy()
        errors = self.whole(job)
        letter = letter_of(job, decision, policy, framework, message, errors, at=self._now())
        earlier = self._retry.run(self.store.letters.get, letter.id)
        if earlier is None or earlier.is_left_by(job._replace(errors=errors), letter.discarded_at):
            self._write(run, self.store.letters.bury, letter)
            return
        # Another job had this id, and the store has forgotten its run.
        own = replace(letter, id=job._replace(errors=errors).own_letter_id)
        self._write(run, self.store.letters.bury, own)
        harmless(job, self.forget, job)

    def parks(self, at: datetime) -> bool:
        """Return whether a job that is due at a time waits in the store rather than in the broker."""
        return self.store is not None and at - self._now() > self.park_after

    def schedule(
        self,
        run: Run,
        at: datetime,
        framework: str,
        kept: Keeping,
        put: Callable[[Parked], object] | None = None,
    ) -> None:
        """Park a job that has not begun until a time.

        `put` writes it in a transaction. Raises StoreError, and InvalidState if its state is too long for any
        message.
        """
        at = later(at, 0)
        job = run.job.waiting(at)
        header = self.header(job)
        self.park(run, Onward(job, header, at, None), framework, kept(header), put)

    def delay(self, run: Run, at: datetime, framework: str, kept: Keeping) -> Header | None:
        """Park a job that is sent; if the store is away, return the header with which the broker takes it.

        Raises Unstorable, and InvalidState.
        """
        try:
            self.away.try_once(partial(self.schedule, run, at, framework, kept))
        except Unstorable:
            raise
        except StoreError as error:
            logger.warning("job %s waits in the broker, not in the store: %r", run.job, error)
            # The store may have it all the same: then one of the two is a copy of the other.
            return self.header(run.job.waiting(at))
        return None

    def takes_over(self, run: Run, at: datetime, framework: str, kept: Keeping) -> bool:
        """Park a job that a worker gets long before its time; False if that is soon, or the store is away.

        Raises StoreError, and InvalidState.
        """
        if not self.parks(at) or self.away.is_on:
            return False
        self.away.try_once(partial(self.schedule, run, at, framework, kept))
        return True

    def park(
        self,
        admission: Run | Refuse | Postpone,
        onward: Onward,
        framework: str,
        message: Mapping[str, Any],
        put: Callable[[Parked], object] | None = None,
    ) -> None:
        """Write a parked job to the store; raises StoreError, and TakenOver.

        A first attempt that has never begun waits because its user has delayed it.
        """
        if self.store is None:
            raise StoreError(NO_STORE)
        job = onward.job
        is_new = (
            onward.decision is None and job.fence == 0 and getattr(admission, "reservation", None) is None
        )
        is_held = isinstance(onward.decision, SnoozeUntil) and bool(onward.decision.hold)
        parked = Parked(
            id=job.id,
            key=job.key,
            fence=job.fence,
            type=job.type,
            queue=job.queue,
            framework=framework,
            attempt=job.attempt,
            max_attempts=admission.policy.max_attempts if isinstance(admission, Run) else job.attempt,
            next_retry_at=onward.at,
            parked_at=self._now(),
            reason=onward.decision.reason if onward.decision else DELAYED if is_new else EARLY,
            state=onward.header.state,
            message=message,
            kind="held" if is_held else "scheduled" if is_new else "retry",
        )
        if put is not None:
            put(replace(parked, reason=TOGETHER))
            return
        self._write(admission, self.store.parked.park, parked)

    def _write(
        self, admission: Run | Refuse | Postpone, write: Callable[[T, Settle | None], bool], record: T
    ) -> None:
        """Write to the store how a run ends, and settle its reservation in the same step."""
        if not isinstance(admission, Run) or admission.reservation is None:
            self._retry.run(write, record, None)
        elif not self._reservations.settle_with(admission, write, record):
            raise TakenOver(admission.job)


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
            fates: tuple[Fate, ...] = ("began",)
        case Complete():
            fates = ("succeeded",) if job.attempt == 1 else ("recovered",)
        case RetryAt():
            fates = ("failed",)
        case Discarded():
            fates = ("failed", "discarded")
        case DeadLettered():
            fates = ("failed", "died")
        case SnoozeUntil() | GiveBack():
            fates = ()
        case _:
            assert_never(decision)
    for fate in fates:
        yield Document(fate_kind(job.operation, fate), job.key, at, {"id": job.letter_id})


def fate_kind(operation: str, fate: Fate) -> str:
    """Return the kind of the records of a fate of an operation's jobs."""
    return f"{operation}.{fate}"


def _in_json(policy: RetryPolicy) -> dict[str, Any] | None:
    try:
        return with_ojs_jitter(policy).to_ojs()
    except NotExpressible:
        return None


def job_of_parked(parked: Parked) -> Job:
    """Return the job of a parked retry; if its state cannot be read, only what the record itself says."""
    bare = Job(parked.id, parked.type, parked.queue, parked.attempt, fence=parked.fence)
    try:
        return decode(dict(parked.state), bare)
    except InvalidState:
        return bare


def cancel(context: Context, parked: Parked) -> bool:
    """Delete a parked job, which never runs again; False when it is being published, or is gone.

    Raises StoreError.
    """
    now = context.clock()
    # The broker may have its message, too. Of a new job without a mark it may be another job's.
    is_known = parked.fence or parked.publication or parked.state.get("chain")
    last = later(max(now, parked.next_retry_at), KEEP.total_seconds())
    if not context.store_for("parked jobs").parked.cancel(parked, drop_until=last if is_known else None):
        return False
    context.emit(cancelled(job_of_parked(parked), now))
    return True


def _is_kept_elsewhere(job: Job) -> bool:
    """Return whether a job's message carries only a part of its history."""
    return job.errors_dropped > 0 or any(is_cut(entry) for entry in job.errors)
