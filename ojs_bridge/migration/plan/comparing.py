"""A retry policy's waits beside those of a framework."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, product, repeat

from ...spec.backoff import SPEC_JITTER, Jitter
from ...spec.duration import spoken
from ...spec.policy import RetryPolicy
from .planned import Wait

#: Waits are the same if they differ by no more than a millisecond, or by this part of them.
_CLOSE = {"rel_tol": 1e-3, "abs_tol": 1e-3}


_DRAWS = 1000
#: One over the golden ratio: its multiples fill a row evenly, whatever their number.
_GOLDEN = 0.6180339887498949


class _Drawn:
    """A source of randomness whose draws are known."""

    def __init__(self, draws: Iterable[float]) -> None:
        self._draws = iter(draws)

    def random(self) -> float:
        return next(self._draws)


def _spread() -> Iterator[_Drawn]:
    """Yield sources that together draw evenly, in their first draws and in pairs of them."""
    for i in range(_DRAWS):
        yield _Drawn(_evenly((i + 0.5) / _DRAWS))


def _evenly(drawn: float) -> Iterator[float]:
    while True:
        yield drawn
        drawn = (drawn * _DRAWS * _GOLDEN) % 1


def _corners() -> Iterator[_Drawn]:
    """Yield sources that draw the least or the most there is, and then the same or the other."""
    ends = (0.0, math.nextafter(1.0, 0.0))
    for first, then in product(ends, ends):
        yield _Drawn(chain([first], repeat(then)))


def policy_wait(policy: RetryPolicy, n: int) -> Wait:
    """Return a policy's wait before retry n; raises what a custom strategy or jitter raises."""
    planned = RetryPolicy.merge(policy, {"jitter": False}).delay(n, rng=next(_corners()))
    if policy.jitter is False or not planned:
        return Wait.of(planned)
    ends = [policy.delay(n, rng=rng) for rng in _corners()]
    jitter = SPEC_JITTER if policy.jitter is True else policy.jitter
    if isinstance(jitter, Jitter):
        return Wait(min(ends), _mean(jitter, planned, policy.max_interval.total_seconds()), max(ends))
    drawn = [policy.delay(n, rng=rng) for rng in _spread()]
    return Wait(min(ends + drawn), math.fsum(drawn) / _DRAWS, max(ends + drawn))


def _mean(jitter: Jitter, planned: float, cap: float) -> float:
    """Return the mean of a delay under a jitter, where what the jitter puts above the cap is the cap."""
    capped_from = min(max(cap / planned, jitter.low), jitter.high)
    width = jitter.high - jitter.low
    below = (capped_from - jitter.low) / width if width else float(cap >= planned * jitter.high)
    return below * planned * (jitter.low + capped_from) / 2 + (1 - below) * cap


def alike(one: Wait, other: Wait) -> bool:
    """Return whether two waits are the same, to a millisecond or a thousandth, their means to a hundredth."""
    ends = ((one.least, other.least), (one.most, other.most))
    same_mean = math.isclose(one.mean, other.mean, rel_tol=0.01, abs_tol=1e-3)
    return same_mean and all(math.isclose(a, b, **_CLOSE) for a, b in ends)


def differing(today: Sequence[Wait], then: Sequence[Wait]) -> Iterator[str]:
    """Yield how waits will differ from what they are: the first and the last that do, and their sum."""
    unlike = [n for n, pair in enumerate(zip(today, then, strict=True), 1) if not alike(*pair)]
    for n in dict.fromkeys(unlike[:1] + unlike[-1:]):
        yield f"retry {n} waits {_unlike(then[n - 1], today[n - 1])}"
    if unlike and len(today) > 1:
        before, after = (math.fsum(wait.mean for wait in waits) for waits in (today, then))
        same = math.isclose(before, after, **_CLOSE)
        how = "the same" if same else f"{spoken(after)}, not {spoken(before)}"
        yield f"the first {len(today)} waits together are on average {how}"


def _unlike(then: Wait, today: Wait) -> str:
    if told(then) == told(today):
        return f"{told(then)} as before, but {spoken(then.mean)} on average, not {spoken(today.mean)}"
    return f"{told(then)}, not {told(today)}"


def told(wait: Wait) -> str:
    """Return a wait in words."""
    if math.isclose(wait.least, wait.most, **_CLOSE):
        return spoken(wait.mean)
    return f"{spoken(wait.least)} to {spoken(wait.most)}"
