"""How many runs came to which outcome over time, from what workers have counted in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate
from typing import Any, TypeAlias

from ..engine.context import Context
from ..engine.rates import OTHER
from ..rules.job import format_time
from ..rules.patterns import check_pattern
from ..store import BOUNDS, SECONDS, Rate, Span, from_ms, index_text, matches, to_ms
from .letters import needed

#: What is shown without a `since`.
SHOWN = timedelta(days=1)
#: A longer time is shown by the hour. So is a time whose minutes the store has forgotten.
BY_MINUTE, MINUTES_KEPT = timedelta(hours=3), timedelta(hours=24)
LONGEST = timedelta(days=15)
#: The most job types that are told apart.
MAX_TYPES = 50
#: The outcomes whose durations are shown, and the shares of their runs.
TIMED = ("completed", "recovered")
QUANTILES = {"p50": 0.5, "p95": 0.95}

#: One number for each step.
Series: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RateHistory:
    """The number of runs in each step of time from `since` on, by job type and outcome.

    `seconds` has, for the outcomes `completed` and `recovered`, the median and the 95th percentile of each
    step, in seconds; None for a step without any.
    """

    since: datetime
    step: timedelta
    by_type: Mapping[str, Mapping[str, Series]]
    seconds: Mapping[str, Mapping[str, Sequence[float | None]]]

    def to_ojs(self) -> dict[str, Any]:
        """Return the history in JSON."""
        by_type = {
            type_: {outcome: [*series] for outcome, series in outcomes.items()}
            for type_, outcomes in self.by_type.items()
        }
        seconds = {
            outcome: {name: [*values] for name, values in quantiles.items()}
            for outcome, quantiles in self.seconds.items()
        }
        told = {"since": format_time(self.since), "step_seconds": self.step.total_seconds()}
        return {**told, "by_type": by_type, "seconds": seconds}


def history(
    context: Context,
    since: datetime | None,
    until: datetime | None,
    type_: str | None,
    queue: str | None,
) -> RateHistory:
    """Return the history of a time, which is empty where the time ends before it begins.

    Raises ConfigurationError without a store, ValueError for a pattern that is none, and StoreError.
    """
    check_pattern("type", type_)
    store, now = needed(context.store, "rates"), context.clock()
    until = max(min(until or now, now), now - LONGEST)
    since = min(max(since or until - SHOWN, now - LONGEST), until)
    span: Span = "minute" if until - since <= BY_MINUTE and now - since <= MINUTES_KEPT else "hour"
    step = SECONDS[span] * 1000
    first = to_ms(since) // step * step
    found = store.rates(from_ms(first), until, span) if since < until else []
    rates = [rate for rate in found if _is_wanted(rate, type_, queue)]
    steps = -(-(to_ms(until) - first) // step)
    places = [(to_ms(rate.at) - first) // step for rate in rates]
    return RateHistory(
        from_ms(first),
        timedelta(milliseconds=step),
        _by_type(rates, places, steps),
        {outcome: _seconds(rates, places, steps, outcome) for outcome in TIMED},
    )


def _is_wanted(rate: Rate, type_: str | None, queue: str | None) -> bool:
    return matches(rate.type, type_) and (queue is None or rate.queue == index_text(queue))


def _by_type(rates: Sequence[Rate], places: Sequence[int], steps: int) -> dict[str, dict[str, Series]]:
    totals = Counter[str]()
    for rate in rates:
        totals[rate.type] += sum(rate.counts)
    shown = {type_ for type_, _ in totals.most_common(MAX_TYPES)}
    found: dict[str, dict[str, list[int]]] = {}
    for rate, place in zip(rates, places, strict=True):
        outcomes = found.setdefault(rate.type if rate.type in shown else OTHER, {})
        outcomes.setdefault(rate.outcome, [0] * steps)[place] += sum(rate.counts)
    return {
        type_: {outcome: tuple(series) for outcome, series in sorted(outcomes.items())}
        for type_, outcomes in sorted(found.items())
    }


def _seconds(
    rates: Sequence[Rate], places: Sequence[int], steps: int, outcome: str
) -> dict[str, list[float | None]]:
    counts = [[0] * (len(BOUNDS) + 1) for _ in range(steps)]
    for rate, place in zip(rates, places, strict=True):
        if rate.outcome == outcome:
            counts[place] = [a + b for a, b in zip(counts[place], rate.counts, strict=True)]
    return {name: [quantile(one, share) for one in counts] for name, share in QUANTILES.items()}


def quantile(counts: Sequence[int], share: float) -> float | None:
    """Return the duration that a share of the runs did not exceed; None without runs.

    It may lie between two bounds. Of what took longer than the last bound, only that bound is known.
    """
    wanted = share * sum(counts)
    if not wanted:
        return None
    for place, reached in enumerate(accumulate(counts[:-1])):
        if reached >= wanted:
            below = BOUNDS[place - 1] if place else 0.0
            part = 1 - (reached - wanted) / counts[place]
            return round(below + (BOUNDS[place] - below) * part, 6)
    return float(BOUNDS[-1])
