"""Waits before retries, of a policy and of the two frameworks, and their differences in words."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, product
from typing import Any

from ...rules.duration import format_duration, spoken
from ...rules.failures import Failure
from ...rules.policy import RetryPolicy

#: Waits that differ by a millisecond or a thousandth are the same.
_CLOSE = {"rel_tol": 1e-3, "abs_tol": 1e-3}
_DRAWS = 400
#: One over the golden ratio: the fractions of its multiples are evenly spread, for any number of them.
_GOLDEN = 0.6180339887498949
#: The bounds of a proposed wait, in seconds. No policy has a wait of 0 s.
_SHORTEST, _LONGEST = 0.001, 365 * 86_400.0

#: Dramatiq's largest `max_backoff`, in milliseconds.
DRAMATIQ_MAX_BACKOFF = 7 * 86_400_000
#: The mean of its jitter's factor: from 1 to 2, and at the cap from 0.5 to 1.
DRAMATIQ_MEAN = 1.5
DRAMATIQ_MEAN_AT_CAP = 0.75
_LARGEST_EXPONENT = 32
_LARGEST_SHIFT = 1_000


@dataclass(frozen=True, slots=True)
class Wait:
    """The seconds before a retry, or before several retries together."""

    least: float
    mean: float
    most: float

    @classmethod
    def of(cls, seconds: float) -> Wait:
        """Return a wait that is always the same."""
        return cls(seconds, seconds, seconds)

    def __add__(self, other: Wait) -> Wait:
        return Wait(self.least + other.least, self.mean + other.mean, self.most + other.most)

    def __mul__(self, times: int) -> Wait:
        return Wait(self.least * times, self.mean * times, self.most * times)


def celery_wait(n: int, factor: int, maximum: int, *, jitter: bool) -> Wait:
    """Return Celery's wait before retry n under `retry_backoff`, in whole seconds.

    With jitter Celery draws from 0 to `factor * 2**(n-1)`, both included.
    """
    longest = float(max(min(maximum, factor * 2 ** min(n - 1, _LARGEST_SHIFT)), 0))
    return Wait(0.0, longest / 2, longest) if jitter else Wait.of(longest)


def dramatiq_wait(n: int, min_backoff: float, max_backoff: float) -> Wait:
    """Return Dramatiq's wait before retry n; both arguments are in milliseconds.

    Dramatiq draws between once and twice `min_backoff * 2**(n-1)`. Instead of a draw above the cap it draws
    between half the cap and the cap.
    """
    cap = max(min(max_backoff, DRAMATIQ_MAX_BACKOFF), 0.0) / 1000
    base = max(min_backoff, 0.0) / 1000 * 2.0 ** min(n - 1, _LARGEST_EXPONENT)
    if 2 * base <= cap:
        return Wait(base, DRAMATIQ_MEAN * base, 2 * base)
    kept = max(cap - base, 0.0) / base
    mean = kept * (base + cap) / 2 + (1 - kept) * DRAMATIQ_MEAN_AT_CAP * cap
    return Wait(min(base, cap / 2), mean, cap)


class Drawn:
    """A source of randomness with given first draws; the later draws are evenly spread."""

    def __init__(self, *first: float) -> None:
        self._draws = chain(first, _evenly(first[-1] or 0.5))

    def random(self) -> float:
        """Return the next draw."""
        return next(self._draws)


def _evenly(drawn: float) -> Iterator[float]:
    """Yield draws that are evenly spread over all sources together, one by one and in pairs."""
    while True:
        drawn = (drawn * _DRAWS * _GOLDEN) % 1
        yield drawn


def extremes(policy: RetryPolicy, n: int, failure: Failure | None = None) -> list[float]:
    """Return the delays before retry n for the least and the largest draws."""
    ends = (0.0, math.nextafter(1.0, 0.0))
    return [policy.delay(n, rng=Drawn(*draws), failure=failure) for draws in product(ends, ends)]


def policy_wait(policy: RetryPolicy, n: int) -> Wait:
    """Return a policy's wait before retry n; raises the error of a custom strategy or jitter."""
    if policy.jitter is False:
        return Wait.of(policy.delay(n))
    drawn = [policy.delay(n, rng=Drawn((i + 0.5) / _DRAWS)) for i in range(_DRAWS)]
    bounds = [*extremes(policy, n), *drawn]
    return Wait(min(bounds), math.fsum(drawn) / _DRAWS, max(bounds))


def steady(seconds: float) -> dict[str, Any]:
    """Return the backoff of a policy whose waits are all the same, a year at most."""
    interval = format_duration(timedelta(seconds=min(max(seconds, _SHORTEST), _LONGEST)))
    return {
        "backoff_strategy": "none",
        "initial_interval": interval,
        "max_interval": interval,
        "jitter": False,
    }


def alike(one: Wait, other: Wait) -> bool:
    """Return whether two waits are the same, to a millisecond or a thousandth, their means to a hundredth."""
    ends = ((one.least, other.least), (one.most, other.most))
    same_mean = math.isclose(one.mean, other.mean, rel_tol=0.01, abs_tol=1e-3)
    return same_mean and all(math.isclose(a, b, **_CLOSE) for a, b in ends)


def differing(today: Sequence[Wait], then: Sequence[Wait]) -> Iterator[str]:
    """Yield the differences from today's waits: the first and the last one, and the sum."""
    unlike = [n for n, pair in enumerate(zip(today, then, strict=True), 1) if not alike(*pair)]
    for n in dict.fromkeys(unlike[:1] + unlike[-1:]):
        yield f"retry {n} waits {_unlike(then[n - 1], today[n - 1])}"
    if unlike and len(today) > 1:
        before, after = (math.fsum(wait.mean for wait in waits) for waits in (today, then))
        same = math.isclose(before, after, **_CLOSE)
        how = "the same" if same else f"{spoken(after)}, not {spoken(before)}"
        yield f"the first {len(today)} waits together are on average {how}"


def _unlike(then: Wait, today: Wait) -> str:
    if _told(then) == _told(today):
        return f"{_told(then)} as before, but {spoken(then.mean)} on average, not {spoken(today.mean)}"
    return f"{_told(then)}, not {_told(today)}"


def _told(wait: Wait) -> str:
    if math.isclose(wait.least, wait.most, **_CLOSE):
        return spoken(wait.mean)
    return f"{spoken(wait.least)} to {spoken(wait.most)}"
