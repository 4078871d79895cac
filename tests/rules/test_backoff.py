"""Delays: the strategies, the cap and jitter (spec sections 3, 5, 12 and Appendix A)."""

import math
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.backoff import Intervals, Jitter
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.policy import RetryPolicy

NO_JITTER = {"jitter": False}
SPEC_12_3 = {"initial_interval": "PT15S", "backoff_coefficient": 4.0, "max_interval": "PT1H"}
HUGE = 10**400


@dataclass
class Drawn:
    """A source of randomness that always draws the same number."""

    value: float

    def random(self) -> float:
        return self.value


LOWEST, HIGHEST = Drawn(0.0), Drawn(math.nextafter(1.0, 0.0))


def schedule(policy: dict[str, Any], retries: int) -> list[float]:
    """Return the delays before retry 1, 2, … without jitter."""
    merged = RetryPolicy.merge(policy, NO_JITTER)
    return [merged.delay(n, rng=Drawn(0.5)) for n in range(1, retries + 1)]


@pytest.mark.requirement("RET-04")
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param({"backoff_strategy": "none", "initial_interval": "PT5S"}, [5, 5, 5, 5], id="3.1 none"),
        pytest.param(
            {"backoff_strategy": "linear", "initial_interval": "PT5S"}, [5, 10, 15, 20], id="3.2 linear"
        ),
        pytest.param({}, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300], id="3.3 exponential"),
        pytest.param(
            {"backoff_strategy": "polynomial", "backoff_coefficient": 4.0},
            [1, 16, 81, 256, 300],
            id="3.4 polynomial",
        ),
        pytest.param({"initial_interval": "PT10S"}, [10, 20, 40, 80, 160, 300], id="5.3 capped"),
        pytest.param({}, [1, 2], id="12.2 default"),
        pytest.param(
            {**SPEC_12_3, "backoff_strategy": "polynomial"},
            [15, 240, 1215, 3600, 3600],
            id="12.3 as its table says",
        ),
        pytest.param(SPEC_12_3, [15, 60, 240, 960, 3600], id="12.3 as its JSON says"),
        pytest.param(
            {"initial_interval": "PT30S", "max_interval": "PT15M"}, [30, 60, 120, 240, 480, 900], id="12.4"
        ),
        pytest.param(
            {"initial_interval": "PT10S", "backoff_coefficient": 1.0, "max_interval": "PT10S"},
            [10] * 59,
            id="12.5 polling",
        ),
    ],
)
def test_the_schedules_of_the_spec(policy: dict[str, Any], expected: list[float]) -> None:
    """The schedules are all tables of sections 3, 5.3 and 12, without jitter."""
    assert schedule(policy, len(expected)) == expected


@pytest.mark.parametrize("strategy", ["none", "linear"])
def test_the_coefficient_is_ignored(strategy: str) -> None:
    """Sections 3.1 and 3.2 say so."""
    assert schedule({"backoff_strategy": strategy, "backoff_coefficient": 9.0}, 4) == schedule(
        {"backoff_strategy": strategy}, 4
    )


@pytest.mark.requirement("RET-05", "RET-06")
@pytest.mark.parametrize(
    ("n", "low", "high"), [(1, 5, 15), (2, 10, 30), (3, 20, 60), (4, 40, 120), (5, 80, 240), (6, 150, 300)]
)
def test_the_jitter_ranges_of_the_spec(n: int, low: float, high: float) -> None:
    """The lowest draw of section 5.3's table is the low end, and the highest stays within the high end."""
    policy = RetryPolicy.merge({"initial_interval": "PT10S"})
    assert policy.delay(n, rng=LOWEST) == low
    assert policy.delay(n, rng=HIGHEST) == pytest.approx(high)
    assert policy.delay(n, rng=HIGHEST) <= high


@pytest.mark.requirement("RET-05")
def test_the_upper_bound_is_never_drawn() -> None:
    """The range of section 5.2 is half-open."""
    policy = RetryPolicy.merge({"initial_interval": "PT10S"})
    assert policy.delay(1, rng=HIGHEST) < 15
    assert policy.delay(1, rng=Drawn(1.0)) < 15


