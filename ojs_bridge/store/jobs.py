"""Jobs under way: reservations, so that no attempt runs twice or is lost, and parked jobs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

from ..messages import Reading, read_message, shown_errors
from ..rules.job import Job, format_time
from .filter import EVERYTHING, Filter, Kind

WaitingState: TypeAlias = Literal["retryable", "scheduled", "pending"]
#: The specification's word for the state of a parked job.
STATES: Mapping[Kind, WaitingState] = {"retry": "retryable", "scheduled": "scheduled", "held": "pending"}
#: How long a settled reservation is remembered, so that a late copy of its message is dropped.
KEEP = timedelta(days=1)
#: How long a store remembers a reservation that nobody settles or extends, after it has expired.
OUTLIVE_MS = timedelta(weeks=1) // timedelta(milliseconds=1)
#: The most jobs that are looked at to tell what falls due.
LOOKED = 50_000
#: How long a store remembers a suspicion against a family of processes.
SUSPECTED = timedelta(days=1)


class Grant(enum.Enum):
    """The store's answer to a worker that wants to run a job."""

    TAKEN = enum.auto()
    """The reservation is the worker's."""
    HELD = enum.auto()
    """Another worker holds the reservation, and it has not expired."""
    LOST = enum.auto()
    """The reservation of another worker has expired: judge the run as a lost attempt, do not run it."""
    SETTLED = enum.auto()
    """This run, or a later one, is settled: drop the message."""
    RESENT = enum.auto()
    """The key belongs to another publication: a user has sent the job a second time."""


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """The store's whole answer to `reserve`.

    With HELD, the reservation of `holder` expires at `until`; with LOST, it expired then. `mark` is the mark
    of that holder's request. The answer to a repeated request may have neither holder nor time.
    """

    grant: Grant
    until: datetime | None = None
    holder: str = ""
    mark: str = ""


class Reservation(NamedTuple):
    """One run of a job: the job's key, and its fence, which grows with every message that is sent on."""

    key: str
    fence: int


class Settle(NamedTuple):
    """An order to settle a reservation; the store remembers it until `keep_until`.

    `holder` None settles a reservation whose holder is dead. With a `mark`, the order is for a reservation
    that the request with this mark has made. With a `job`, that job has ended without a letter: its parked
    retry goes in the same step, and the letters that it has left: see `Letter.is_left_by`, for an end at
    `keep_until` less KEEP.
    """

    reservation: Reservation
    holder: str | None
    keep_until: datetime
    mark: str = ""
    job: Job | None = None


class ReservedRuns(Protocol):
    """The reservations of runs. All methods raise StoreError.

    There is one record per key. It has a fence, a publication, a holder and a time `until`, and may be
    settled. Every method is one round trip.
    """

    def reserve(
        self,
        reservation: Reservation,
        *,
        publication: str,
        holder: str,
        mark: str,
        now: datetime,
        until: datetime,
    ) -> ReserveAnswer:
        """Reserve a run until a time, atomically; repeated with its `mark`, `holder` gets the same answer.

        The first of these that is true is the answer:

        - Both publications are known and differ: write nothing: RESENT.
        - No record, or one of a lower fence: write ours, with the publication of the earlier record: TAKEN.
        - A record of a higher fence, or a settled one: SETTLED.
        - A record whose `until` is after `now`, even of this holder: HELD.
        - Any other record: replace its `holder` and `until`: LOST.

        An unsettled record outlives its `until` by at least a week.
        """

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the unsettled reservations of `holder`; return those that `holder` has lost."""

    def under_way(self, reservations: Sequence[Reservation], *, now: datetime) -> Mapping[Reservation, str]:
        """Return those that are neither settled nor expired, with their holders."""

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as settled; False when the record has another fence or holder, and stays.

        Without a record, write one, so that a late copy of the message is dropped. False, too, for an order
        without a holder when the holder itself has settled the reservation: then it is not dead.
        """

    def settle_all(self, settles: Sequence[Settle]) -> Sequence[Reservation]:
        """Settle the reservations of holders that live, one a key; return those that could not be settled."""

    def release(self, settle: Settle) -> bool:
        """Release a reservation unused; the record then says that the fence before this one is settled.

        For a fence of 0 the record is deleted. False when it has another fence, holder or mark, or is
        settled; and for an order with a mark whose request was answered with LOST.
        """

    def expire(self, reservations: Sequence[Reservation]) -> None:
        """Delete the records of settled reservations that have the same fence: no copy can come again.

        A record that was ever lost to another worker stays: the run that lost it may still end.
        """

    def expire_before(self, now: datetime, *, limit: int) -> int:
        """Look at `limit` records at most, and delete those whose time is over; return how many.

        Settled ones are over after their `keep_until`. Called again, it looks at others, and so at all of
        them in turn.
        """

    def suspect(self, family: str, *, gone: bool) -> timedelta | None:
        """Return for how long a family of processes has been suspected to be dead; None if it is not.

        With `gone`, the broker has lost its connection to them: the suspicion begins now, unless it has
        begun. The time is the store's own. A day after its begin a suspicion may be forgotten.
        """

    def clear(self, family: str) -> None:
        """End the suspicion against a family: one of its processes lives."""


