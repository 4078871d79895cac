"""A policy's waits beside those of a framework, and the words for what differs."""

from __future__ import annotations

import random
from statistics import fmean
from typing import Any

import pytest

from ojs_bridge import Intervals, Jitter, RetryPolicy
from ojs_bridge.migration import preset
from ojs_bridge.migration.plan import WaitRange, differing, policy_wait

POLICIES: list[Any] = [
    {},
    {"max_interval": "PT1S"},
    {"max_interval": "PT1.2S"},
    {"initial_interval": "PT45S", "max_interval": "PT1M"},
    {"jitter": Jitter(0, 3), "max_interval": "PT2S"},
    {"jitter": Jitter(1.5, 1.5), "max_interval": "PT2S"},
    {"jitter": lambda n, seconds, rng: seconds + 3 * n * rng.random()},
    {"jitter": lambda n, seconds, rng: 2 * seconds * (1 - rng.random()), "backoff_strategy": "linear"},
    preset("dramatiq").policy,
    {"initial_interval": "P5D", "max_interval": "P7D", "jitter": preset("dramatiq").policy.jitter},
    {"backoff_strategy": Intervals("PT1S", "PT1M"), "jitter": False},
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_waits_are_what_the_policy_draws(policy: Any, n: int) -> None:
    """Least, mean and most fit 4,000 draws."""
    rng, whole = random.Random(7), RetryPolicy.merge(policy)
    drawn = [whole.delay(n, rng=rng) for _ in range(4000)]
    wait = policy_wait(whole, n)
    slack = 0.002 * wait.most
    assert wait.least - slack <= min(drawn) <= max(drawn) <= wait.most + slack
    assert fmean(drawn) == pytest.approx(wait.mean, rel=0.03)
    assert wait.least == pytest.approx(min(drawn), abs=10 * slack)
    assert wait.most == pytest.approx(max(drawn), abs=10 * slack)


ONE, TWO = WaitRange.of(1.0), WaitRange(1.0, 1.5, 2.0)


@pytest.mark.parametrize(
    ("today", "then", "told"),
    [
        ([], [], []),
        ([ONE, TWO], [WaitRange.of(1.0009), TWO], []),
        (
            [ONE, ONE, TWO, TWO],
            [ONE, TWO, ONE, TWO],
            [
                "retry 2 waits 1 s to 2 s, not 1 s",
                "retry 3 waits 1 s, not 1 s to 2 s",
                "the first 4 waits together are on average the same",
            ],
        ),
        (
            [TWO],
            [WaitRange(1.0, 1.8, 2.0)],
            ["retry 1 waits 1 s to 2 s as before, but 1.8 s on average, not 1.5 s"],
        ),
    ],
)
def test_what_differs_in_words(today: list[WaitRange], then: list[WaitRange], told: list[str]) -> None:
    """The first and the last wait that do, and all of them together."""
    assert [*differing(today, then)] == told
