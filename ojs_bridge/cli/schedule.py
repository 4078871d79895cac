"""When a policy's retries come, as far as it can be known before they do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..policy import RetryPolicy

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


def spoken(seconds: float) -> str:
    """Return a length of time as people write it: 0.5 s, 1 min 30 s, 2 h, 1 d 4 h."""
    if seconds < 60:  # noqa: PLR2004 - a minute
        return f"{seconds:.3g} s"
    left, words = round(seconds), list[str]()
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, left = divmod(left, length)
        if number:
            words.append(f"{number} {unit}")
    return " ".join(words[:2])
