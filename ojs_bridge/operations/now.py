"""The moment: what is known of a fleet now, for any number of viewers, and the verdict about it."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from ..engine.context import Context
from ..errors import StoreError
from ..rules.facts import MINUTES, Facts, HostFacts, Minutes, Part, QueueFacts, TypeFacts
from ..rules.faults import LIVE
from ..rules.job import format_time, parse_time
from ..rules.verdict import Verdict, verdict_of
from ..store import EVERYTHING, KINDS, Filter, Rate, Store, from_ms, to_ms
from .audit import Mark, Marks
from .bulk import Operations
from .group import ErrorGroup
from .groups import Groups
from .health import SECONDS, Health, Probe, Worker
from .holds import Holds, Shown
from .operation import Operation

#: For so many seconds an answer is fresh: the store is asked no more often.
FRESH = 5.0
#: The outcomes that are deaths, and those of all runs.
DEATHS = ("dead_lettered", "discarded")
RUNS = ("completed", "retried", *DEATHS)
#: How long ago an operation may have ended that is still shown, and the most groups.
ENDED, MAX_GROUPS = timedelta(minutes=15), 10


@dataclass(frozen=True, slots=True)
class Known:
    """What the store has told at a time."""

    at: datetime
    since: datetime
    rates: Sequence[Rate] = ()
    waits: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    dead_letters: int = 0
    marks: Sequence[Mark] = ()
    groups: Sequence[ErrorGroup] = ()
    operations: Sequence[Operation] = ()
    holds: Sequence[Shown] = ()


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known at a time, and the verdict about it. Its JSON is that of `GET /admin/now`."""

    known: Known
    facts: Facts
    workers: Sequence[Worker]
    in_broker: int
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether it is bad now."""
        return verdict_of(self.facts)

    def to_ojs(self) -> dict[str, Any]:
        """Return the moment in JSON."""
        known, facts = self.known, self.facts
        return {
            "at": format_time(known.at),
            "verdict": self.verdict.to_ojs(),
            "pulse": self._pulse(),
            "hill": {
                "since": format_time(known.since),
                "step_seconds": 60,
                "deaths": [*facts.deaths],
                "usual": None,
                "marks": [mark.to_ojs() for mark in known.marks],
            },
            "groups": [group.to_ojs() for group in known.groups],
            "operations": [operation.to_ojs() for operation in known.operations],
            "queues": [_queue(queue) for queue in facts.queues],
            "workers": [_worker(worker) for worker in self.workers],
            "holds": [hold.to_ojs() for hold in known.holds],
            "note": self.note,
        }

    def _pulse(self) -> dict[str, Any]:
        facts = self.facts
        runs = [sum(one) for one in zip(*(each.runs for each in facts.types), strict=True)]
        return {
            "store": _part(facts.store),
            "broker": _part(facts.broker),
            "workers": [
                {
                    "framework": host.framework,
                    "host": host.host,
                    "seen": host.seen,
                    "silent_since": host.silent_since and format_time(host.silent_since),
                }
                for host in facts.hosts
            ],
            "jobs_per_second": _lately(runs) / 60,
            "usual_jobs_per_second": None,
            "deaths_per_minute": _lately(facts.deaths),
            "usual_deaths_per_minute": None,
            "waits": {**self.known.waits, "in_broker": self.in_broker},
            "dead_letters": self.known.dead_letters,
        }


def _lately(minutes: Sequence[int]) -> float:
    """Return how many there were a minute lately."""
    return sum(minutes[-4:-1]) / 3


def _part(part: Part) -> dict[str, Any]:
    since = part.since and format_time(part.since)
    return {"status": part.status, "since": since, "message": part.message}


def _queue(queue: QueueFacts) -> dict[str, Any]:
    fields = {name: getattr(queue, name) for name in QueueFacts.__slots__}
    return {**fields, "oldest_at": queue.oldest_at and format_time(queue.oldest_at)}


def _worker(worker: Worker) -> dict[str, Any]:
    return {
        "name": worker.name,
        "host": worker.host,
        "framework": worker.framework,
        "seen_at": format_time(worker.seen_at),
        "running": [],
    }


class Now:
    """Finds out what is known now; any number of viewers get the same answer for some seconds."""

    def __init__(
        self, context: Context, probe: Probe, holds: Holds, operations: Operations, groups: Groups
    ) -> None:
        self._context, self._probe = context, probe
        self._holds, self._operations, self._groups = holds, operations, groups
        self._marks = Marks(context)
        self._lock = threading.Lock()
        self._made: tuple[float, Moment] | None = None
        self._known: Known | None = None

    def moment(self) -> Moment:
        """Return what is known now; raises ConfigurationError without a store, and nothing else."""
        store = self._context.store_for("the moment")
        with self._lock:
            if self._made is None or time.monotonic() - self._made[0] >= FRESH:
                self._made = time.monotonic(), self._make(store)
            return self._made[1]

    def _make(self, store: Store) -> Moment:
        now = self._context.clock()
        health = self._probe.check(SECONDS)
        part = _part_of(health, "store")
        if part.status != "away":
            try:
                self._known = self._read(store, now)
            except StoreError as error:
                part = Part("away", str(error), now)
        since = _minute_of(now) - timedelta(minutes=MINUTES - 1)
        known = self._known or Known(now, since)
        types = _types(known)
        facts = Facts(
            known.at,
            part,
            _part_of(health, "broker"),
            _sum([one.deaths for one in types]),
            types,
            _queues(health, known),
            tuple(HostFacts(row["framework"], row["host"], row["seen"]) for row in _rows(health, "hosts")),
        )
        short = health.checks["waiting"].facts.get("in_broker", {}).get("count", 0)
        return Moment(known, facts, self._probe.living(), short)

    def _read(self, store: Store, now: datetime) -> Known:
        since = _minute_of(now) - timedelta(minutes=MINUTES - 1)
        return Known(
            now,
            since,
            store.documents.rates(since, now, "minute"),
            {kind: store.parked.count(Filter(kind=kind)) for kind in KINDS},
            store.letters.count(EVERYTHING),
            self._marks.list(since=since),
            self._groups.list(since=since, state=LIVE, limit=MAX_GROUPS),
            [one for one in self._operations.list(limit=20) if _is_shown(one, now)],
            self._holds.list(),
        )


def _is_shown(operation: Operation, now: datetime) -> bool:
    return not operation.has_ended or operation.updated_at > now - ENDED


def _minute_of(at: datetime) -> datetime:
    return from_ms(to_ms(at) // 60_000 * 60_000)


def _part_of(health: Health, name: str) -> Part:
    check = health.checks[name]
    since = check.facts.get("away_since")
    return Part(check.status, check.message, since and parse_time(since))


def _rows(health: Health, name: str) -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = health.checks["workers"].facts.get(name, ())
    return rows


def _types(known: Known) -> tuple[TypeFacts, ...]:
    types = sorted({rate.type for rate in known.rates})
    return tuple(
        TypeFacts(
            type_,
            *(_minutes(known, lambda rate, t=type_, o=outcomes: rate.type == t and rate.outcome in o)  # type: ignore[misc]
              for outcomes in (RUNS, DEATHS, ("retried",))),
        )
        for type_ in types
    )  # fmt: skip


def _minutes(known: Known, is_one: Callable[[Rate], bool]) -> Minutes:
    counts = Counter[int]()
    for rate in known.rates:
        if is_one(rate):
            counts[(to_ms(rate.at) - to_ms(known.since)) // 60_000] += sum(rate.counts)
    return tuple(counts[place] for place in range(MINUTES))


def _sum(series: Sequence[Minutes]) -> Minutes:
    return tuple(map(sum, zip(*series, strict=True))) if series else (0,) * MINUTES


def _queues(health: Health, known: Known) -> tuple[QueueFacts, ...]:
    workers = {(row["framework"], row["queue"]): row["seen"] for row in _rows(health, "queues")}
    backlog = {
        (row["framework"], row["queue"]): row for row in health.checks["backlog"].facts.get("queues", ())
    }
    paused = {shown.hold.queue for shown in known.holds}
    found = []
    for framework, queue in sorted({*workers, *backlog}):
        row = backlog.get((framework, queue), {})
        out = _lately(_minutes(known, lambda rate, q=queue: rate.queue == q and rate.outcome in RUNS))  # type: ignore[misc]
        oldest = row.get("oldest_at")
        found.append(
            QueueFacts(
                framework,
                queue,
                row.get("depth"),
                oldest and parse_time(oldest),
                None,
                out / 60,
                None,
                queue in paused,
                workers.get((framework, queue), 0),
            )
        )
    return tuple(found)
