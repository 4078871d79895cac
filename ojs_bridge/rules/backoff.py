"""The jitter of a delay before a retry, and delays that are given as a list (spec sections 3 and 5)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from .notations import read_duration

if TYPE_CHECKING:
    from .failures import Failure

Strategy: TypeAlias = Literal["exponential", "linear", "polynomial", "none"]

CustomStrategy: TypeAlias = "Callable[[int, Failure | None], float]"
#: Takes the retry's number, the seconds before it and a source of randomness; returns the seconds to wait.
CustomJitter: TypeAlias = "Callable[[int, float, Rng], float]"


class Rng(Protocol):
    """A source of randomness: `random.Random`, or anything with its `random()`."""

    def random(self) -> float:
        """Return a float in [0, 1)."""
        ...


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
        if self.low <= drawn < self.high:
            return drawn
        return max(self.low, min(drawn, math.nextafter(self.high, self.low)))

    def __call__(self, _n: int, seconds: float, rng: Rng) -> float:
        """Return the delay of a retry with jitter, in seconds."""
        return seconds * self.factor(rng)


#: The jitter of the spec: a factor in [0.5, 1.5).
SPEC_JITTER = Jitter(0.5, 1.5)


@dataclass(frozen=True, slots=True)
class Seeded:
    """A jitter that draws from the job's id and the retry's number: the same delay in every process.

    Without an argument it is the spec's jitter. Raises TypeError for a jitter that is not callable.
    """

    jitter: CustomJitter = SPEC_JITTER

    def __post_init__(self) -> None:
        if not callable(self.jitter) or isinstance(self.jitter, type):
            raise TypeError(f"Seeded({self.jitter!r}): must be a Jitter or another callable")

    def __call__(self, n: int, seconds: float, rng: Rng) -> float:
        """Return the delay of a retry with jitter, in seconds."""
        return self.jitter(n, seconds, rng)

    def rng(self, job_id: str, n: int) -> Rng:
        """Return the source of randomness for retry n of a job.

        Its k-th number, from 1, is the first 53 bits of the SHA-256 of `job_id:n:k`, as a fraction.
        """
        return _Digests(f"{job_id}:{n}")


@dataclass(slots=True)
class _Digests:
    seed: str
    drawn: int = 0

    def random(self) -> float:
        self.drawn += 1
        digest = hashlib.sha256(f"{self.seed}:{self.drawn}".encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8], "big") // 2**11 / 2**53


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
