"""Reservations, so that no attempt runs twice or is lost: the store's methods, and their answers."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol


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
    that the request with this mark has made.
    """

    reservation: Reservation
    holder: str | None
    keep_until: datetime
    mark: str = ""


class Reserving(Protocol):
    """The store's methods for reservations. All raise StoreError.

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
        """Reserve a run until a time, atomically; repeated with its `mark`, it gets the same answer.

        - No record, or one of a lower fence: write ours, with the publication of the earlier record: TAKEN.
        - Both publications are known and differ: write nothing: RESENT.
        - A record of a higher fence, or a settled one: SETTLED.
        - A record whose `until` is after `now`, even of this holder: HELD.
        - Any other record: replace its `holder` and `until`: LOST.

        An unsettled record outlives its `until` by at least a week.
        """

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the unsettled reservations of `holder`; return those that `holder` has lost."""

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as settled; False when the record has another fence or holder, and stays.

        Without a record, write one, so that a late copy of the message is dropped. False, too, for an order
        without a holder when the holder itself has settled the reservation: then it is not dead.
        """

    def release(self, settle: Settle) -> bool:
        """Release a reservation unused; the record then says that the fence before this one is settled.

        For a fence of 0 the record is deleted. False when it has another fence, holder or mark,
        or is settled.
        """

    def expire(self, reservations: Sequence[Reservation]) -> None:
        """Delete the records of settled reservations that have the same fence: no copy can come again.

        A record that was ever lost to another worker stays: the run that lost it may still end.
        """

    def expire_before(self, now: datetime, *, limit: int) -> int:
        """Delete settled records whose `keep_until` has passed, `limit` at most; return how many."""
