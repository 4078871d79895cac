"""A shared rate: no more begin than it allows, and each job gets its turn."""

from __future__ import annotations

import heapq
from datetime import datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.rates import TOLERANCE, Pace

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


def test_the_first_begins_at_once_and_each_other_has_its_turn() -> None:
    pace, turns = Pace(NOW, NOW, SECOND), []
    for _ in range(4):
        pace, turn = pace.next(NOW)
        turns.append(turn)
    assert turns == [None, NOW + SECOND, NOW + 2 * SECOND, NOW + 3 * SECOND]


def test_who_comes_to_a_turn_goes_before_who_has_none() -> None:
    pace = Pace(NOW, NOW + 5 * SECOND, SECOND)
    assert pace.next(NOW)[1] == NOW + 5 * SECOND
    assert pace.next(NOW, has_turn=True)[1] is None


@given(later=st.floats(0, 5), every=st.floats(0.01, 60))
def test_another_rate_makes_what_lies_ahead_longer_or_shorter(later: float, every: float) -> None:
    """Workers may hear of it one after the other: who goes back and forth gets the same times."""
    now, length = NOW + timedelta(seconds=later), timedelta(seconds=every)
    pace = Pace(NOW, NOW + 6 * SECOND, SECOND)
    other = pace.at_rate(now, length)
    assert (other.begun, other.every) == (NOW, length)
    assert abs(other.planned - now - (6 - later) * length) < timedelta(milliseconds=1)
    assert abs(other.at_rate(now, SECOND).planned - pace.planned) < timedelta(milliseconds=2)


def test_a_heavy_job_takes_more_turns() -> None:
    pace, turns = Pace(NOW, NOW, SECOND), []
    for weight in (3, 2, 1, 1):
        pace, turn = pace.next(NOW, weight=weight)
        turns.append(turn)
    assert turns == [None, NOW + 3 * SECOND, NOW + 5 * SECOND, NOW + 6 * SECOND]


@given(
    came=st.lists(st.floats(0, 20), min_size=1, max_size=60),
    late=st.lists(st.floats(0, 15), min_size=1, max_size=10),
    weights=st.lists(st.integers(1, 5), min_size=1, max_size=10),
    every=st.floats(0.05, 3),
)
def test_no_more_begin_than_the_rate_allows_and_all_begin(
    came: list[float], late: list[float], weights: list[int], every: float
) -> None:
    """Jobs come in any order, and late to their turns: at the most one begins more than the rate allows."""
    length, began = timedelta(seconds=every), list[tuple[datetime, int]]()
    pace = Pace(NOW, NOW, length)
    comes = [(NOW + timedelta(seconds=at), number, False) for number, at in enumerate(came)]
    heapq.heapify(comes)
    for step in range(300 * len(came)):
        if not comes:
            break
        now, number, has_turn = heapq.heappop(comes)
        weight = weights[number % len(weights)]
        pace, turn = pace.next(now, has_turn=has_turn, weight=weight)
        if turn is None:
            began.append((now, weight))
        else:
            delay = timedelta(seconds=late[step % len(late)])
            heapq.heappush(comes, (turn + delay, number, True))
    assert len(began) == len(came)
    for at, (first, weight) in enumerate(began):
        taken = weight
        for last, its in began[at + 1 :]:
            ahead = max(TOLERANCE, length) + timedelta(microseconds=taken)
            assert last - first >= taken * length - ahead
            taken += its


def test_little_of_a_rate_is_lost_to_jobs_that_come_late() -> None:
    """Each comes to its turn up to three lengths late."""
    pace, began = Pace(NOW, NOW, SECOND), list[datetime]()
    comes = [(NOW, number, False) for number in range(200)]
    while comes:
        now, number, has_turn = heapq.heappop(comes)
        pace, turn = pace.next(now, has_turn=has_turn)
        if turn is None:
            began.append(now)
        else:
            heapq.heappush(comes, (turn + number % 4 * SECOND, number, True))
    assert max(began) - NOW < 230 * SECOND
