"""How long to wait before retry n: the four strategies, intervals and jitter (spec sections 3 and 5)."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from .duration import read_duration

if TYPE_CHECKING:
    from .failures import Failure

Strategy: TypeAlias = Literal["exponential", "linear", "polynomial", "none"]
_LARGEST_FLOAT = int(sys.float_info.max)

CustomStrategy: TypeAlias = "Callable[[int, Failure | None], float]"


class Rng(Protocol):
    """A source of randomness: `random.Random`, or anything with its `random()`."""

    def random(self) -> float:
        """Return a float in [0, 1)."""
        ...


def raw_delay(strategy: Strategy, n: int, initial: float, coefficient: float) -> float:
    """Return the seconds before retry n, uncapped and without jitter (spec Appendix A).

    Infinity where the result is larger than a float: the cap brings it back.
    """
    n = min(n, _LARGEST_FLOAT)
    try:
        match strategy:
            case "none":
                return initial
            case "linear":
                return initial * n
            case "exponential":
                return initial * math.pow(coefficient, n - 1)
            case "polynomial":
                return initial * math.pow(n, coefficient)
    except OverflowError:
        return math.inf


@dataclass(frozen=True, slots=True)
class Jitter:
    """A random factor in [low, high) that multiplies the capped delay (spec section 5.1 has 0.5 and 1.5).

    Raises ValueError unless 0 <= low <= high and both are finite.
    """

    low: float = 0.5
    high: float = 1.5

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and 0 <= self.low <= self.high):
            raise ValueError(f"Jitter({self.low}, {self.high}): must hold 0 <= low <= high, both finite")

    def factor(self, rng: Rng) -> float:
        """Draw one factor; `high` itself is never drawn unless it equals `low`."""
        drawn = self.low + (self.high - self.low) * rng.random()
        return max(self.low, min(drawn, math.nextafter(self.high, self.low)))


#: The jitter of the spec: a factor in [0.5, 1.5).
SPEC_JITTER = Jitter(0.5, 1.5)


@dataclass(frozen=True, slots=True, init=False)
class Intervals:
    """A custom strategy that waits a listed interval before each retry; the last one repeats.

    Raises TypeError or ValueError for an empty list or an interval that is not a duration.
    """

    intervals: tuple[timedelta, ...]

    def __init__(self, *intervals: str | timedelta) -> None:
        if not intervals:
            raise ValueError("Intervals() needs at least one interval")
        object.__setattr__(self, "intervals", tuple(read_duration(interval) for interval in intervals))

    def __call__(self, n: int, _failure: Failure | None = None) -> float:
        """Return the seconds before retry n."""
        return self.intervals[min(n, len(self.intervals)) - 1].total_seconds()
