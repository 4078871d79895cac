"""A budget of retries: never more of them than a share of the first attempts and the least, and all go on."""

from __future__ import annotations

import heapq
import itertools
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import Budget, ConfigurationError
from ojs_bridge.rules.budget import Credit

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
#: It saves up ten.
HALF = Budget(0.5)


@pytest.mark.parametrize(
    ("saved", "seconds", "firsts", "then"),
    [
        (10, 60, 0, 10),
        (0, 3, 0, 3),
        (0, 60, 0, 10),
        (9, 0, 14, 16),
        (100, 0, 0, 100),
        (100, 60, 0, pytest.approx(10, abs=0.3)),
        (5, -60, 2, 6),
    ],
    ids=["no more is saved", "the least", "saved up", "earned", "not yet gone", "gone", "a clock set back"],
)
def test_credit(saved: float, seconds: float, firsts: int, then: float) -> None:
    assert Credit(saved, NOW, NOW).plus(HALF, NOW + seconds * SECOND, firsts).saved == then


def test_the_least_may_be_less_and_more() -> None:
    """One retry is saved up at the least."""
    assert [Budget(0.1, least).most for least in ("1/h", "10/m", 1, "10/s")] == [
        1,
        pytest.approx(10 / 6),
        10,
        100,
    ]
    assert Credit(0.0, NOW, NOW).next(Budget(0.1, "10/m"), NOW)[1] == NOW + 6 * SECOND


@pytest.mark.parametrize("least", [0, "never", "1/d", True])
def test_what_is_refused(least: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"^budget: least: "):
        Budget(0.1, least)


def test_retries_without_credit_have_their_turns_in_order() -> None:
    credit, turns = Credit(2.0, NOW, NOW), []
    for _ in range(5):
        credit, turn = credit.next(HALF, NOW)
        turns.append(turn and (turn - NOW) / SECOND)
    assert turns == [None, None, 1.0, 2.0, 3.0]


def test_who_comes_to_a_turn_goes_before_who_has_none() -> None:
    credit = Credit(1.0, NOW, NOW + 5 * SECOND)
    assert credit.next(HALF, NOW)[1] == NOW + 5 * SECOND
    assert credit.next(HALF, NOW, has_turn=True)[1] is None


#: When first attempts begin, how often each is retried, and how late retries come to their turns.
first_attempts = st.lists(st.floats(0, 60), min_size=1, max_size=80)


budgets = st.builds(Budget, st.floats(0.01, 1), st.floats(0.1, 10))


@given(first_attempts, budgets, st.integers(1, 3), st.lists(st.floats(0, 20), min_size=1))
def test_retries_are_a_share_of_first_attempts_and_all_go_on(
    firsts: list[float], budget: Budget, retries: int, late: list[float]
) -> None:
    """In each interval between two retries there are no more than it has earned, and what was saved."""
    comes = [(at, number, retries + 1, False) for number, at in enumerate(firsts)]
    heapq.heapify(comes)
    credit, began, steps = Credit.new(budget, NOW), list[float](), itertools.cycle(late)
    for _ in range(100 * len(firsts) * retries):
        if not comes:
            break
        at, number, left, has_turn = heapq.heappop(comes)
        now, turn = NOW + at * SECOND, None
        is_first = left == retries + 1
        credit = credit.plus(budget, now, is_first)
        if not is_first:
            credit, turn = credit.next(budget, now, has_turn=has_turn)
            if turn is None:
                began.append(at)
        if turn is not None:
            heapq.heappush(comes, ((turn - NOW) / SECOND + next(steps), number, left, True))
        elif left > 1:
            heapq.heappush(comes, (at + 0.1, number, left - 1, False))
    assert len(began) == len(firsts) * retries
    for index, begin in enumerate(began):
        # What was earned before is not worth more than it was.
        saved = budget.most + budget.share * sum(first < begin for first in firsts)
        for count, last in enumerate(began[index:], 1):
            earned = budget.share * sum(begin <= first <= last for first in firsts)
            earned += (last - begin) / budget.seconds
            assert count <= earned + saved + 0.001


def test_what_a_busy_hour_has_earned_is_gone_in_a_minute() -> None:
    credit = Credit.new(HALF, NOW)
    for second in range(3600):
        credit = credit.plus(HALF, NOW + second * SECOND, 40)
    assert credit.saved < 10 + 0.5 * 40 * 11
    assert credit.plus(HALF, NOW + 3660 * SECOND, 0).saved < 11
