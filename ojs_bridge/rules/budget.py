"""A budget of retries that all workers of a fleet share: retries are a share of the first attempts."""

from __future__ import annotations

import math
from datetime import datetime, timedelta
from typing import NamedTuple

#: So many retries a second may begin in any case, and so many of them are saved up at the most.
LEAST, SAVED = 1.0, 10.0
#: In so many seconds most of what first attempts have earned beyond that is gone.
SECONDS = 10.0
#: A time is a float, somewhere on its way.
_DIGITS = 6


class Credit(NamedTuple):
    """How many retries may begin, as counted at a time, and until when turns are given out.

    A retry that may not begin at once gets a turn, and waits for it.
    """

    saved: float
    at: datetime
    planned: datetime

    @classmethod
    def new(cls, now: datetime) -> Credit:
        """Return the credit of a fleet that has run nothing yet."""
        return cls(SAVED, now, now)

    def plus(self, now: datetime, earned: float) -> Credit:
        """Return the credit now, when first attempts have earned so many retries more."""
        seconds, saved = max((now - self.at).total_seconds(), 0.0), self.saved
        if saved < SAVED:
            saved = min(saved + LEAST * seconds, SAVED)
        else:
            saved = SAVED + (saved - SAVED) * math.exp(-seconds / SECONDS)
        return Credit(saved + earned, max(now, self.at), self.planned)

    def next(self, now: datetime, *, has_turn: bool = False) -> tuple[Credit, datetime | None]:
        """Return the credit after a retry that wants to begin now, and its turn; None if it may begin.

        A retry that `has_turn` goes before those that have none.
        """
        if round(self.saved, _DIGITS) >= 1 and (has_turn or self.planned <= now):
            return self._replace(saved=max(self.saved - 1, 0.0)), None
        turn = max(self.planned, now + timedelta(seconds=max(1 - self.saved, 0) / LEAST))
        return self._replace(planned=turn + timedelta(seconds=1 / LEAST)), turn
