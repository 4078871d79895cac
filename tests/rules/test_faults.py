"""Faults: how failures are added up, and the states of groups."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge.rules.faults import (
    MAX_DUE,
    Counted,
    Facts,
    Fault,
    State,
    badness,
    due_at,
    fresh_since,
    grows,
    minute_of,
    per_minute,
    state_of,
)

NOW = datetime(2026, 11, 28, 3, 28, 30, tzinfo=timezone.utc)
HOUR, DAY, MINUTE = timedelta(hours=1), timedelta(days=1), timedelta(minutes=1)
OLD = NOW - 9 * DAY
STEADY, RISING = (2,) * 61, (0,) * 56 + (1,) * 5
SOON = st.timedeltas(-timedelta(days=9), timedelta(0))

STATES: list[tuple[dict[str, Any], State, datetime | None]] = [
    ({}, "steady", None),
    ({"first_at": NOW - MINUTE}, "new", NOW - MINUTE),
    ({"first_at": NOW - HOUR}, "new", NOW - HOUR),
    ({"first_at": NOW - 2 * HOUR}, "steady", None),
    ({"deaths": RISING}, "growing", NOW.replace(second=0) - 4 * MINUTE),
    ({"deaths": STEADY}, "steady", None),
    ({"first_at": NOW - MINUTE, "deaths": RISING}, "new", NOW - MINUTE),
    ({"back_at": NOW - MINUTE}, "came_back", NOW - MINUTE),
    ({"back_at": NOW - 2 * HOUR}, "steady", None),
    ({"back_at": NOW - MINUTE, "deaths": RISING}, "came_back", NOW - MINUTE),
    ({"back_at": NOW + HOUR, "died_again_at": NOW + HOUR}, "steady", None),
    ({"first_at": NOW + DAY}, "steady", None),
    ({"resolved_at": NOW - DAY}, "resolved", NOW - DAY),
    ({"resolved_at": NOW - DAY, "died_again_at": NOW - MINUTE}, "came_back", NOW - MINUTE),
    ({"resolved_at": NOW - DAY, "died_again_at": NOW - 2 * HOUR}, "steady", None),
    ({"resolved_at": NOW - DAY, "died_again_at": NOW - 2 * HOUR, "deaths": RISING}, "growing", ...),  # type: ignore[list-item]
    ({"resolved_at": NOW - MINUTE, "back_at": NOW - 2 * MINUTE, "deaths": RISING}, "resolved", NOW - MINUTE),
    ({"muted_at": NOW - DAY, "first_at": NOW - MINUTE}, "muted", NOW - DAY),
    ({"muted_at": NOW - DAY, "resolved_at": NOW, "deaths": RISING}, "muted", NOW - DAY),
]


@pytest.mark.parametrize(("facts", "state", "since"), STATES)
def test_the_state_of_a_group(facts: dict[str, Any], state: State, since: object) -> None:
    """Of several the one that tells most, and since when."""
    found = state_of(Facts(**{"first_at": OLD, **facts}), NOW, fresh_since(NOW, None))
    assert found[0] == state
    assert since in (found[1], ...)


@pytest.mark.parametrize(
    ("mark", "since"),
    [
        (None, HOUR),
        (timedelta(minutes=5), HOUR),
        (timedelta(hours=7), timedelta(hours=7)),
        (timedelta(days=3), DAY),
    ],
)
def test_how_long_a_group_is_new(mark: timedelta | None, since: timedelta) -> None:
    """An hour at least; after a deploy until the next one, or for a day."""
    assert fresh_since(NOW, mark and NOW - mark) == NOW - since


@given(
    st.builds(
        Facts,
        SOON.map(lambda ago: NOW + ago),
        *(st.none() | SOON.map(lambda ago: NOW + ago) for _ in range(1)),
        st.just(()) | st.lists(st.integers(0, 99), min_size=61, max_size=61).map(tuple),
        *(st.none() | SOON.map(lambda ago: NOW + ago) for _ in range(3)),
    )
)
def test_every_group_has_a_state_and_no_state_is_of_the_future(facts: Facts) -> None:
    state, since = state_of(facts, NOW, fresh_since(NOW, None))
    assert state in get_args(State)
    assert (since is None) == (state == "steady")
    assert since is None or since <= NOW


GROWTH: list[tuple[tuple[int, ...], bool]] = [
    ((), False),
    ((0,) * 61, False),
    ((0,) * 60 + (4,), False),
    ((0,) * 60 + (5,), True),
    ((1,) * 61, False),
    ((1,) * 56 + (2, 3, 2, 3, 2), False),
    ((1,) * 56 + (9, 9, 9, 9, 9), True),
    ((75,) * 61, False),
    ((0,) * 50 + (75,) * 11, True),
    ((0,) * 20 + (75,) * 41, False),
    ((75,) * 56 + (0,) * 5, False),
]


@pytest.mark.parametrize(("deaths", "is_growing"), GROWTH)
def test_what_grows(deaths: tuple[int, ...], is_growing: bool) -> None:
    """Clearly more than in the hour before, and not by chance."""
    assert grows(deaths) is is_growing


@given(st.lists(st.integers(0, 50), min_size=61, max_size=61), st.integers(1, 50))
def test_more_deaths_never_end_a_growth(deaths: list[int], more: int) -> None:
    assert not grows(tuple(deaths)) or grows((*deaths[:-1], deaths[-1] + more))


def test_how_bad_a_group_is() -> None:
    """About the same rate is the same, so that rows stay where they are."""
    worst = [
        badness(40, "steady", 1),
        badness(20, "new", 5),
        badness(24, "growing", 9),
        badness(17, "steady", 90),
        badness(0.5, "muted", 1),
        badness(0, "came_back", 3),
        badness(0, "new", 2),
        badness(0, "growing", 9),
        badness(0, "steady", 10),
        badness(0, "resolved", 9),
    ]
    assert worst == sorted(worst, reverse=True)
    assert badness(0.1, "new", 1) == badness(0.9, "new", 1)


def test_the_deaths_a_minute_of_now() -> None:
    """The minute that runs is not whole."""
    assert per_minute((0, 60, 30), NOW) == 60
    assert per_minute((), NOW) == 0


def fault(at: datetime, **fields: Any) -> Fault:
    """A failure at a time."""
    minutes = {minute_of(at): Counted(1, 0)}
    return replace(Fault("f" * 16, "t", "e", "m", "", at, at, ("q",), minutes=minutes), **fields)


def test_a_fault_that_was_silent_for_a_day_comes_back() -> None:
    """One that fails now and then does not."""
    first = fault(NOW - 3 * DAY)
    often = first.with_more(fault(NOW - 2 * DAY - HOUR), NOW)
    assert often.back_at is None
    back = often.with_more(fault(NOW - HOUR), NOW)
    assert (back.back_at, back.first_at, back.last_at) == (NOW - HOUR, NOW - 3 * DAY, NOW - HOUR)
    assert back.with_more(fault(NOW), NOW).back_at == NOW - HOUR


TIMES = st.lists(st.tuples(st.integers(0, 7200), st.booleans(), st.integers(1, 90_000)), max_size=200)


@given(TIMES)
def test_failures_are_added_up_whatever_their_number(failures: list[tuple[int, bool, int]]) -> None:
    """Of the last hour none is lost; retries to come are few numbers, however many they are."""
    whole = fault(NOW - 2 * DAY, minutes={})
    for ago, has_died, ahead in sorted(failures, reverse=True):
        at = NOW - timedelta(seconds=ago)
        more = {"died_at": at} if has_died else {"due": {due_at(NOW + timedelta(seconds=ahead), NOW): 1}}
        one = fault(at, minutes={minute_of(at): Counted(1, int(has_died))}, **more)
        whole = whole.with_more(one, NOW)
    recent = [one for one in failures if minute_of(NOW - timedelta(seconds=one[0])) >= minute_of(NOW) - 60]
    assert sum(counted.failed for counted in whole.minutes.values()) == len(recent)
    assert sum(whole.deaths(NOW)) == sum(has_died for _, has_died, _ in recent)
    assert whole.retrying(NOW) == sum(not has_died for _, has_died, _ in failures)
    assert len(whole.due) <= MAX_DUE
    assert len(whole.minutes) <= 61
    assert whole.retrying(NOW + 3 * DAY) == 0
