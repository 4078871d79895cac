"""The moment: what is known of a fleet now, for any number of viewers, and the verdict about it."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from ..engine.context import Context
from ..engine.running import RunningJob, Told, by_worker, running_in
from ..errors import StoreError
from ..rules.dependencies import Dependencies
from ..rules.facts import MINUTES, Facts, HostFacts, Minutes, Part, QueueFacts
from ..rules.job import format_time
from ..rules.rise import rate_of, rise_of
from ..rules.verdict import Verdict, verdict_of
from ..store import EVERYTHING, KINDS, Filter, Store, Unreadable
from .audit import Marks
from .bulk import Operations
from .group import ErrorGroup
from .groups import Groups
from .health import SECONDS, Probe, Question, Worker, Workers
from .holds import Holds
from .known import Known, by_minute, facts_of, sum_of
from .lately import Flows, Hour, LastHour, lately, whole_minute
from .operation import Operation

logger = logging.getLogger("ojs_bridge")

#: For so many seconds an answer is fresh: the store is asked no more often.
FRESH = 5.0
#: A store or a broker that has not answered for so many seconds is away. One that takes less long is slow.
SILENT = 15.0
#: The seconds that the first viewer waits for the store, since nothing is known before.
FIRST = 10.0
_LATE = "the store takes long to answer, and this is what it has told before"
_LATE_BROKER = "the broker takes long to answer, and its queues are"
#: How often the groups are read, in seconds, unless a new type dies.
GROUPS = 60.0
#: How long ago an operation may have ended that is still shown, and the most operations, groups, steady ones.
ENDED, MAX_OPERATIONS, MAX_GROUPS, MAX_STEADY = timedelta(minutes=15), 20, 50, 8
#: In so many steps the deaths of a group are counted.
STEPS = 12
#: A type dies if any of it died in so many last minutes.
DYING = 3


@dataclass(frozen=True, slots=True)
class Moment:
    """What is known at a time, and the verdict about it. Its JSON is that of `GET /admin/now`."""

    known: Known
    facts: Facts
    verdict: Verdict
    note: str = ""

    def to_ojs(self) -> dict[str, Any]:
        """Return the moment in JSON."""
        known, facts = self.known, self.facts
        workers = Workers(known.workers, known.at).living
        running = by_worker(known.running, {worker.name for worker in workers})
        return {
            "at": format_time(facts.at),
            "verdict": self.verdict.to_ojs(),
            "pulse": self._pulse(),
            "hill": {
                "since": format_time(known.hour.since),
                "step_seconds": 60,
                "deaths": [*facts.deaths],
                "usual": _rounded(facts.usual_deaths),
                "retries": [*self._retried],
                "usual_retries": _rounded(self._usual_retried),
                "marks": [mark.to_ojs() for mark in known.marks],
            },
            "groups": [group.to_ojs() for group in known.groups if group.is_live],
            "steady": [group.to_ojs() for group in known.groups if group.state == "steady"][:MAX_STEADY],
            "operations": [operation.to_ojs() for operation in known.operations],
            "queues": [*map(_queue, facts.queues)],
            "workers": [_worker(worker, running.get(worker.name), facts.at) for worker in workers],
            "holds": [hold.to_ojs() for hold in known.holds],
            "note": self.note,
        }

    @property
    def _retried(self) -> Minutes:
        return sum_of(one.retried for one in self.facts.types)

    @property
    def _usual_retried(self) -> tuple[float, ...] | None:
        return by_minute(self.known, lambda one: one.retried)

    def _pulse(self) -> dict[str, Any]:
        facts, seconds = self.facts, lately(self.facts.at)
        usual, usual_retried = facts.usual_deaths, self._usual_retried
        # What has just begun has a rate of its own, the same as in the sentence.
        rise = rise_of(facts.at, facts.deaths, None if usual is None else usual[-1])
        return {
            "store": _part(facts.store),
            "broker": _part(facts.broker),
            "workers": [*map(_host, facts.hosts)],
            "jobs_per_second": round(sum(facts.runs[-3:]) / seconds, 3),
            "usual_jobs_per_second": None if facts.usual_runs is None else round(facts.usual_runs / 60, 3),
            "deaths_per_minute": round(rise.rate if rise else rate_of(facts.at, facts.deaths), 3),
            "usual_deaths_per_minute": None if usual is None else round(usual[-1], 3),
            "retries_per_minute": round(rate_of(facts.at, self._retried), 3),
            "usual_retries_per_minute": None if usual_retried is None else round(usual_retried[-1], 3),
            "waits": {**self.known.waits, "in_broker": self.known.in_broker},
            "dead_letters": self.known.dead_letters,
        }


def _rounded(minutes: tuple[float, ...] | None) -> list[float] | None:
    return None if minutes is None else [round(one, 3) for one in minutes]


def _part(part: Part) -> dict[str, Any]:
    since = part.since and format_time(part.since)
    return {"status": part.status, "since": since, "message": part.message}


def _host(host: HostFacts) -> dict[str, Any]:
    is_silent = host.silent_since if not host.seen else None
    return {
        "framework": host.framework,
        "host": host.host,
        "seen": host.seen,
        "silent": host.silent,
        "silent_since": is_silent and format_time(is_silent),
    }


def _queue(queue: QueueFacts) -> dict[str, Any]:
    fields = {name: getattr(queue, name) for name in QueueFacts.__slots__}
    return {**fields, "oldest_at": queue.oldest_at and format_time(queue.oldest_at)}


def _worker(worker: Worker, told: Told | None, at: datetime) -> dict[str, Any]:
    def job(one: RunningJob) -> dict[str, Any]:
        seconds = max((at - one.since).total_seconds(), 0.0)
        return {"id": one.id, "type": one.type, "seconds": round(seconds, 1)}

    return {
        "name": worker.name,
        "host": worker.host,
        "framework": worker.framework,
        "seen_at": format_time(worker.seen_at),
        "runs": told.count if told else 0,
        "running": [job(one) for one in told.jobs] if told else [],
    }


class Now:
    """Finds out what is known now; any number of viewers get the same answer for some seconds."""

    def __init__(
        self,
        context: Context,
        probe: Probe,
        holds: Holds,
        operations: Operations,
        groups: Groups,
        dependencies: Dependencies,
        *,
        fail_open: bool,
    ) -> None:
        self._context, self._probe = context, probe
        self._reader = _Reader(context, holds, operations, groups)
        self._dependencies, self._fail_open = dependencies, fail_open
        self._flows = Flows()
        self._lock = threading.Lock()
        self._made: tuple[float, Moment] | None = None
        self._question: Question[Known] | None = None
        self._known: Known | None = None
        self._away: Part | None = None

    def moment(self) -> Moment:
        """Return what is known now; raises ConfigurationError without a store, and nothing else."""
        store = self._context.store_for("the moment")
        made = self._made
        # One asks. The others get what was known before, or wait if nothing was.
        if not self._lock.acquire(blocking=made is None) and made:
            return made[1]
        try:
            if self._made is None or time.monotonic() - self._made[0] >= FRESH:
                moment = self._make(store)
                self._made = time.monotonic(), moment
            return self._made[1]
        finally:
            self._lock.release()

    def _make(self, store: Store) -> Moment:
        seconds = SECONDS if self._known else max(SECONDS, FIRST)
        now, until = self._context.clock(), time.monotonic() + seconds
        question = self._ask(store)
        health = self._probe.check(seconds, SILENT, SECONDS)
        question.thread.join(max(0.0, until - time.monotonic()))
        part, note = self._hear(question, now)
        if self._known:
            told = health.checks["waiting"].facts.get("in_broker", {}).get("count", self._known.in_broker)
            self._known = replace(self._known, workers=self._probe.workers, in_broker=told)
        known = self._known or Known(now, Hour(whole_minute(now), [Counter() for _ in range(MINUTES)]))
        facts = facts_of(known, part, health, self._flows, self._dependencies, now, fail_open=self._fail_open)
        age = health.checks["backlog"].facts.get("age")
        queues = "not known" if age is None else f"those of {age:.0f} s ago"
        notes = [note, f"{_LATE_BROKER} {queues}" if facts.broker.status == "degraded" else ""]
        return Moment(known, facts, verdict_of(facts), "; ".join(filter(None, notes)))

    def _ask(self, store: Store) -> Question[Known]:
        """Ask the store, or go on to wait for the answer: threads without one must not pile up."""
        if self._question is not None and not self._question.thread.is_alive():
            # It has come since somebody waited for it.
            self._hear(self._question, self._context.clock())
        if self._question is None:
            self._question = Question("now", lambda: self._reader.read(store))
            self._question.thread.start()
        return self._question

    def _hear(self, question: Question[Known], now: datetime) -> tuple[Part, str]:
        """Return whether the store answers, and what it could not tell; take its answer if that has come."""
        waited = time.monotonic() - question.asked
        if question.answer is not None or question.error is not None:
            self._question = None
        if question.answer is not None:
            self._known, self._away = question.answer, None
            return Part("ok"), ""
        is_outage = isinstance(question.error, StoreError) and not isinstance(question.error, Unreadable)
        if is_outage or (question.error is None and waited > SILENT):
            message = str(question.error or f"no answer for {waited:.0f} s")
            self._away = Part("away", message, self._away.since if self._away else now)
        elif question.error is not None:
            logger.error("the moment: what the store has told cannot be read", exc_info=question.error)
            return Part("ok"), f"what the store has told cannot be read: {question.error!r}"
        if self._away:
            return self._away, ""
        return Part("degraded", _LATE), _LATE


class _Reader:
    """Reads what the store knows; the groups more seldom than the rest."""

    def __init__(self, context: Context, holds: Holds, operations: Operations, groups: Groups) -> None:
        self._context = context
        self._holds, self._operations, self._groups = holds, operations, groups
        self._marks = Marks(context)
        self._last_hour: LastHour | None = None
        #: The groups, when they were read, and the types that died then.
        self._known: tuple[Sequence[ErrorGroup], float, frozenset[str]] = ((), 0.0, frozenset())

    def read(self, store: Store) -> Known:
        """Return what the store knows; raises StoreError."""
        now, documents = self._context.clock(), store.documents
        if self._last_hour is None:
            self._last_hour = LastHour(documents)
        hour = self._last_hour.read(now)
        return Known(
            now,
            hour,
            (self._last_hour.usual(hour.since), self._last_hour.usual(now)),
            running_in(documents, now),
            {kind: store.parked.count(Filter(kind=kind)) for kind in KINDS},
            store.letters.count(EVERYTHING),
            self._marks.list(since=hour.since),
            self._groups_of(hour),
            self._shown_operations(now),
            self._holds.list(),
        )

    def _shown_operations(self, now: datetime) -> Sequence[Operation]:
        return [
            one
            for one in self._operations.list(limit=MAX_OPERATIONS)
            if not one.has_ended or one.updated_at > now - ENDED
        ]

    def _groups_of(self, hour: Hour) -> Sequence[ErrorGroup]:
        """Return the groups of the hour; they are read once a minute, or when a type dies that did not."""
        dying = frozenset(type_ for type_, (_, deaths, _) in hour.of_types().items() if any(deaths[-DYING:]))
        groups, read_at, types = self._known
        if time.monotonic() - read_at >= GROUPS or not dying <= types:
            groups = self._groups.list(since=hour.since, order="worst", limit=MAX_GROUPS, steps=STEPS)
            self._known = groups, time.monotonic(), dying
        return groups
