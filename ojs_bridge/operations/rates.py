"""How many runs came to which outcome over time, from what workers have counted in the store."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import accumulate, takewhile
from typing import Any, TypeAlias

from ..engine.context import Context
from ..engine.rates import IN_BROKER, OTHER, READ_FOR
from ..rules.job import format_time
from ..store import (
    BOUNDS,
    EVERYTHING,
    SECONDS,
    Documents,
    Filter,
    Rate,
    Span,
    from_ms,
    index_text,
    matches,
    readable,
    to_ms,
)
from .letters import READ, every_page

#: What is shown without a `since`.
SHOWN = timedelta(days=1)
#: A longer time is shown by the hour. So is a time whose minutes the store has forgotten.
BY_MINUTE, MINUTES_KEPT = timedelta(hours=3), timedelta(hours=24)
LONGEST = timedelta(days=15)
#: The most job types that are counted apart.
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
    step, in seconds; None for a step without any. `seconds_by_type` has those of the runs of each type that
    succeeded, over all of the time.
    """

    since: datetime
    step: timedelta
    by_type: Mapping[str, Mapping[str, Series]]
    seconds: Mapping[str, Mapping[str, Sequence[float | None]]]
    seconds_by_type: Mapping[str, Mapping[str, float | None]]

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
        span = {"since": format_time(self.since), "step_seconds": self.step.total_seconds()}
        seconds_by_type = {type_: {**quantiles} for type_, quantiles in self.seconds_by_type.items()}
        return {**span, "by_type": by_type, "seconds": seconds, "seconds_by_type": seconds_by_type}


def history(context: Context, where: Filter) -> RateHistory:
    """Return the history of a time, of a queue and of job types; it is empty where the time ends too early.

    Raises ConfigurationError without a store, and StoreError.
    """
    documents, now = context.store_for("rates").documents, context.clock()
    until = max(min(where.until or now, now), now - LONGEST)
    since = min(max(where.since or until - SHOWN, now - LONGEST), until)
    span: Span = "minute" if until - since <= BY_MINUTE and now - since <= MINUTES_KEPT else "hour"
    step = SECONDS[span] * 1000
    first = to_ms(since) // step * step
    counted = documents.rates(from_ms(first), until, span) if since < until else []
    queue = where.queue and index_text(where.queue)
    rates = [rate for rate in counted if matches(rate.type, where.type) and queue in (None, rate.queue)]
    steps = -(-(to_ms(until) - first) // step)
    places = [(to_ms(rate.at) - first) // step for rate in rates]
    return RateHistory(
        from_ms(first),
        timedelta(milliseconds=step),
        _by_type(rates, places, steps),
        {outcome: _seconds(rates, places, steps, outcome) for outcome in TIMED},
        _seconds_by_type(rates),
    )


@dataclass(frozen=True, slots=True)
class InBroker:
    """The retries that are due soon, and wait in the broker: their number, and when the first is due."""

    count: int = 0
    next_due_at: datetime | None = None

    def to_ojs(self) -> dict[str, Any]:
        """Return it in JSON."""
        return {"count": self.count, "next_due_at": self.next_due_at and format_time(self.next_due_at)}


def in_broker(documents: Documents, now: datetime, where: Filter = EVERYTHING) -> InBroker:
    """Count the retries of a queue and of job types that workers have sent, and that are not due.

    Workers tell of them every five seconds. Raises StoreError.
    """
    waits = due_in_broker(documents, now, where)
    return InBroker(waits.total(), min(waits)) if waits else InBroker()


def due_in_broker(documents: Documents, now: datetime, where: Filter = EVERYTHING) -> Counter[datetime]:
    """Count these retries by the time at which they are due; raises StoreError."""
    seen, waits = set[str](), Counter[datetime]()
    pages = every_page(lambda cursor: documents.list(IN_BROKER, limit=READ, cursor=cursor))
    told = (document for page in pages for document in page.documents)
    lately = takewhile(lambda document: document.at > now - READ_FOR, told)
    for writer, rows in readable(lately, lambda one: (str(one.body["writer"]), [*one.body["due"]])):
        # The newest document of a process has all of its retries.
        if writer not in seen:
            seen.add(writer)
            for due, queue, type_, count in readable(rows, _wait_in):
                if due > now and where.queue in (None, queue) and matches(type_, where.type):
                    waits[due] += count
    return waits


def _wait_in(row: Sequence[Any]) -> tuple[datetime, str, str, int]:
    due, queue, type_, count, *_ = row
    return from_ms(due * 1000), str(queue), str(type_), int(count)


def _by_type(rates: Sequence[Rate], places: Sequence[int], steps: int) -> dict[str, dict[str, Series]]:
    totals = Counter[str]()
    for rate in rates:
        totals[rate.type] += sum(rate.counts)
    shown = {type_ for type_, _ in totals.most_common(MAX_TYPES)}
    by_type: dict[str, dict[str, list[int]]] = {}
    for rate, place in zip(rates, places, strict=True):
        outcomes = by_type.setdefault(rate.type if rate.type in shown else OTHER, {})
        outcomes.setdefault(rate.outcome, [0] * steps)[place] += sum(rate.counts)
    return {
        type_: {outcome: tuple(series) for outcome, series in sorted(outcomes.items())}
        for type_, outcomes in sorted(by_type.items())
    }


def _seconds(
    rates: Sequence[Rate], places: Sequence[int], steps: int, outcome: str
) -> dict[str, list[float | None]]:
    counts = [[0] * (len(BOUNDS) + 1) for _ in range(steps)]
    for rate, place in zip(rates, places, strict=True):
        if rate.outcome == outcome:
            counts[place] = [a + b for a, b in zip(counts[place], rate.counts, strict=True)]
    return {name: [quantile(one, share) for one in counts] for name, share in QUANTILES.items()}


def _seconds_by_type(rates: Sequence[Rate]) -> dict[str, dict[str, float | None]]:
    counts: dict[str, list[int]] = {}
    for rate in rates:
        if rate.outcome == "completed":
            before = counts.get(rate.type, [0] * len(rate.counts))
            counts[rate.type] = [a + b for a, b in zip(before, rate.counts, strict=True)]
    most = sorted(counts, key=lambda type_: -sum(counts[type_]))[:MAX_TYPES]
    return {
        type_: {name: quantile(counts[type_], share) for name, share in QUANTILES.items()}
        for type_ in sorted(most)
    }


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
