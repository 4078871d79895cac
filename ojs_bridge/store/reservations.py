"""Who runs which job, until when: what the bridge asks of a store so that no attempt is doubled or lost."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple, Protocol


class Grant(enum.Enum):
    """What a store says to somebody who wants to run a job."""

    TAKEN = enum.auto()
    """The run is yours."""
    HELD = enum.auto()
    """Somebody else runs it, and is alive."""
    LOST = enum.auto()
    """Who ran it is gone. The run is yours to be judged as a lost attempt, not to be run again."""
    SETTLED = enum.auto()
    """This run, or a later one, has been dealt with: drop the message."""
    RESENT = enum.auto()
    """The first run of this key belongs to another publication: a user has sent the job a second time."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """What became of a request to run a job.

    With HELD, `until` is when the time of its `holder` ends; with LOST, when it has ended. `mark` is that of
    the holder's own request. A repeated request may not be told of what it has taken over.
    """

    grant: Grant
    until: datetime | None = None
    holder: str = ""
    mark: str = ""


class Turn(NamedTuple):
    """One run of a job: the job's key, and its fence, which grows with everything that is sent on."""

    key: str
    fence: int


class Settle(NamedTuple):
    """That a turn was dealt with, remembered until `keep_until`; `holder` None settles for a dead one.

    With a `mark`, only what that very request has reserved.
    """

    turn: Turn
    holder: str | None
    keep_until: datetime
    mark: str = ""


class Reserving(Protocol):
    """Reservations: one record per key, with the fence, whether it is settled, publication, holder and until.

    Every method is one round trip. All raise StoreError.
    """

    def reserve(
        self, turn: Turn, *, publication: str, holder: str, mark: str, now: datetime, until: datetime
    ) -> Reservation:
        """Take a turn until a time, atomically; repeated with its `mark`, it gets the same answer.

        No record, or one of a lower fence: write ours (the publication of an earlier record stays), TAKEN.
        A fence of 0 whose publication and the record's are both known and differ: RESENT, nothing is written.
        A record of a higher fence, or a settled one: SETTLED. One whose time is after `now`: HELD, whoever
        holds it. Otherwise take it over for `holder` until `until`: LOST.
        An unsettled record outlives its `until` by at least a week.
        """

    def extend(self, turns: Sequence[Turn], *, holder: str, until: datetime) -> Sequence[Turn]:
        """Extend the turns that `holder` holds, unsettled; return those that it does not hold any more."""

    def settle(self, settle: Settle) -> bool:
        """Mark a turn as dealt with; False when the record has another fence or holder, and stays as it is.

        Where there is no record it is written, so that a late copy of the message is dropped. What its
        holder has settled itself was not left by a dead one: False.
        """

    def give_back(self, settle: Settle) -> bool:
        """Give a turn back unused: the fence before it becomes the settled one, or for 0 the record goes.

        False when the record has another fence, holder or mark, or is settled.
        """

    def forget(self, turns: Sequence[Turn]) -> None:
        """Delete the records of settled turns that still have that very fence: they cannot come again.

        But for those that were taken over: the run that lost its turn may still end.
        """

    def forget_before(self, now: datetime, *, limit: int) -> int:
        """Delete settled records whose `keep_until` has passed, so many at most; return how many."""
