"""Parked retries wait in the store, not in the broker: their form, and the store's methods for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ..messages import Reading, read_message, shown_errors
from ..rules.job import format_time
from .reservations import Settle


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked retry: a job that the scheduler publishes when it is due, with its retry state and message.

    `id` is the job's id, `key` the key of its reservations, `attempt` the number of the next attempt, and
    `state` the job's `ojs` header as an object.
    """

    id: str
    key: str
    fence: int
    type: str
    queue: str
    framework: str
    attempt: int
    max_attempts: int
    next_retry_at: datetime
    parked_at: datetime
    reason: str
    state: Mapping[str, Any]
    message: Mapping[str, Any]

    @property
    def attempts(self) -> int:
        """The number of attempts that have begun (spec section 10)."""
        return self.attempt - 1

    @property
    def reading(self) -> Reading:
        """The message's arguments, read without running any code of it."""
        return read_message(self.message)

    def to_ojs(self) -> dict[str, Any]:
        """Return the retry in the shape of a dead letter's detail; its state is `retryable`."""
        return {
            "id": self.id,
            "type": self.type,
            "queue": self.queue,
            **self.reading.to_ojs(),
            "state": "retryable",
            "attempt": self.attempts,
            "max_attempts": self.max_attempts,
            "errors": shown_errors(self.state.get("errors", ())),
            "next_retry_at": format_time(self.next_retry_at),
            "metadata": {
                "framework": self.framework,
                "reason": self.reason,
                "parked_at": format_time(self.parked_at),
            },
        }


@dataclass(frozen=True, slots=True)
class ParkedFilter:
    """A choice of parked retries by queue, which is matched whole, and by job type, which is a pattern."""

    queue: str | None = None
    type: str | None = None


ALL_PARKED = ParkedFilter()


@dataclass(frozen=True, slots=True)
class ParkedPage:
    """Parked retries, the next one due first, and the cursor of the next page; None on the last page."""

    retries: tuple[Parked, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Due:
    """Claimed retries. Until the claim ends, no other caller gets them."""

    claim: str
    retries: tuple[Parked, ...]


class Parking(Protocol):
    """The store's methods for parked retries, one retry per key. All raise StoreError."""

    def park(self, parked: Parked, settle: Settle | None = None) -> bool:
        """Write a parked retry and settle the job's reservation, in one step.

        The retry replaces an earlier one of the same key, claimed or not, unless that has a higher fence.
        False when the reservation cannot be settled (see `settle`): then nothing is written.
        """

    def claim_due(self, framework: str, *, now: datetime, until: datetime, limit: int) -> Due:
        """Claim a framework's due retries, the longest due first, atomically.

        No other caller gets them before `until`.
        """

    def claim_parked(self, keys: Sequence[str], *, now: datetime, until: datetime) -> Due:
        """Claim the retries of these keys that nobody has claimed, due or not, atomically.

        No other caller gets them before `until`.
        """

    def unpark(self, retries: Sequence[Parked], claim: str) -> int:
        """Delete published retries that this claim still holds; return how many."""

    def unclaim_parked(self, retries: Sequence[Parked], claim: str) -> None:
        """End the claim of retries that could not be published: they are due as before."""

    def list_parked(self, where: ParkedFilter, *, limit: int, cursor: str | None) -> ParkedPage:
        """Return a page, the next one due first; raises ValueError for a cursor that no page gave out."""

    def get_parked(self, job_id: str) -> Parked | None:
        """Return a job's parked retry, or None; any of them where several chains have one id."""

    def parked_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids of jobs with parked retries that begin with a text, as many as `limit` at most."""

    def reschedule(self, parked: Parked, at: datetime) -> bool:
        """Make a retry due at another time; False when it is claimed, was replaced or is gone."""

    def cancel_parked(self, parked: Parked) -> bool:
        """Delete a retry; False when it is claimed, was replaced or is gone."""

    def count_parked(self, where: ParkedFilter = ALL_PARKED) -> int:
        """Count the parked retries that match a filter."""
