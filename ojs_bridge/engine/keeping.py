"""The records of a job in the store: the dead letter, and the parked retry."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal, TypeAlias

from typing_extensions import assert_never

from ..errors import InvalidState, NotExpressible
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.job import ErrorEntry, Job, decode
from ..rules.policy import RetryPolicy
from ..store import Document, Letter, Parked
from .layers import told_in_ojs
from .ports import Onward

#: What becomes of a job that a bulk operation has sent. It recovers if it succeeds after a failed attempt.
Fate: TypeAlias = Literal["began", "failed", "succeeded", "recovered", "died", "discarded"]


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