@pytest.mark.requirement("RET-05")
def test_a_delay_without_a_generator_of_ones_own() -> None:
    """Python's own draws the jitter."""
    drawn = {RetryPolicy(initial_interval="PT10S").delay(3) for _ in range(20)}
    assert len(drawn) > 1
    assert all(20 <= seconds < 60 for seconds in drawn)


@pytest.mark.requirement("RET-05")
def test_jitter_is_uniform_around_the_delay() -> None:
    """Section 5.2: the mean is the delay, and each quarter of the range has its share."""
    policy = RetryPolicy.merge({"initial_interval": "PT10S"})
    rng = random.Random(7)
    drawn = [policy.delay(1, rng=rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(10, rel=0.01)
    for quarter in range(4):
        share = sum(1 for delay in drawn if 5 + 2.5 * quarter <= delay < 7.5 + 2.5 * quarter) / len(drawn)
        assert share == pytest.approx(0.25, abs=0.02)


@pytest.mark.requirement("RET-06")
def test_once_the_cap_is_reached_half_of_the_delays_are_the_cap() -> None:
    """RET-06 has this price (decisions.md): a mean of 0.875 of the cap, half of all delays at it."""
    policy = RetryPolicy()
    rng = random.Random(7)
    drawn = [policy.delay(20, rng=rng) for _ in range(20_000)]
    assert sum(1 for delay in drawn if delay == 300) / len(drawn) == pytest.approx(0.5, abs=0.02)
    assert sum(drawn) / len(drawn) == pytest.approx(0.875 * 300, rel=0.01)


def test_without_jitter_nothing_is_drawn() -> None:
    """Section 2.2: the computed delay is used exactly."""
    assert RetryPolicy.merge(NO_JITTER).delay(3, rng=None) == 4  # type: ignore[arg-type]


retries = st.integers(1, 60) | st.integers(1, HUGE) | st.sampled_from([1, 2, 2**63, 10**308, 10**309, HUGE])


@st.composite
def policies(draw: st.DrawFn) -> RetryPolicy:
    """Any valid policy that the wire can carry."""
    initial = draw(st.timedeltas(timedelta(microseconds=1), timedelta.max))
    return RetryPolicy(
        initial_interval=initial,
        max_interval=draw(st.timedeltas(initial, timedelta.max)),
        backoff_coefficient=draw(st.floats(1.0, allow_infinity=False)),
        backoff_strategy=draw(st.sampled_from(["exponential", "linear", "polynomial", "none"])),
        jitter=draw(st.booleans()),
    )


@pytest.mark.requirement("RET-04", "RET-05", "RET-06")
@given(policies(), retries, st.floats(0, 1, exclude_max=True))
def test_every_delay_is_within_the_cap_and_the_jitter_bounds(
    policy: RetryPolicy, n: int, draw: float
) -> None:
    """The bounds hold for every policy, every retry and every draw."""
    cap = policy.max_interval.total_seconds()
    effective = policy.model_copy(update={"jitter": False}).delay(n, rng=LOWEST)
    delay = policy.delay(n, rng=Drawn(draw))
    assert 0 < effective <= cap
    assert effective * (0.5 if policy.jitter else 1) <= delay <= min(cap, effective * 1.5)


@given(policies(), st.integers(1, 10**6))
def test_delays_never_shrink(policy: RetryPolicy, n: int) -> None:
    """Without jitter, a later retry never waits less."""
    plain = policy.model_copy(update={"jitter": False})
    assert plain.delay(n + 1, rng=LOWEST) >= plain.delay(n, rng=LOWEST)


@pytest.mark.parametrize(
    ("strategy", "coefficient", "expected"),
    [
        ("none", 2.0, 1),
        ("exponential", 1.0, 1),
        ("exponential", 2.0, 300),
        ("linear", 2.0, 300),
        ("polynomial", 4.0, 300),
    ],
)
def test_retry_ten_to_the_four_hundredth(strategy: str, coefficient: float, expected: float) -> None:
    """No retry is too late to have a delay; a coefficient of 1 stays constant (section 2.2)."""
    policy = {"backoff_strategy": strategy, "backoff_coefficient": coefficient, **NO_JITTER}
    assert RetryPolicy.merge(policy).delay(HUGE, rng=LOWEST) == expected


def test_intervals_repeat_the_last_one() -> None:
    """The intervals of a list are strings or timedeltas."""
    listed = Intervals("PT1S", timedelta(seconds=5), "PT1M")
    assert schedule({"backoff_strategy": listed}, 5) == [1, 5, 60, 60, 60]
    assert RetryPolicy.merge({"backoff_strategy": listed}, NO_JITTER).delay(HUGE, rng=LOWEST) == 60


def test_intervals_are_jittered_like_any_delay() -> None:
    """Only the raw delay is custom."""
    policy = RetryPolicy.merge({"backoff_strategy": Intervals("PT10S")})
    assert policy.delay(1, rng=LOWEST) == 5


def test_intervals_are_values() -> None:
    """Intervals are equal, hashable and readable."""
    assert Intervals("PT60S") == Intervals("PT1M")
    assert len({Intervals("PT60S"), Intervals("PT1M")}) == 1


def test_no_intervals_at_all() -> None:
    """An empty schedule has no last interval to repeat."""
    with pytest.raises(ValueError, match=r"^Intervals\(\) needs at least one interval$"):
        Intervals()


@pytest.mark.parametrize(("bad", "error"), [(5, TypeError), ("5", ValueError), (timedelta(-1), ValueError)])
def test_an_interval_that_is_no_duration(bad: Any, error: type[Exception]) -> None:
    """The error comes where the interval is written."""
    with pytest.raises(error):
        Intervals("PT1S", bad)


def test_a_callable_decides_the_raw_delay() -> None:
    """The callable gets the retry number and the failure; the cap still binds."""
    failure = Failure("rate_limit.exceeded", details={"wait": 7})

    def wait(n: int, failed: Failure | None) -> float:
        return n * float(failed.details["wait"]) if failed else 1.0

    policy = RetryPolicy.merge({"backoff_strategy": wait, **NO_JITTER})
    assert [policy.delay(n, rng=LOWEST, failure=failure) for n in (1, 2, 100)] == [7, 14, 300]


@pytest.mark.parametrize("answer", [-1.0, -math.inf, math.nan])
def test_a_callable_that_answers_no_delay(answer: float) -> None:
    """The answer is less than nothing, or cannot be compared."""
    policy = RetryPolicy.merge({"backoff_strategy": lambda _n, _failure: answer})
    with pytest.raises(ValueError, match=r"^the custom backoff strategy returned .* for retry 2$"):
        policy.delay(2, rng=LOWEST)


def test_a_callable_may_answer_infinity() -> None:
    """The cap brings it back."""
    policy = RetryPolicy.merge({"backoff_strategy": lambda _n, _failure: math.inf, **NO_JITTER})
    assert policy.delay(1, rng=LOWEST) == 300


@pytest.mark.parametrize(
    ("jitter", "low", "high"), [(Jitter(0, 1), 0, 10), (Jitter(0.9, 1.1), 9, 11), (Jitter(1, 1), 10, 10)]
)
def test_other_kinds_of_jitter(jitter: Jitter, low: float, high: float) -> None:
    """A jitter of Python may be full, narrow or none."""
    policy = RetryPolicy.merge({"initial_interval": "PT10S", "jitter": jitter})
    assert policy.delay(1, rng=LOWEST) == low
    assert policy.delay(1, rng=HIGHEST) == pytest.approx(high)


@pytest.mark.parametrize(("low", "high"), [(-0.1, 1), (1, 0.5), (0, math.inf), (math.nan, 1), (0, math.nan)])
def test_a_jitter_that_makes_no_sense(low: float, high: float) -> None:
    """A jitter is never below zero, never backwards, never endless."""
    with pytest.raises(ValueError, match=r"must hold 0 <= low <= high, both finite$"):
        Jitter(low, high)


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1))
def test_a_factor_is_within_its_jitter(one: float, other: float, draw: float) -> None:
    """The range is half-open, unless it has only one factor."""
    jitter = Jitter(min(one, other), max(one, other))
    factor = jitter.factor(Drawn(draw))
    assert jitter.low <= factor <= jitter.high
    assert factor < jitter.high or jitter.low == jitter.high
