"""The runs of the last hour by the minute, what is usual at this time of day, and the flow of queues.

A process that is asked often reads the store's counts once: only the last minutes may still grow.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from statistics import median
from typing import NamedTuple

from ..rules.facts import MINUTES, Minutes
from ..rules.rise import minute_of
from ..store import Documents, Rate, from_ms, index_text, to_ms

#: The outcomes that are deaths, and those of all runs.
DEATHS = ("dead_lettered", "discarded")
RUNS = ("completed", "retried", *DEATHS)
#: How many days tell what is usual.
DAYS = 7
#: The minutes that are read each time, and after what time all are: a worker may write late, after an outage.
GROWING, ALL_AGAIN = timedelta(minutes=3), timedelta(minutes=1)
#: For how long the depths of a queue are remembered, and how long they must be known to tell its flow.
REMEMBERED, TELLING = timedelta(minutes=3), timedelta(seconds=20)
#: A queue that grew by fewer jobs keeps up, and so does one that grows by less than this share of its runs. A
#: long one must become shorter by this share.
GREW, SHARE = 20, 0.05

_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
#: The number of runs by job type, queue and outcome.
Counts = Counter[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Usual:
    """What is usual in an hour of the day, a minute: of all types, and by type; a type not named has none."""

    deaths: float
    retried: float
    runs: float
    deaths_of: Mapping[str, float]
    retried_of: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Hour:
    """The minutes of the last hour, the last of which is not whole."""

    since: datetime
    minutes: Sequence[Counts]

    def of_types(self) -> Mapping[str, tuple[Minutes, Minutes, Minutes]]:
        """Return how many runs of each type ended, died and were retried."""
        found: dict[str, tuple[list[int], list[int], list[int]]] = defaultdict(
            lambda: ([0] * MINUTES, [0] * MINUTES, [0] * MINUTES)
        )
        for place, counts in enumerate(self.minutes):
            for (type_, _, outcome), count in counts.items():
                runs, deaths, retried = found[type_]
                runs[place] += count
                deaths[place] += count * (outcome in DEATHS)
                retried[place] += count * (outcome == "retried")
        return {
            type_: (tuple(runs), tuple(deaths), tuple(retried))
            for type_, (runs, deaths, retried) in sorted(found.items())
        }

    def of_queues(self, at: datetime) -> Mapping[str, float]:
        """Return how many runs of each queue ended a second lately."""
        runs = Counter[str]()
        for counts in self.minutes[-3:]:
            for (_, queue, _), count in counts.items():
                runs[queue] += count
        return {queue: count / lately(at) for queue, count in runs.items()}

    def kinds(self) -> set[tuple[str, str]]:
        """Return the types and queues of the hour's runs."""
        return {(type_, queue) for counts in self.minutes for type_, queue, _ in counts}


def lately(at: datetime) -> float:
    """Return how many seconds the last three minutes have, of which the last is not whole."""
    return 2 * 60 + max((at - minute_of(at)).total_seconds(), 1.0)


