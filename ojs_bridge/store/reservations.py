"""Reservations: the bridge's questions to a store, so that no attempt is doubled or lost."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol


class Grant(enum.Enum):
    """The answer of a store to a worker that wants to run a job."""

    TAKEN = enum.auto()
    """The reservation is the worker's."""
    HELD = enum.auto()
    """Another worker holds the reservation, and its time has not ended."""
    LOST = enum.auto()
    """The last holder is gone. The run is to be judged as a lost attempt, not to be run again."""
    SETTLED = enum.auto()
    """This run, or a later one, has been dealt with: drop the message."""
    RESENT = enum.auto()
    """The first run of this key belongs to another publication: a user has sent the job a second time."""


@dataclass(frozen=True, slots=True)
class ReserveAnswer:
    """The store's whole answer to `reserve`.

    With HELD, `until` is when the time of the `holder` ends; with LOST, when it has ended. `mark` is that of
    the holder's own request. A repeated request may get neither holder nor time.
    """

    grant: Grant
    until: datetime | None = None
    holder: str = ""
    mark: str = ""


class Reservation(NamedTuple):
    """One run of a job: the job's key, and its fence, which grows with everything that is sent on."""

    key: str
    fence: int


class Settle(NamedTuple):
    """An order to settle a reservation; the store remembers it until `keep_until`.

    `holder` None settles a reservation whose holder is dead. With a `mark` it is for a reservation that was
    made by that very request.
    """

    reservation: Reservation
    holder: str | None
    keep_until: datetime
    mark: str = ""


class Reserving(Protocol):
    """Reservations: one record per key, with the fence, whether it is settled, publication, holder and until.

    Every method is one round trip. All raise StoreError.
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

        No record, or one of a lower fence: write ours (the publication of an earlier record stays), TAKEN.
        A fence of 0 whose publication and the record's are both known and differ: RESENT, nothing is written.
        A record of a higher fence, or a settled one: SETTLED. One whose time is after `now`: HELD, even by
        this holder. Otherwise write `holder` and `until` in place of the earlier ones: LOST.
        An unsettled record outlives its `until` by at least a week.
        """

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the unsettled reservations of `holder`; return those that are not its own any more."""

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as dealt with; False when the record has another fence or holder, and stays.

        Where there is no record it is written, so that a late copy of the message is dropped. False, too,
        for an order without a holder when the holder itself has settled the reservation: it is not dead.
        """

    def release(self, settle: Settle) -> bool:
        """Release a reservation unused: the fence before it becomes the settled one; for 0 the record goes.

        False when the record has another fence, holder or mark, or is settled.
        """

    def expire(self, reservations: Sequence[Reservation]) -> None:
        """Delete the records of settled reservations that still have that very fence: they cannot come again.

        A record that was ever lost to another worker stays: the run that lost it may still end.
        """

    def expire_before(self, now: datetime, *, limit: int) -> int:
        """Delete settled records whose `keep_until` has passed, so many at most; return how many."""
