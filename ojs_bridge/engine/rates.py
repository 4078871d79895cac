"""The runs of a process are added up by job type, queue and outcome, and written to the store."""

from __future__ import annotations

import logging
import math
import os
import random
import threading
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import TypeAlias
from uuid import uuid4

from typing_extensions import assert_never

from ..errors import StoreError, Unstorable
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import VISIBILITY_TIMEOUT, WORKER_DEATH
from ..rules.job import Job, parse_time
from ..store import BOUNDS, SECONDS, Document, Documents, Rate
from .faults import Failures
from .running import Running
from .runs import Run
from .threads import keep_going, starting

logger = logging.getLogger("ojs_bridge")

#: The seconds between two writes.
PERIOD = 5.0
#: The largest number of ended runs that wait to be added up, and of counts that wait to be written.
MAX_ENDED, MAX_COUNTS = 100_000, 5_000
#: The job type and queue of the runs for which there is no room.
OTHER = "(other)"

#: The documents in which processes tell of their retries in the broker: their kind, after what time a process
#: begins a new one, and for how long they are read.
IN_BROKER, RENEWED, READ_FOR = "in-broker", timedelta(minutes=10), timedelta(hours=1)
#: The largest number of due times, queues and types that such a document tells apart.
MAX_WAITS = 2_000

_LOST = {VISIBILITY_TIMEOUT, WORKER_DEATH}
Key: TypeAlias = tuple[int, str, str, str]


class Rates:
    """Counts how runs end. A count costs a run no more than an append; a store that is away costs counts.

    A thread of the process writes what was counted, and which `runs` go on. A forked child has a thread of
    its own. `surely` is that of the Context.
    """

    def __init__(
        self,
        documents: Documents,
        clock: Callable[[], datetime],
        surely: Callable[[], datetime],
        soon: timedelta,
        runs: Callable[[], Iterable[Run]] = tuple,
        frameworks: Collection[str] = (),
        redacts: bool = False,
    ) -> None:
        self._documents, self._soon, self._runs = documents, soon, runs
        self._clock, self._surely = clock, surely
        self._frameworks, self._redacts = frameworks, redacts
        #: The process whose thread runs.
        self._pid = 0
        self._over = threading.Event()
        self._ended: deque[tuple[Job, Decision, float]] = deque(maxlen=MAX_ENDED)

    def count(self, job: Job, decision: Decision, seconds: float) -> None:
        """Count a run that took so long; raises RuntimeError where no thread can start."""
        if self._pid != os.getpid():
            self.start()
        self._ended.append((job, decision, seconds))

    def start(self) -> None:
        """Start the thread of this process, unless it runs; raises RuntimeError where none can start."""
        with starting.lock:
            if self._pid == os.getpid():
                return
            self._ended, self._over = deque(maxlen=MAX_ENDED), threading.Event()
            running = Running(self._documents, self._runs)
            failures = Failures(self._documents, self._frameworks, redacts=self._redacts)
            clocks = self._clock, self._surely
            sums = Sums(self._documents, *clocks, self._soon, self._ended, running, failures)
            self._thread = keep_going("ojs-rates", partial(self._keep_writing, sums, self._over))
            self._pid = os.getpid()

    def close(self, seconds: float) -> None:
        """Write what was counted, and wait for that for some seconds at most. A later start begins anew."""
        if self._pid == os.getpid():
            self._pid = 0
            self._over.set()
            self._thread.join(seconds)

    def _keep_writing(self, sums: Sums, over: threading.Event) -> bool:
        # The processes of a worker start at the same moment, and would wait for each other's writes.
        is_over = over.wait(PERIOD * random.uniform(0.8, 1.2))
        sums.write()
        return not is_over


class Sums:
    """The counts of a process that are not written yet."""

    def __init__(
        self,
        documents: Documents,
        clock: Callable[[], datetime],
        surely: Callable[[], datetime],
        soon: timedelta,
        ended: deque[tuple[Job, Decision, float]],
        running: Running,
        failures: Failures,
    ) -> None:
        self._failures = failures
        self._documents, self._clock, self._surely = documents, clock, surely
        self._soon, self._ended = soon, ended
        self._running = running
        self._waits = ShortWaits(documents, soon)
        self._counts: dict[Key, list[int]] = {}
        self._writer, self._number = uuid4().hex, 0
        self._batch: list[Rate] = []

    def write(self) -> None:
        """Add up what has ended, and write it; never raises. Without a store it waits for the next time."""
        with self._waiting():
            self._write_rates()
        with self._waiting():
            # It forgets the runs that have ended, whatever became of the rates.
            self._running.write(self._clock())
        now = self._clock()
        if self._failures:
            # The time of this write deletes what other processes have counted.
            with suppress(StoreError):
                now = self._surely()
        self._failures.write(now)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Let what an outage keeps from the store wait; other lines of the log tell of that."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, StoreError) or isinstance(error, Unstorable):
                self._counts, self._batch = {}, []
                logger.exception("rates: counts are dropped")

    def _write_rates(self) -> None:
        self._add_up()
        self._waits.write(self._clock())
        while self._batch or self._counts:
            self._write_batch()

    def _write_batch(self) -> None:
        """Write a batch. It stays as it is until it is written: the store may know its number."""
        if not self._batch:
            self._batch, self._counts = [*map(_rate, self._counts, self._counts.values())], {}
            self._number += 1
        self._documents.record_rates(self._batch, self._writer, self._number)
        self._batch = []

    def _add_up(self) -> None:
        now = self._clock()
        minute = int(now.timestamp()) // SECONDS["minute"]
        while self._ended:
            job, decision, seconds = self._ended.popleft()
            if isinstance(decision, RetryAt) and decision.delay <= self._soon.total_seconds():
                self._waits.add(job, decision.at)
            self._failures.add(job, decision, now)
            for outcome, took in outcomes(job, decision, seconds, now, self._soon):
                self._of(minute, job, outcome)[bisect_left(BOUNDS, took)] += 1

    def _of(self, minute: int, job: Job, outcome: str) -> list[int]:
        key = minute, job.type, job.queue, outcome
        if key not in self._counts and len(self._counts) >= MAX_COUNTS:
            key = minute, OTHER, OTHER, outcome
        return self._counts.setdefault(key, [0] * (len(BOUNDS) + 1))


