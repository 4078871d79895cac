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
#: A rate is that of the last so many minutes.
LATELY = 2


class Rise(NamedTuple):
    """What is far above the usual: how many a minute, since when, and how many more than usual.

    It `is_long` if it was there in the first minute that is looked at. It is `over` if the last two whole
    minutes and this one have no more than usual. It `is_slow` if there are less than one a minute, and were
    from the begin on unless it is over: the number of the last hour, `in_hour`, says more then.
    """

    rate: float
    since: datetime
    excess: float
    in_hour: int
    is_slow: bool
    is_long: bool
    over: bool


class Burst(NamedTuple):
    """What was far above the usual, and is over: how many, and from when to when."""

    number: int
    since: datetime
    until: datetime


def rise_of(
    at: datetime, minutes: Minutes, usual: float | None, windows: Sequence[tuple[int, int]] = DEATHS
) -> Rise | None:
    """Return how far the numbers of the last minutes are above what is usual a minute, None if they are not.

    What is not known counts as none. The last minute is not whole. The rate never rises while there are none.
    """
    expected = usual or 0.0
    window = next((window for window, more in windows if _is_above(minutes, expected, window, more)), None)
    if window is None:
        return None
    first = _first_of(minutes, expected, QUIET[window])
    part = _part(at)
    elapsed = MINUTES - 1 - first + part
    risen = (*(0,) * first, *minutes[first:])
    rate = LATELY * rate_of(at, risen) / min(max(elapsed, 0.5), LATELY)
    over = sum(minutes[-LATELY - 1 :]) <= expected * (LATELY + 1)
    return Rise(
        rate,
        _begin_of(at, first),
        sum(minutes[first:]) - expected * elapsed,
        sum(minutes),
        is_slow=rate < 1 and (over or sum(risen) < elapsed),
        is_long=first == 0,
        over=over,
    )


def burst_of(at: datetime, minutes: Minutes, usual: float | None) -> Burst | None:
    """Return the last time when many a minute were above the usual, if that is over."""
    above = [place for place, number in enumerate(minutes) if number > 2 * (usual or 0.0)]
    if not above:
        return None
    # What was known at the end of the last minute that was above the usual.
    last = above[-1]
    until = _begin_of(at, last + 1)
    known = (*(0,) * (MINUTES - 1 - last), *minutes[: last + 1])
    rise = rise_of(until - timedelta.resolution, known, usual)
    if rise is None or rise.is_slow:
        return None
    first = last - (until - rise.since) // timedelta(minutes=1) + 1
    return Burst(sum(minutes[first : last + 1]), rise.since, until)


def rate_of(at: datetime, minutes: Minutes) -> float:
    """Return how many a minute there were lately; of the oldest minute only a part counts, as of this one."""
    oldest, *newer = minutes[-LATELY - 1 :]
    return (oldest * (1 - _part(at)) + sum(newer)) / LATELY


def _part(at: datetime) -> float:
    return (at - minute_of(at)).total_seconds() / 60


def _begin_of(at: datetime, place: int) -> datetime:
    return minute_of(at) - timedelta(minutes=MINUTES - 1 - place)


def _is_above(minutes: Minutes, expected: float, window: int, more: int) -> bool:
    if sum(minutes[-window:]) < 2 * expected * window + more:
        return False
    lately, least = GOES_ON.get(window, (window, 1))
    return sum(number > 0 for number in minutes[-lately:]) >= least


def _first_of(minutes: Minutes, expected: float, most_quiet: int) -> int:
    """Return the first of the last minutes above the usual, but for a few quiet ones between them."""
    first, quiet = None, 0
    for place in range(MINUTES - 1, -1, -1):
        if minutes[place] > 2 * expected:
            first, quiet = place, 0
        elif first is not None and (quiet := quiet + 1) > most_quiet:
            break
    return MINUTES - 1 if first is None else first


def minute_of(at: datetime) -> datetime:
    """Return when the minute of a time begins."""
    return at.replace(second=0, microsecond=0)
