"""The backoff nearest to a row of waits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from ...duration import format_duration
from ...policy import RetryPolicy

#: No wait of a plan is longer: more than a year is said by nobody who means it.
LONGEST = 365 * 86_400.0
_SHORTEST = 0.001


def interval(seconds: float) -> str:
    """Return seconds as a policy can hold them: more than none, and a year at most."""
    return format_duration(timedelta(seconds=min(max(seconds, _SHORTEST), LONGEST)))


def steady(seconds: float, *, longest: float = 0.0) -> dict[str, Any]:
    """Return the backoff that always waits the same; `longest` seconds is what a handler may ask for."""
    return {
        "backoff_strategy": "none",
        "initial_interval": interval(seconds),
        "max_interval": interval(max(seconds, longest)),
        "jitter": False,
    }


def nearest(waits: Sequence[float], longest: float) -> dict[str, Any]:
    """Return the backoff, without jitter, that comes nearest to these seconds before retry 1, 2 and so on.

    `longest` is the longest wait of all, of which `waits` may only be the first ones.
    """
    return min(_candidates(waits, longest), key=_distance_to(waits))


def _distance_to(waits: Sequence[float]) -> Callable[[dict[str, Any]], float]:
    def distance(backoff: dict[str, Any]) -> float:
        policy = RetryPolicy.merge(backoff)
        return round(sum(abs(policy.delay(n, rng=_NONE) - x) for n, x in enumerate(waits, 1)), 3)

    return distance


def _candidates(waits: Sequence[float], longest: float) -> Iterator[dict[str, Any]]:
    """Yield backoffs, the plainest first: of those that are as near the first one is taken."""
    first = waits[0]
    yield steady(first, longest=longest)
    yield steady(sum(waits) / len(waits), longest=longest)
    if len(waits) < 2 or first < _SHORTEST:  # noqa: PLR2004 - two points make a line
        return
    ratio = waits[1] / first
    grown = {"initial_interval": interval(first), "max_interval": interval(longest), "jitter": False}
    yield {**grown, "backoff_strategy": "linear"}
    if ratio >= 1:
        yield {**grown, "backoff_strategy": "exponential", "backoff_coefficient": ratio}
    if ratio >= 2:  # noqa: PLR2004 - a power of one
        yield {**grown, "backoff_strategy": "polynomial", "backoff_coefficient": math.log2(ratio)}


class _None:
    """No randomness: no jitter asks for any."""

    def random(self) -> float:
        return 0.0


_NONE = _None()
