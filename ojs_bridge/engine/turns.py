"""Turns: what all processes of a fleet do together, no faster than a rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..store import Documents, next_of

#: The kind of the documents that say until when the turns of a name are given out.
KIND = "turns"
#: How often a turn is asked for when other processes take turns at the same moment.
_TRIES = 10
#: After how many seconds a growing rate is whole, and with what share of it it begins.
GROWN, LEAST = 10.0, 0.1
_MILLISECOND = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Turns:
    """The turns of a name, of which `rate` begin in a second; every process that has the name shares them.

    From a time `growing` on the rate grows: a tenth at first, and all of it after ten seconds.
    """

    documents: Documents
    name: str
    rate: float
    growing: datetime | None = None

    def most_within(self, seconds: float) -> int:
        """Return how many turns begin within some seconds; one at the least."""
        return max(1, int(self.rate * seconds))

    def ends(self, begun: datetime) -> datetime:
        """Return when the turns end that are given out since they have begun; raises StoreError."""
        known = self.documents.get(KIND, self.name)
        return known.at if known else begun

    def take(self, count: int, *, now: datetime, within: timedelta) -> Sequence[datetime] | None:
        """Take turns and return when each begins; None if the last would not begin within a time from now.

        The times are evenly spread, and follow those that were taken before. Raises StoreError.
        """
        for _ in range(_TRIES):
            known = self.documents.get(KIND, self.name)
            first = max(known.at, now) if known else now
            times = [first]
            while len(times) <= count:
                times.append(times[-1] + timedelta(seconds=1 / self._rate_at(times[-1])))
            if times[count - 1] > now + within:
                return None
            # The store cuts off the fraction of a millisecond.
            ends = times.pop() + _MILLISECOND
            if self.documents.write(next_of(known, KIND, self.name, ends, {})):
                return times
        return None

    def _rate_at(self, at: datetime) -> float:
        if self.growing is None:
            return self.rate
        share = (at - self.growing).total_seconds() / GROWN
        return self.rate * min(max(share, LEAST), 1)
