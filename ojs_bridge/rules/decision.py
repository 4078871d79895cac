"""The heart: the decision about a job after a run (spec sections 6.3, 7.2 and 2.2)."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Literal, TypeAlias

from .backoff import Rng, Seeded
from .failures import VISIBILITY_TIMEOUT, Failure, Interrupted, Outcome, Snoozed, cut, safe_repr
from .hints import Heard
from .job import Job
from .policy import RetryPolicy, attempts_in_words

#: The reason why a job ended, as in the event `job.discarded`.
Cause: TypeAlias = Literal["handler", "non_retryable", "exhausted", "expired", "invalid"]

#: The reserved error type of a job whose message its framework would drop unrun.
EXPIRED = "expired"
#: By how much of its time at most a job comes later than a header asked, where its policy has jitter.
SPREAD = 0.1


@dataclass(frozen=True, slots=True)
class Complete:
    """The handler succeeded."""

    reason: str = "succeeded"


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Run the next attempt, not before `at`; `delay` is in seconds."""

    at: datetime
    delay: float
    failure: Failure
    reason: str


@dataclass(frozen=True, slots=True)
class Discarded:
    """Drop the job; keep no dead letter."""

    cause: Cause
    failure: Failure
    reason: str


@dataclass(frozen=True, slots=True)
class DeadLettered:
    """Keep the job as a dead letter."""

    cause: Cause
    failure: Failure
    reason: str


@dataclass(frozen=True, slots=True)
class SnoozeUntil:
    """Run the same attempt again, not before `at`; `delay` is in seconds.

    The handler has asked for it, or a `hold`, which has this id, has kept the attempt from its begin. Then
    `at` may be the job's turn.
    """

    at: datetime
    delay: float
    reason: str
    hold: str = ""
    is_turn: bool = False


@dataclass(frozen=True, slots=True)
class GiveBack:
    """Give the delivery back to its queue as it is; its attempt is not used."""

    reason: str = "the worker shut down; the attempt is given back"


Decision: TypeAlias = Complete | RetryAt | Discarded | DeadLettered | SnoozeUntil | GiveBack


def decide(
    policy: RetryPolicy, job: Job, outcome: Outcome, *, now: datetime, rng: Rng, capped: bool = True
) -> Decision:
    """Return what becomes of the job; total and pure.

    In this order: the handler's response code, what the task does not ask to retry (`final`), a non-retryable
    match, attempts left, the delay, the job's expiry (spec section 7.2). A hint replaces the computed delay;
    `max_interval` caps both, but a handler's own hint only where hints are `capped`.
    """
    if outcome is None:
        return Complete()
    if isinstance(outcome, Interrupted):
        return GiveBack()
    if isinstance(outcome, Snoozed):
        return _snooze(policy, job, outcome, now, rng)
    runs = policy.runs
    attempts = attempts_in_words(job.attempt, runs)
    number = attempts if job.attempt <= runs else f"{job.attempt} (the policy allows {runs})"
    failed = f"attempt {number} failed with {outcome.type}"
    match outcome.code:
        case "DISCARD" | "FAIL":
            return Discarded("handler", outcome, f"{failed}, and the handler said {outcome.code}")
        case "DEAD_LETTER":
            return DeadLettered("handler", outcome, f"{failed}, and the handler said DEAD_LETTER")
    if outcome.final:
        return _exhaust(policy, "non_retryable", outcome, f"{failed}, {outcome.final}")
    # A stall says nothing of the job itself: patterns do not apply (spec section 9.2).
    if outcome.type != VISIBILITY_TIMEOUT and (pattern := policy.non_retryable_pattern(outcome)):
        return _exhaust(policy, "non_retryable", outcome, f"{failed}, which matches {pattern}")
    if job.attempt >= runs:
        return _exhaust(policy, "exhausted", outcome, f"{failed}, and no attempt is left")
    seconds, note = _delay(policy, job, outcome, now, rng, capped=capped)
    at = later(now, seconds)
    if job.expires and at >= job.expires:
        return _exhaust(
            policy, "expired", outcome, f"{failed}, and the job expires before a retry in {seconds:.3f} s"
        )
    return RetryAt(at, seconds, outcome, f"{failed}; retry {job.attempt} in {seconds:.3f} s{note}")


def _snooze(
    policy: RetryPolicy, job: Job, snoozed: Snoozed, now: datetime, rng: Rng
) -> SnoozeUntil | Discarded | DeadLettered:
    if isinstance(snoozed.after, timedelta):
        seconds = snoozed.after.total_seconds()
    else:
        waits = Failure("", retry_after=snoozed.after)
        seconds, _ = _delay(policy, job._replace(attempt=1), waits, now, rng, capped=True)
    at = later(now, seconds)
    asked = snoozed.message or f"the handler asked for a pause of {seconds:.3f} s"
    if not isinstance(snoozed.after, timedelta):
        asked = f"{asked}; the job pauses for {seconds:.3f} s"
    if job.expires and at >= job.expires:
        failure = Failure(EXPIRED, f"{asked}, and the job expires before it ends")
        attempts = attempts_in_words(job.attempt, policy.runs)
        return _exhaust(policy, "expired", failure, f"attempt {attempts}: {failure.message}")
    return SnoozeUntil(at, seconds, asked)


def _exhaust(policy: RetryPolicy, cause: Cause, failure: Failure, reason: str) -> Discarded | DeadLettered:
    if policy.on_exhaustion == "dead_letter":
        return DeadLettered(cause, failure, reason)
    return Discarded(cause, failure, reason)


def _delay(
    policy: RetryPolicy, job: Job, failure: Failure, now: datetime, rng: Rng, *, capped: bool
) -> tuple[float, str]:
    hint, longest = failure.retry_after, policy.max_interval.total_seconds()
    if isinstance(policy.jitter, Seeded):
        rng = policy.jitter.rng(job.id, job.attempt)
    if hint is not None and not isinstance(hint, Heard):
        return (min(hint, policy.max_interval) if capped else hint).total_seconds(), ", as the handler asked"
    try:
        asked = policy.backoff(job.attempt, failure)
        seconds = policy.jittered(job.attempt, asked, rng=rng)
        is_cut = asked > longest and not isinstance(policy.backoff_strategy, str)
        why = f": max_interval cuts the {asked:.3f} s of its strategy" if is_cut else ""
    except BaseException as error:  # noqa: BLE001 - a custom strategy is the user's code, and may not lose the job
        seconds = longest
        why = f", max_interval, because the custom backoff failed: {cut(safe_repr(error), 200)}"
    if isinstance(hint, Heard):
        # An answer names the earliest time, and many jobs may have heard of it.
        spread = 1 + SPREAD * rng.random() if policy.jitter else 1
        if (heard := min(hint.seconds(now) * spread, longest)) > seconds:
            return heard, f", as {hint.by} asked"
    return seconds, why


def until_turn(job: Job, now: datetime, turn: datetime, hold: str, why: str) -> SnoozeUntil:
    """Return that a job is held until its turn, or until its expiry, at which its framework drops it."""
    at = later(min(turn, job.expires) if job.expires else turn, 0)
    return SnoozeUntil(at, max((at - now).total_seconds(), 0.0), f"held by {why}", hold, is_turn=True)


def later(now: datetime, seconds: float) -> datetime:
    """Return a later time, rounded up to the millisecond that the wire form carries: nothing is due early."""
    try:
        at = now + timedelta(0, seconds)
        return at + timedelta(microseconds=-at.microsecond % 1000)
    except OverflowError:
        return datetime.max.replace(microsecond=0, tzinfo=timezone.utc)
