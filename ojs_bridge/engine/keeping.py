"""The records of a job in the store: the dead letter, and the parked retry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..errors import InvalidState, NotExpressible
from ..spec.decision import DeadLetter
from ..spec.job import ErrorEntry, Job, decode
from ..spec.policy import RetryPolicy
from ..store import Letter, Parked
from .ports import Onward
from .runs import told_in_ojs


def letter_of(
    job: Job,
    decision: DeadLetter,
    policy: RetryPolicy,
    framework: str,
    message: Mapping[str, Any],
    errors: tuple[ErrorEntry, ...],
    *,
    at: datetime,
) -> Letter:
    """Return the letter of a job that died at a time, with all its errors and its message (DLQ-002)."""
    letter = Letter(
        id=job.id,
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