@dataclass
class LastHour:
    """Reads the last hour from a store, and what is usual; it keeps what does not change any more."""

    documents: Documents
    _minutes: dict[datetime, Counts] = field(default_factory=dict)
    _read_all: datetime | None = None
    _usual: dict[datetime, Usual | None] = field(default_factory=dict)

    def read(self, now: datetime) -> Hour:
        """Return the last hour; raises StoreError."""
        first = minute_of(now) - (MINUTES - 1) * _MINUTE
        is_all = self._read_all is None or not timedelta() <= now - self._read_all < ALL_AGAIN
        since = first if is_all else minute_of(now) - GROWING
        read: dict[datetime, Counts] = defaultdict(Counter)
        # A worker's clock may be a little ahead.
        for rate in self.documents.rates(since, now + _MINUTE, "minute"):
            if rate.outcome in RUNS:
                read[min(rate.at, minute_of(now))][rate.type, rate.queue, rate.outcome] += sum(rate.counts)
        if is_all:
            self._read_all = now
        kept = {at: counts for at, counts in self._minutes.items() if first <= at < since}
        self._minutes = {**kept, **read}
        return Hour(first, [self._minutes.get(first + n * _MINUTE, Counter()) for n in range(MINUTES)])

    def usual(self, at: datetime) -> Usual | None:
        """Return what is usual at this time of day, None where no day is known; raises StoreError.

        It is the median of the same hour of the last days; those before the first counts are not known.
        """
        hour = at.replace(minute=0, second=0, microsecond=0)
        if hour not in self._usual:
            days = [self.documents.rates(start, start + _HOUR, "hour") for start in _days_before(hour)]
            # Two hours are looked at.
            self._usual = {one: known for one, known in self._usual.items() if hour - one < 2 * _HOUR}
            self._usual[hour] = _usual_of(days)
        return self._usual[hour]


def _days_before(hour: datetime) -> Sequence[datetime]:
    return [hour - n * _DAY for n in range(DAYS, 0, -1)]


def _usual_of(days: Sequence[Sequence[Rate]]) -> Usual | None:
    first = next((place for place, rates in enumerate(days) if rates), None)
    if first is None:
        return None
    counts: list[Counts] = []
    for rates in days[first:]:
        counts.append(Counter())
        for rate in rates:
            counts[-1][rate.type, "", rate.outcome] += sum(rate.counts)

    def usual(outcomes: Sequence[str], type_: str | None = None) -> float:
        return median(_count(day, outcomes, type_) for day in counts) / 60

    types = {type_ for day in counts for type_, _, outcome in day if outcome in RUNS}
    return Usual(
        usual(DEATHS),
        usual(("retried",)),
        usual(RUNS),
        {type_: number for type_ in types if (number := usual(DEATHS, type_))},
        {type_: number for type_ in types if (number := usual(("retried",), type_))},
    )


def _count(day: Counts, outcomes: Sequence[str], type_: str | None) -> int:
    if type_ is not None:
        return sum(day[type_, "", outcome] for outcome in outcomes)
    return sum(count for (_, _, outcome), count in day.items() if outcome in outcomes)


class Flow(NamedTuple):
    """What comes into a queue each second, and whether its workers keep up; None where that is not known."""

    in_per_second: float | None
    keeps_up: bool | None


class Flows:
    """Remembers for a while how many jobs waited in each queue."""

    def __init__(self) -> None:
        self._depths: dict[tuple[str, str], deque[tuple[datetime, int]]] = defaultdict(deque)

    def of(self, framework: str, queue: str, depth: int, now: datetime, out: float) -> Flow:
        """Take what waits in a queue now, and return its flow, with so many runs a second."""
        depths = self._depths[framework, queue]
        while depths and not timedelta() <= now - depths[0][0] <= REMEMBERED:
            depths.popleft()
        depths.append((now, depth))
        (began, before), seconds = depths[0], (now - depths[0][0]).total_seconds()
        if now - began < TELLING:
            # Of an empty queue as much goes out as has come in.
            return Flow(None if depth else out, None if depth else True)
        grows = (depth - before) / seconds
        has_grown = depth - before >= GREW and grows > SHARE * out
        # More wait than end in the time that is remembered, and they do not become fewer.
        is_long = min(depth, before) >= GREW and depth > out * REMEMBERED.total_seconds()
        stands = is_long and depth > before * (1 - SHARE)
        return Flow(max(out + grows, 0.0), not (has_grown or stands))


def queue_name(queue: str) -> str:
    """Return a queue's name as the counts have it."""
    return index_text(queue)


def whole_minute(at: datetime) -> datetime:
    """Return when the first of the sixty minutes begins."""
    return from_ms(to_ms(minute_of(at))) - (MINUTES - 1) * _MINUTE
