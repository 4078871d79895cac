"""A breaker: while a dependency fails, its jobs are held, and a few probes ask whether it works again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple, TypeAlias

from ..errors import ConfigurationError
from .notations import duration_at, rate_at
from .rates import APART

#: The longest window, and the longest cool-down. A window is counted in so many buckets.
LONGEST, BUCKETS = timedelta(hours=1), 12
#: What was held goes on at so much of the pace that there was before, or at so many a second if that is more.
RAMP, LEAST_RAMP = 0.25, 1.0
#: How often a process says how its runs ended, in seconds: if the last ones failed, if some did, and if none.
STREAK_SECONDS, FAILING_SECONDS, WORKING_SECONDS = 0.2, 1.0, 5.0
#: For how long all runs must have failed, in seconds: by then each process that works has said so.
SURE = 1.5

#: When a bucket begins, the runs that ended in it, and how many of them failed.
Bucket: TypeAlias = tuple[float, int, int]


@dataclass(frozen=True, slots=True)
class Breaker:
    """When the jobs of a dependency are held because it fails, and how they go on.

    It opens when at least `least` runs ended within the `window`, and of these at least a `share` failed with
    an error of the dependency; or when the last `least` runs all did. Then its jobs are held. After the
    `cool_down` so many `probes` run: it closes when all of them come back without such an error. When one
    fails, it stays open for another cool-down. What was held goes on no faster than `ramp`, such as `"10/s"`;
    without it, than a quarter of the runs that there were in the window. Durations are ISO 8601 texts or
    timedeltas. Raises ConfigurationError.
    """

    share: float = 0.5
    least: int = 20
    window: str | timedelta = "PT1M"
    cool_down: str | timedelta = "PT20S"
    probes: int = 3
    ramp: str | float | None = None

    def __post_init__(self) -> None:
        share: object = self.share
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(
                f"breaker: share: {share!r:.100} must be a number above 0, and at most 1"
            )
        for name in ("least", "probes"):
            number: object = getattr(self, name)
            if type(number) is not int or number < 1:
                raise ConfigurationError(f"breaker: {name}: {number!r:.100} must be an integer of at least 1")
        for name in ("window", "cool_down"):
            said = getattr(self, name)
            length = duration_at(f"breaker: {name}", said)
            if length > LONGEST:
                raise ConfigurationError(f"breaker: {name}: {said!r} must be at most PT1H")
            object.__setattr__(self, name, length)
        if self.ramp is not None:
            object.__setattr__(self, "ramp", rate_at("breaker: ramp", self.ramp))

    def seconds(self, name: str) -> float:
        """Return the `window` or the `cool_down` in seconds."""
        length: timedelta = getattr(self, name)
        return length.total_seconds()


class Counts(NamedTuple):
    """The runs that have ended, and how many of them failed; beside them the probes that came back.

    `worked_at` is when the last one ended that worked, in seconds since 1970, and so many failed after it.
    """

    runs: int = 0
    failed: int = 0
    probes: int = 0
    probes_failed: int = 0
    streak: int = 0
    worked_at: float = 0.0

    def plus(self, more: Counts) -> Counts:
        """Return both together; `more` ended later."""
        return Counts(
            self.runs + more.runs,
            self.failed + more.failed,
            self.probes + more.probes,
            self.probes_failed + more.probes_failed,
            more.streak if more.worked_at else self.streak + more.streak,
            max(self.worked_at, more.worked_at),
        )

    def are_due(self, waited: float, failing: State) -> bool:
        """Return whether a process writes them that has written none for so many seconds.

        `failing` is the state that it has read last: while all others fail, it says at once that it works.
        """
        if failing.streak > 1 and self.worked_at > failing.since:
            return True
        often = STREAK_SECONDS if self.streak > 1 else FAILING_SECONDS if self.failed else WORKING_SECONDS
        return waited >= often


@dataclass(frozen=True, slots=True)
class State:
    """The state of a breaker, which all workers share; times are in seconds since 1970.

    It is closed, or open since `opened`, because so many of so many runs failed. While it is open, no probe
    runs until `rests_until`. `probes` says of those under way from when on they count as lost; so many came
    back and `worked`. `pace` is how many runs a second there were before it opened. The last runs of all
    workers failed, a `streak` of so many, and more than one `since` then.
    """

    buckets: tuple[Bucket, ...] = ()
    opened: float | None = None
    runs: int = 0
    failed: int = 0
    rests_until: float = 0.0
    probes: tuple[float, ...] = ()
    worked: int = 0
    pace: float = 0.0
    streak: int = 0
    since: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> State:
        """Return the state that `to_json` has written; a newer version may have written more fields."""
        known = {name: value for name, value in fields.items() if name in cls.__slots__}
        known["buckets"] = tuple((begin, runs, failed) for begin, runs, failed in known.get("buckets", ()))
        return cls(**{**known, "probes": tuple(known.get("probes", ()))})

    def as_of(self, now: float, cool_down: float) -> State:
        """Return the state without what a wrong clock has written, which lies too far ahead."""
        latest = now + APART.total_seconds()
        ends = max((self.rests_until, *self.probes)) - cool_down
        if max((self.opened or 0.0, self.since, ends, *(begin for begin, _, _ in self.buckets))) <= latest:
            return self
        return replace(
            self,
            buckets=tuple(bucket for bucket in self.buckets if bucket[0] <= latest),
            opened=self.opened and min(self.opened, now),
            rests_until=min(self.rests_until, now),
            probes=(),
            since=min(self.since, now),
        )

    def is_probed(self, now: float) -> bool:
        """Return whether probes run, or ran, since the last cool-down."""
        return self.opened is not None and now >= self.rests_until and bool(self.probes or self.worked)


def after(breaker: Breaker, state: State, counts: Counts, now: float) -> State:
    """Return the state when so many runs more have ended; pure.

    An open breaker hears of probes only, and of none that began before its last cool-down ended.
    """
    if state.opened is None:
        return _counted(breaker, state, counts, now)
    if now < state.rests_until:
        return state
    if counts.probes_failed:
        return replace(state, rests_until=now + breaker.seconds("cool_down"), probes=(), worked=0)
    worked = state.worked + counts.probes
    if worked >= breaker.probes:
        return State(pace=state.pace)
    return replace(state, worked=worked, probes=state.probes[counts.probes :])


def _counted(breaker: Breaker, state: State, counts: Counts, now: float) -> State:
    window = breaker.seconds("window")
    width = window / BUCKETS
    kept = {begin: (runs, failed) for begin, runs, failed in state.buckets if begin + width > now - window}
    begin = now // width * width
    before = kept.get(begin, (0, 0))
    kept[begin] = before[0] + counts.runs, before[1] + counts.failed
    buckets = tuple((begin, *kept[begin]) for begin in sorted(kept))
    runs, failed = sum(bucket[1] for bucket in buckets), sum(bucket[2] for bucket in buckets)
    streak, since = counts.streak, now
    if state.streak and counts.worked_at <= state.since:
        streak, since = streak + state.streak, state.since if state.streak > 1 else now
    pace, rests_until = _pace(breaker, buckets, now), now + breaker.seconds("cool_down")
    if runs >= breaker.least and failed >= breaker.share * runs:
        return State((), now, runs, failed, rests_until, pace=pace)
    if counts.streak and streak >= breaker.least and now - since >= SURE:
        return State((), now, streak, streak, rests_until, pace=pace, streak=streak)
    return replace(state, buckets=buckets, streak=streak, since=since)


def _pace(breaker: Breaker, buckets: Sequence[Bucket], now: float) -> float:
    """Return how many runs a second there were, since the first bucket began."""
    width = breaker.seconds("window") / BUCKETS
    return sum(bucket[1] for bucket in buckets) / max(now - buckets[0][0], width)


def probed(breaker: Breaker, state: State, now: float) -> State | None:
    """Return the state with one more probe under way; None if none may run now, or the breaker is closed.

    A probe that has not come back after a cool-down counts as lost: another one runs.
    """
    if state.opened is None or now < state.rests_until:
        return None
    under_way = tuple(until for until in state.probes if until > now)
    if len(under_way) + state.worked >= breaker.probes:
        return None
    return replace(state, probes=(*under_way, now + breaker.seconds("cool_down")))


def next_probe(breaker: Breaker, state: State) -> tuple[float, int]:
    """Return from when on a probe may run, and how many; of an open breaker."""
    free = breaker.probes - state.worked - len(state.probes)
    return (state.rests_until, free) if free > 0 else (min(state.probes), 1)


def ramp(breaker: Breaker, state: State, now: float) -> float:
    """Return how many jobs a second go on that were held."""
    pace = _pace(breaker, state.buckets, now) if state.buckets else state.pace
    return float(breaker.ramp) if breaker.ramp else max(pace * RAMP, LEAST_RAMP)
