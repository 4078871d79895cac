"""A budget of retries: never more of them than a share of the first attempts and the least, and all go on."""

from __future__ import annotations

import heapq
import itertools
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.budget import LEAST, SAVED, Credit

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


@pytest.mark.parametrize(
    ("saved", "seconds", "earned", "then"),
    [
        (SAVED, 60, 0, SAVED),
        (0, 3, 0, 3 * LEAST),
        (0, 60, 0, SAVED),
        (9, 0, 7, 16),
        (100, 0, 0, 100),
        (100, 60, 0, pytest.approx(SAVED, abs=0.3)),
        (5, -60, 1, 6),
    ],
    ids=["no more is saved", "the least", "saved up", "earned", "not yet gone", "gone", "a clock set back"],
)
def test_credit(saved: float, seconds: float, earned: float, then: float) -> None:
    assert Credit(saved, NOW, NOW).plus(NOW + seconds * SECOND, earned).saved == then


def test_retries_without_credit_have_their_turns_in_order() -> None:
    credit, turns = Credit(2.0, NOW, NOW), []
    for _ in range(5):
        credit, turn = credit.next(NOW)
        turns.append(turn and (turn - NOW) / SECOND)
    assert turns == [None, None, 1.0, 2.0, 3.0]


def test_who_comes_to_a_turn_goes_before_who_has_none() -> None:
    credit = Credit(1.0, NOW, NOW + 5 * SECOND)
    assert credit.next(NOW)[1] == NOW + 5 * SECOND
    assert credit.next(NOW, has_turn=True)[1] is None


#: When first attempts begin, how often each is retried, and how late retries come to their turns.
first_attempts = st.lists(st.floats(0, 60), min_size=1, max_size=80)


@given(first_attempts, st.floats(0.01, 1), st.integers(1, 3), st.lists(st.floats(0, 20), min_size=1))
def test_retries_are_a_share_of_first_attempts_and_all_go_on(
    firsts: list[float], share: float, retries: int, late: list[float]
) -> None:
    """In each interval between two retries there are no more than it has earned, and what was saved."""
    comes = [(at, number, retries + 1, False) for number, at in enumerate(firsts)]
    heapq.heapify(comes)
    credit, began, steps = Credit.new(NOW), list[float](), itertools.cycle(late)
    for _ in range(100 * len(firsts) * retries):
        if not comes:
            break
        at, number, left, has_turn = heapq.heappop(comes)
        now, turn = NOW + at * SECOND, None
        is_first = left == retries + 1
        credit = credit.plus(now, share * is_first)
        if not is_first:
            credit, turn = credit.next(now, has_turn=has_turn)
            if turn is None:
                began.append(at)
        if turn is not None:
            heapq.heappush(comes, ((turn - NOW) / SECOND + next(steps), number, left, True))
        elif left > 1:
            heapq.heappush(comes, (at + 0.1, number, left - 1, False))
    assert len(began) == len(firsts) * retries
    for index, begin in enumerate(began):
        # What was earned before is not worth more than it was.
        saved = SAVED + share * sum(first < begin for first in firsts)
        for count, last in enumerate(began[index:], 1):
            earned = share * sum(begin <= first <= last for first in firsts) + LEAST * (last - begin)
            assert count <= earned + saved + 0.001


def test_what_a_busy_hour_has_earned_is_gone_in_a_minute() -> None:
    credit = Credit.new(NOW)
    for second in range(3600):
        credit = credit.plus(NOW + second * SECOND, 0.2 * 100)
    assert credit.saved < SAVED + 0.2 * 100 * 11
    assert credit.plus(NOW + 3660 * SECOND, 0).saved < SAVED + 1