@dataclass(frozen=True, slots=True)
class Parked:
    """A parked job: the scheduler publishes it when it is due, with its retry state and message.

    `kind` says why it waits: a retry for its next attempt, a scheduled job because its user has delayed it, a
    held job because a hold keeps its attempt from its begin.
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
    kind: Kind = "retry"

    @property
    def error_type(self) -> str:
        """The error type of the most recent failure."""
        return str(self.errors[-1].get("type") or "Unknown") if self.errors else "Unknown"

    @property
    def waits_as(self) -> WaitingState:
        """Its state in the specification's word; one of a kind that another version knows is `pending`."""
        return STATES.get(self.kind, "pending")

    @property
    def publication(self) -> str:
        """The mark of the message with which its user has sent it; "" for a retry."""
        return str(self.state.get("publication") or "")

    @property
    def errors(self) -> Sequence[Mapping[str, Any]]:
        """The errors of its history, as its message has them."""
        return self.state.get("errors") or ()

    @property
    def reading(self) -> Reading:
        """The message's arguments, read without running any code of it."""
        return read_message(self.message)

    def to_ojs(self) -> dict[str, Any]:
        """Return the job in the shape of a dead letter's detail; its state is one of STATES.

        Its `attempt` is the next one, as in its header. A scheduled job is due at `scheduled_at`.
        """
        due = "scheduled_at" if self.kind == "scheduled" else "next_retry_at"
        return {
            "id": self.id,
            "type": self.type,
            "queue": self.queue,
            **self.reading.to_ojs(),
            "state": self.waits_as,
            "attempt": self.attempt,
            "max_attempts": self.max_attempts,
            "errors": shown_errors(self.errors),
            due: format_time(self.next_retry_at),
            "metadata": {
                "framework": self.framework,
                "reason": self.reason,
                "created_at": self.state.get("created_at"),
                "parked_at": format_time(self.parked_at),
            },
        }


@dataclass(frozen=True, slots=True)
class ParkedPage:
    """Parked jobs, the next one due first, and the cursor of the next page; None on the last page."""

    jobs: tuple[Parked, ...]
    next_cursor: str | None


@dataclass(frozen=True, slots=True)
class Due:
    """Claimed jobs. Until the claim ends, no other caller gets them."""

    claim: str
    retries: tuple[Parked, ...]


class DueCounts(NamedTuple):
    """How many jobs of each kind are due before a time, and in each step from there on.

    Only the first steps are known if the store would have to look at too many jobs. A kind without any is
    left out.
    """

    known: int
    by_kind: Mapping[str, Sequence[int]]


class Transaction(Protocol):
    """A user's open transaction on the database of a store."""

    def park(self, parked: Parked) -> None:
        """Write a job, which waits in the store once the transaction has committed.

        Raises StoreError if the database does not take it, or has a job of its key.
        """

    def then(self, do: Callable[[], object]) -> bool:
        """Let something be done as soon as it has committed; False if its connection cannot tell."""


class ParkedJobs(Protocol):
    """Parked retries, one per key. All methods raise StoreError."""

    def park(self, parked: Parked, settle: Settle | None = None) -> bool:
        """Write a parked job and settle the job's reservation, in one step.

        The retry replaces an earlier one of the same key, claimed or not, unless that has a higher fence.
        False when the reservation cannot be settled (see `settle`): then nothing is written.
        """

    def claim_due(self, framework: str, *, now: datetime, until: datetime, limit: int) -> Due:
        """Claim a framework's due retries, the longest due first, atomically.

        No other caller gets them before `until`.
        """

    def claim(self, keys: Sequence[str], *, now: datetime, until: datetime) -> Due:
        """Claim the retries of these keys that nobody has claimed, due or not, atomically.

        No other caller gets them before `until`.
        """

    def unpark(self, retries: Sequence[Parked], claim: str) -> int:
        """Delete published retries that this claim still holds; return how many."""

    def unclaim(self, retries: Sequence[Parked], claim: str) -> None:
        """End the claim of retries that could not be published: they are due as before."""

    def list(self, where: Filter, *, limit: int, cursor: str | None) -> ParkedPage:
        """Return a page of what has the queue, the type and the kind of a filter, the next one due first.

        Raises ValueError for a cursor that no page gave out.
        """

    def get(self, job_id: str, kind: Kind | None = None) -> Parked | None:
        """Return a parked job, or None; any of them, or of a kind, where several chains have one id."""

    def ids_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids of parked jobs that begin with a text, as many as `limit` at most."""

    def reschedule(self, parked: Parked, at: datetime) -> bool:
        """Make a retry due at another time; False when it is claimed, was replaced or is gone."""

    def cancel(self, parked: Parked, *, drop_until: datetime | None = None) -> bool:
        """Delete a retry; False when it is claimed, was replaced or is gone.

        Its message may have been published, too, if its worker did not hear that it was parked. So with
        `drop_until` its reservation is settled in the same step, and remembered until then. If a run of it
        has begun, this returns False. A reservation of another publication under its key stays.
        """

    def count(self, where: Filter = EVERYTHING) -> int:
        """Count the parked jobs that match the queue, the type and the kind of a filter."""

    def due(self, where: Filter, since: datetime, step: timedelta, steps: int) -> DueCounts:
        """Count what is due before `since`, and in each of so many steps from there on.

        It is what has the queue, the type and the kind of a filter. SQL looks at the first LOOKED jobs, of
        any filter; the step of the last one is not known then. Redis counts any number, but not more than
        LOOKED of very many types.
        """
