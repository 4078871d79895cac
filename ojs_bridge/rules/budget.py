"""A budget of retries that all workers of a fleet share: retries are a share of the first attempts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from ..errors import ConfigurationError
from .notations import rate_at
from .rates import APART

#: How many seconds' worth of the least is saved up; most of what first attempts have earned beyond that is
#: gone after as many.
SECONDS = 10.0
#: A time is a float, somewhere on its way.
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Budget:
    """How many retries the jobs of a dependency may have, all workers together.

    They are at most a `share` of the first attempts. So many as `least` says, such as `"10/m"`, may begin in
    any case. Raises ConfigurationError.
    """

    share: float
    least: str | float = 1.0

    def __post_init__(self) -> None:
        share: object = self.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(
                f"budget: {share!r:.100} must be a share of first attempts, above 0 and at most 1"
            )
        object.__setattr__(self, "least", rate_at("budget: least", self.least))

    @classmethod
    def of(cls, said: Budget | float) -> Budget:
        """Return the budget of a dependency that says one, or only its share."""
        return said if isinstance(said, Budget) else cls(said)

    @property
    def seconds(self) -> float:
        """The seconds in which one retry may begin in any case."""
        return 1 / rate_at("budget: least", self.least)

    @property
    def most(self) -> float:
        """How many retries are saved up where first attempts earn none."""
        return max(SECONDS / self.seconds, 1.0)


class Credit(NamedTuple):
    """How many retries may begin, as counted at a time, and until when turns are given out.

    A retry that may not begin at once gets a turn, and waits for it.
    """

    saved: float
    at: datetime
    planned: datetime

    @classmethod
    def new(cls, budget: Budget, now: datetime) -> Credit:
        """Return the credit of a fleet that has run nothing yet."""
        return cls(budget.most, now, now)

    def plus(self, budget: Budget, now: datetime, firsts: int) -> Credit:
        """Return the credit now, when so many first attempts more have begun."""
        seconds, saved = max((now - self.at).total_seconds(), 0.0), self.saved
        if saved < budget.most:
            saved = min(saved + seconds / budget.seconds, budget.most)
        else:
            saved = budget.most + (saved - budget.most) * math.exp(-seconds / SECONDS)
        at = now if self.at - now > APART else max(now, self.at)
        return Credit(saved + budget.share * firsts, at, self.planned)

    def next(
        self, budget: Budget, now: datetime, *, has_turn: bool = False
    ) -> tuple[Credit, datetime | None]:
        """Return the credit after a retry that wants to begin now, and its turn; None if it may begin.

        A retry that `has_turn` goes before those that have none.
        """
        if round(self.saved, _DIGITS) >= 1 and (has_turn or self.planned <= now):
            return self._replace(saved=max(self.saved - 1, 0.0)), None
        turn = max(self.planned, now + timedelta(seconds=max(1 - self.saved, 0) * budget.seconds))
        return self._replace(planned=turn + timedelta(seconds=budget.seconds)), turn
