"""A rate of begins that all workers of a fleet share: who may begin now, and who has which turn."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import NamedTuple

from .notations import rate_at

#: How far begins may run ahead of an even pace. Jobs with a turn may run ahead by one: else the turn of a job
#: that comes late would be lost.
TOLERANCE = timedelta(seconds=0.1)
#: How far the clocks of a fleet may be apart. What was counted later than that was counted by a wrong clock.
APART = timedelta(minutes=1)


def every_of(rate: str | float) -> timedelta:
    """Return the length of time in which one job begins at a rate; raises ConfigurationError."""
    return timedelta(seconds=1 / rate_at("rate", rate))


class Pace(NamedTuple):
    """What a fleet knows of a rate: until when begins are accounted for, and until when turns are given out.

    A job that may not begin at once gets a turn, and waits for it. One job begins in each length of time
    `every`; the last one that has begun counted for so many as its `weight`.
    """

    begun: datetime
    planned: datetime
    every: timedelta
    weight: int = 1

    def at_rate(self, now: datetime, every: timedelta) -> Pace:
        """Return the pace at another rate: what lies ahead takes so much more time, or so much less."""
        if self.begun - now > APART + (1 + self.weight) * max(self.every, TOLERANCE):
            # Turns that lie ahead are looked at, and brought forward.
            return Pace(now, min(self.planned, now + APART), self.every).at_rate(now, every)
        if every == self.every:
            return self
        begun, planned = (
            now + (at - now) * (every / self.every) if at > now else at for at in (self.begun, self.planned)
        )
        return Pace(begun, planned, every, self.weight)

    def next(self, now: datetime, *, has_turn: bool = False, weight: int = 1) -> tuple[Pace, datetime | None]:
        """Return the pace after a job that wants to begin now, and its turn; None if it may begin at once.

        It counts for so many jobs as its `weight`. A job that `has_turn`, and comes to it, goes before those
        that have none. If several come late and together, each but the first gets another turn.
        """
        free, every, takes = max(self.begun, now), self.every, weight * self.every
        ahead = max(every, TOLERANCE) if has_turn else TOLERANCE
        if free - now <= ahead and (has_turn or self.planned - now <= TOLERANCE):
            return Pace(free + takes, max(self.planned, free + takes), every, weight), None
        turn = max(self.planned, free)
        return self._replace(planned=turn + takes), turn
