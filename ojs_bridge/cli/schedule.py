"""When a policy's retries come, as far as it can be known before they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..spec.policy import RetryPolicy

#: Retries shown at most; from there on the delay hardly changes any more.
MOST = 50


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait before one retry, in seconds: as planned, and from `shortest` to `longest` with jitter.

    `since_first` is the sum of the planned ones so far.
    """

    retry: int
    planned: float
    shortest: float
    longest: float
    since_first: float


@dataclass(frozen=True, slots=True)
class _Drawn:
    """A source of randomness that always says the same."""

    number: float

    def random(self) -> float:
        return self.number


def schedule(policy: RetryPolicy) -> Iterator[Wait]:
    """Yield the waits of a policy, the first fifty."""
    steady = RetryPolicy.merge(policy, {"jitter": False})
    since_first = 0.0
    for n in range(1, min(retries_of(policy), MOST) + 1):
        planned = steady.delay(n, rng=_Drawn(0.0))
        since_first += planned
        shortest = policy.delay(n, rng=_Drawn(0.0))
        longest = policy.delay(n, rng=_Drawn(math.nextafter(1.0, 0.0)))
        yield Wait(n, planned, shortest, longest, since_first)


def retries_of(policy: RetryPolicy) -> int:
    """Return how many retries a policy allows."""
    return policy.runs - 1