class ShortWaits:
    """The retries that a process has sent to the broker, by the time at which they are due there.

    A document has them, so that others can count at any time those that still wait.
    """

    def __init__(self, documents: Documents, soon: timedelta) -> None:
        self._documents, self._writer = documents, uuid4().hex
        # Of a long time sixty steps are told apart.
        self._step = max(1, math.ceil(soon.total_seconds() / 60))
        self._due = Counter[tuple[int, str, str]]()
        self._document: Document | None = None
        self._is_told = True

    def add(self, job: Job, at: datetime) -> None:
        """Count a retry that is due at a time."""
        due = math.ceil(at.timestamp() / self._step) * self._step
        key = due, job.queue, job.type
        self._due[key if key in self._due or len(self._due) < MAX_WAITS else (due, OTHER, OTHER)] += 1
        self._is_told = False

    def write(self, now: datetime) -> None:
        """Write what waits, if it is more than was written; raises StoreError."""
        if self._is_told:
            return
        self._due = Counter({key: n for key, n in self._due.items() if key[0] > now.timestamp()})
        body = {"writer": self._writer, "due": [[*key, n] for key, n in self._due.items()]}
        if self._document is None or now - self._document.at > RENEWED:
            self._document = Document(IN_BROKER, uuid4().hex, now, body)
        else:
            self._document = replace(self._document, body=body, revision=self._document.revision + 1)
        self._documents.write(self._document)
        self._is_told = True


def _rate(key: Key, counts: list[int]) -> Rate:
    minute, type_, queue, outcome = key
    at = datetime.fromtimestamp(minute * SECONDS["minute"], timezone.utc)
    return Rate(at, type_, queue, outcome, tuple(counts))


def outcomes(
    job: Job, decision: Decision, seconds: float, now: datetime, soon: timedelta
) -> Iterator[tuple[str, float]]:
    """Yield the outcomes for which a run counts, each with a duration in seconds.

    A run has one of `completed`, `retried`, `snoozed`, `discarded` and `dead_lettered`, with the run's own
    duration. Beside it, `lost` counts attempts whose worker died; `exhausted` jobs without an attempt left;
    `waits_in_broker` retries that wait there, with their delays; `recovered` jobs that succeeded after a
    failure, with the time that this took; `replay_completed` and `replay_died` what became of replayed jobs.
    """
    match decision:
        case Complete():
            yield "completed", seconds
            yield from _beside_success(job, seconds, now)
        case RetryAt():
            yield "retried", seconds
            if decision.delay <= soon.total_seconds():
                yield "waits_in_broker", decision.delay
            if decision.failure.type in _LOST:
                yield "lost", seconds
        case SnoozeUntil():
            yield "snoozed", seconds
        case Discarded() | DeadLettered():
            yield "dead_lettered" if isinstance(decision, DeadLettered) else "discarded", seconds
            yield from ((outcome, seconds) for outcome in _beside_end(job, decision))
        case GiveBack():
            return
        case _:
            assert_never(decision)


def _beside_success(job: Job, seconds: float, now: datetime) -> Iterator[tuple[str, float]]:
    if job.replay_count:
        yield "replay_completed", seconds
    elif job.errors and (since := _first_seen(job)):
        yield "recovered", (now - since).total_seconds()


def _beside_end(job: Job, decision: Discarded | DeadLettered) -> Iterator[str]:
    if decision.cause == "exhausted":
        yield "exhausted"
    if decision.failure.type in _LOST:
        yield "lost"
    if job.replay_count:
        yield "replay_died"


def _first_seen(job: Job) -> datetime | None:
    """Return when a job was sent, or else when it failed first; None for a time that cannot be read."""
    try:
        return job.created_at or parse_time(str(job.errors[0].get("timestamp")))
    except ValueError:
        return None
