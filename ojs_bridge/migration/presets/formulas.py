"""Schedules of other systems that the Open Job Spec has no strategy for: seconds before retry n."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec.backoff import raw_delay
from ...spec.failures import Failure

_OBAN_MAX_POWER = 100


def fourth_power(n: int, _failure: Failure | None = None) -> float:
    """Return 15 + (n - 1)^4, the seconds of Sidekiq and Faktory, which count retries from 0."""
    return 15 + raw_delay("polynomial", n - 1, 1.0, 4.0)


def oban(n: int, _failure: Failure | None = None) -> float:
    """Return 15 + 2^n, where n counts up to 100."""
    return 15 + raw_delay("exponential", min(n, _OBAN_MAX_POWER), 2.0, 2.0)


@dataclass(frozen=True, slots=True)
class Doubling:
    """`first` seconds, twice as many before each next retry, at most `most`: a cap that jitter exceeds."""

    first: float
    most: float

    def __call__(self, n: int, _failure: Failure | None = None) -> float:
        """Return the seconds before retry n."""
        return min(raw_delay("exponential", n, self.first, 2.0), self.most)
