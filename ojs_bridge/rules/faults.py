"""Faults: how failures of one fingerprint are added up, and the state of a group of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Literal, NamedTuple, TypeAlias

from .rates import APART

#: The state of a group, as operators see it.
State: TypeAlias = Literal["new", "growing", "steady", "came_back", "resolved", "muted"]
#: The states that an operator wants to hear of.
LIVE: tuple[State, ...] = ("new", "came_back", "growing")

#: A fault that was silent for so long, and fails again, comes back.
SILENT = timedelta(days=1)
#: A group is new, or back, for so long; after a mark for up to a day, until the next mark.
FRESH, AT_MOST = timedelta(hours=1), timedelta(days=1)
#: The minutes that are told apart, and the last ones of them that are compared with those before.
MINUTES, LAST = 60, 5
#: A group grows from so many deaths on in the last minutes, where there was none before.
FEWEST = 5
#: The most due times of retries that a fault tells apart, and the most queues that it names.
MAX_DUE, MAX_QUEUES = 100, 10


class Counted(NamedTuple):
    """The failures of a minute, and how many of them were the end of their job."""

    failed: int = 0
    died: int = 0


@dataclass(frozen=True, slots=True)
class Fault:
    """The failures of one fingerprint that workers have counted.

    `message` is that of a newest failure. `minutes` has the failures of the last hour by the minutes since
    1970, `due` the retries to come by their due time in seconds since 1970. `died_at` is the last time at
    which a job died of it, `back_at` the time at which it came back after silence.
    """

    fingerprint: str
    type: str
    error_type: str
    message: str
    frame: str
    first_at: datetime
    last_at: datetime
    queues: tuple[str, ...] = ()
    died_at: datetime | None = None
    back_at: datetime | None = None
    minutes: Mapping[int, Counted] = field(default_factory=dict)
    due: Mapping[int, int] = field(default_factory=dict)

    def with_more(self, new: Fault, now: datetime) -> Fault:
        """Return the fault with more failures of it, which are newer; what is too old is left out."""
        back_at = new.first_at if new.first_at - self.last_at >= SILENT else self.back_at
        died = [at for at in (self.died_at, new.died_at) if at is not None]
        minutes = dict(self.minutes)
        for minute, more in new.minutes.items():
            known = minutes.get(minute, Counted())
            minutes[minute] = Counted(known.failed + more.failed, known.died + more.died)
        due = dict(self.due)
        for at, count in new.due.items():
            due[at] = due.get(at, 0) + count
        return replace(
            new,
            first_at=min(self.first_at, new.first_at),
            last_at=max(self.last_at, new.last_at),
            queues=tuple(dict.fromkeys((*new.queues, *self.queues)))[:MAX_QUEUES],
            died_at=max(died, default=None),
            back_at=back_at,
            minutes=minutes,
            due=due,
        ).at(now)

    def at(self, now: datetime) -> Fault:
        """Return the fault without what is too old at a time."""
        first = minute_of(now) - MINUTES
        due = sorted((at, count) for at, count in self.due.items() if at > now.timestamp())
        for _ in range(len(due) - MAX_DUE):
            # The latest ones are told apart least.
            (_, count), (at, more) = due[-2:]
            due[-2:] = [(at, count + more)]
        return replace(
            self,
            minutes={minute: one for minute, one in self.minutes.items() if minute >= first},
            due=dict(due),
        )

    def retrying(self, now: datetime) -> int:
        """Return the number of jobs that failed with it, and whose retry is to come."""
        return sum(count for at, count in self.due.items() if at > now.timestamp())

    def deaths(self, now: datetime) -> tuple[int, ...]:
        """Return the deaths of each of the last minutes; the last one is the minute that runs."""
        last = minute_of(now)
        minutes = range(last - MINUTES, last + 1)
        return tuple(self.minutes.get(minute, Counted()).died for minute in minutes)


def minute_of(at: datetime) -> int:
    """Return the minutes since 1970."""
    return int(at.timestamp()) // 60


def due_at(at: datetime, now: datetime) -> int:
    """Return a due time in seconds since 1970, rounded up: what lies farther ahead is told apart less."""
    ahead = (at - now).total_seconds()
    step = next((step for limit, step in ((300, 5), (3600, 60), (86400, 900)) if ahead <= limit), 3600)
    return math.ceil(at.timestamp() / step) * step


def per_minute(deaths: tuple[int, ...], now: datetime) -> float:
    """Return the deaths a minute of now: of the minute that runs, and of the one before it."""
    return round(sum(deaths[-2:]) / (1 + now.timestamp() % 60 / 60), 2)


def badness(rate: float, state: State, size: int) -> tuple[int, ...]:
    """Return how bad a group is: the deaths a minute now, then its state, then its size.

    Rates with the same power of two are alike, and so are all rates below one. So rows that are about
    equally bad stay where they are.
    """
    power = max(0, math.frexp(rate)[1]) if rate else -1
    return power, {"new": 2, "came_back": 2, "growing": 1}.get(state, 0), size


def grows(deaths: tuple[int, ...]) -> bool:
    """Return whether the deaths of the last minutes are clearly more than those of the minutes before.

    They must be five at least, more than twice as many as in the minutes before, and more than chance makes
    of these.
    """
    last, before = deaths[-LAST:], deaths[:-LAST]
    usual = sum(before) / max(1, len(before)) * len(last)
    return sum(last) >= FEWEST + 2 * usual + 4 * math.sqrt(usual)


def grows_since(deaths: tuple[int, ...], now: datetime) -> datetime:
    """Return the minute in which a group that grows began to: the first of the last ones with a death."""
    last = deaths[-LAST:]
    ago = next((len(last) - 1 - place for place, count in enumerate(last) if count), 0)
    return now.replace(second=0, microsecond=0) - timedelta(minutes=ago)


def fresh_since(now: datetime, mark: datetime | None) -> datetime:
    """Return since when a group is new: for an hour, or since the newest mark, if that is of the last day."""
    hour = now - FRESH
    return hour if mark is None else max(now - AT_MOST, min(hour, mark))


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a group, as its state is made of it.

    `first_at` is its first death, or its first failure if no job has died of it. `muted_at` is None if it is
    not muted, `resolved_at` if nobody has resolved it. `died_again_at` is the first death since it was.
    """

    first_at: datetime
    back_at: datetime | None = None
    deaths: tuple[int, ...] = ()
    muted_at: datetime | None = None
    resolved_at: datetime | None = None
    died_again_at: datetime | None = None


def state_of(facts: Facts, now: datetime, fresh: datetime) -> tuple[State, datetime | None]:
    """Return the state of a group, and since when it has it; total and pure.

    `fresh` is since when a group is new, or back, as `fresh_since` tells it.
    """
    if facts.muted_at is not None:
        return "muted", facts.muted_at
    if facts.resolved_at is not None and facts.died_again_at is None:
        return "resolved", facts.resolved_at
    # A later time is that of a wrong clock, and would be new for long.
    latest = now + APART
    back = [at for at in (facts.back_at, facts.died_again_at) if at is not None and at <= latest]
    if back and max(back) >= fresh:
        return "came_back", max(back)
    if fresh <= facts.first_at <= latest:
        return "new", facts.first_at
    if grows(facts.deaths):
        return "growing", grows_since(facts.deaths, now)
    return "steady", None
