"""A rate of begins that all workers of a fleet share: who may begin now, and who has which turn."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

#: How far begins may run ahead of an even pace. Jobs with a turn may run ahead by one: else the turn of a job
#: that comes late would be lost.
TOLERANCE = timedelta(seconds=0.1)


class Pace(NamedTuple):
    """What a fleet knows of a rate: until when begins are accounted for, and until when turns are given out.

    A job that may not begin at once gets a turn, and waits for it.
    """

    begun: datetime
    planned: datetime

    def next(
        self, now: datetime, every: timedelta, *, has_turn: bool = False
    ) -> tuple[Pace, datetime | None]:
        """Return the pace after a job that wants to begin now, and its turn; None if it may begin at once.

        One job begins in each length of time `every`. A job that `has_turn`, and comes to it, goes before
        those that have none. If several come late and together, each but the first gets another turn.
        """
        free = max(self.begun, now)
        ahead = max(every, TOLERANCE) if has_turn else TOLERANCE
        if free - now <= ahead and (has_turn or self.planned - now <= TOLERANCE):
            return Pace(free + every, max(self.planned, free + every)), None
        turn = max(self.planned, free)
        return Pace(self.begun, turn + every), turn
