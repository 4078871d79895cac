"""A rise: how far the numbers of the last minutes are above what is usual, and since when."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import NamedTuple

from .facts import MINUTES, Minutes

#: How many last minutes are looked at, and how many more there must be in them than twice the usual number:
#: a burst is told at once, and a few an hour when they go on.
DEATHS, RETRIES = ((3, 5), (15, 6), (60, 10)), ((5, 10), (15, 20))
#: In a longer time than a burst's there must have been some in so many of the last minutes: it goes on.
GOES_ON = {15: (5, 2), 60: (20, 3)}
#: How many quiet minutes there may be within what goes on, by the time that is looked at.
QUIET = {3: 2, 5: 2, 15: 5, 60: 20}


class Rise(NamedTuple):
    """What is far above the usual: how many a minute, since when, and how many more than usual.

    If there are less than one a minute it `is_slow`, and `rate` is the number of the last hour. It `is_long`
    if it was there in the first minute that is looked at.
    """

    rate: float
    since: datetime
    excess: float
    is_slow: bool
    is_long: bool


def rise_of(
    at: datetime, minutes: Minutes, usual: float | None, windows: Sequence[tuple[int, int]] = DEATHS
) -> Rise | None:
    """Return how far the numbers of the last minutes are above what is usual a minute, None if they are not.

    What is not known counts as none. The last minute is not whole.
    """
    expected = usual or 0.0
    window = next((window for window, more in windows if _is_above(minutes, expected, window, more)), None)
    if window is None:
        return None
    first = _first_of(minutes, expected, QUIET[window])
    part = (at - minute_of(at)).total_seconds() / 60
    began = minute_of(at) - timedelta(minutes=MINUTES - 1 - first)
    elapsed = MINUTES - 1 - first + part
    looked = max(min(elapsed, window - 1 + part), 0.5)
    rate = sum(minutes[max(first, MINUTES - window) :]) / looked
    excess = sum(minutes[first:]) - expected * elapsed
    return Rise(sum(minutes) if rate < 1 else rate, began, excess, is_slow=rate < 1, is_long=first == 0)


def _is_above(minutes: Minutes, expected: float, window: int, more: int) -> bool:
    if sum(minutes[-window:]) < 2 * expected * window + more:
        return False
    lately, least = GOES_ON.get(window, (window, 1))
    return sum(number > 0 for number in minutes[-lately:]) >= least


def _first_of(minutes: Minutes, expected: float, most_quiet: int) -> int:
    """Return the first of the minutes that are above the usual until now, but for a few quiet ones."""
    first, quiet = MINUTES - 1, 0
    for place in range(MINUTES - 1, -1, -1):
        if minutes[place] > 2 * expected:
            first, quiet = place, 0
        elif (quiet := quiet + 1) > most_quiet:
            break
    return first


def minute_of(at: datetime) -> datetime:
    """Return when the minute of a time begins."""
    return at.replace(second=0, microsecond=0)
