"""Comparing what has failed in this process, on a thread of its own, and writing the tallies to the store."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from ...bridge import Bridge
from ...engine.forks import starting
from ...engine.runs import TaskPolicy
from ...errors import InvalidRetryPolicy, StoreError
from ...spec.failures import Outcome, cut
from ...spec.job import Job
from .budget import Budget
from .comparing import MAX_REASON, Native, Verdict, compare, told
from .guarding import harmless
from .tallying import BRIDGED, UNCOMPARED, Tallies

logger = logging.getLogger("ojs_bridge")

#: Seconds from one write to the next.
PERIOD = 5.0
#: How many failed runs wait to be compared at most.
LIMIT = 1_000
#: Seconds that the end of a process waits for the last write.
LAST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A failed run without its exception, which would keep its frames and their variables alive."""

    job: Job
    task: TaskPolicy
    outcome: Outcome
    native: Native
    at: datetime


class Recorder:
    """Takes failed runs from jobs' threads, which it keeps waiting for nothing, and compares them later.

    Its thread starts with the first failed run of a process, so that a forked child has its own, and nothing
    of its parent's.
    """

    def __init__(self, framework: str, bridge: Bridge, *, period: float = PERIOD) -> None:
        self._framework = framework
        self._bridge = bridge
        self._period = period
        self._pid = 0
        self._pending = Pending()

    def takes(self, task: str) -> bool:
        """Return whether a failed run of a task is to be compared; what is not, is counted."""
        self._begin()
        return self._pending.takes(task, time.monotonic(), time.process_time())

    def add(self, failed: FailedRun) -> None:
        """Have a failed run compared."""
        self._pending.add(failed)

    def add_bridged(self, task: str) -> None:
        """Count a failed run that was under the bridge already."""
        self._begin()
        self._pending.count(task, BRIDGED)

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Have what is pending written, and wait so long for it at most; never raises."""
        if self._pid == os.getpid():
            self._pid = 0
            self._pending.over.set()
            self._thread.join(seconds)

    def _begin(self) -> None:
        if self._pid == os.getpid():
            return
        with starting():
            if self._pid == os.getpid():
                return
            self._pending = pending = Pending()
            writer = Writer(self._framework, self._bridge)
            run = partial(writer.run, pending, self._period)
            self._thread = threading.Thread(target=run, name="ojs-shadow", daemon=True)
            self._thread.start()
            self._pid = os.getpid()


class Pending:
    """What waits to be compared and written in one process; `over` says that the process ends."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.over = threading.Event()
        self._limit = limit
        self._lock = threading.Lock()
        self._budget = Budget()
        self._failed: list[FailedRun] = []
        self._counted: Counter[tuple[str, str]] = Counter()

    def takes(self, task: str, now: float, used: float) -> bool:
        """Return whether there is room in the buffer and in the budget; otherwise count the run."""
        with self._lock:
            if len(self._failed) < self._limit and self._budget.take(task, now, used):
                return True
            self._counted[task, UNCOMPARED] += 1
            return False

    def add(self, failed: FailedRun) -> None:
        """Add a run to be compared."""
        with self._lock:
            self._failed.append(failed)

    def count(self, task: str, kind: str) -> None:
        """Count a run that is not compared."""
        with self._lock:
            self._counted[task, kind] += 1

    def take(self) -> tuple[list[FailedRun], Counter[tuple[str, str]]]:
        """Return all there is, and begin anew."""
        with self._lock:
            taken = self._failed, self._counted
            self._failed, self._counted = [], Counter()
        return taken


class Writer:
    """Compares failed runs and adds them to the store's tallies; a store that is down costs tallies only."""

    def __init__(self, framework: str, bridge: Bridge) -> None:
        self._bridge = bridge
        self._tallies = Tallies(framework, tell_messages=not bridge.engine.context.redactor)
        self._down = False

    def run(self, pending: Pending, period: float) -> None:
        """Write in each period, and once more at the end; never raises."""
        while not pending.over.wait(period):
            self.write(*pending.take())
        self.write(*pending.take())

    def write(self, failed: list[FailedRun], counted: Counter[tuple[str, str]]) -> None:
        """Write what there is; never raises."""
        with harmless("tallies are dropped"):
            for (task, kind), count in counted.items():
                self._tallies.count(task, kind, count)
            for run in failed:
                with harmless("a failed run cannot be compared"):
                    self._compare(run)
            self._store()

    def _compare(self, run: FailedRun) -> None:
        try:
            policy = run.task.for_job(run.job.retry)
        except InvalidRetryPolicy as error:
            native = told(run.native, run.job.attempt)
            verdict = Verdict("refused", native, "dead letter (invalid)", cut(str(error), MAX_REASON))
        else:
            capped = not run.task.keeps_waits(run.job.retry)
            verdict = compare(policy, run.job, run.outcome, run.native, now=run.at, capped=capped)
        self._tallies.add(run.job, run.outcome, verdict, run.at)

    def _store(self) -> None:
        tallies = self._tallies.taken(self._bridge.engine.now())
        if not tallies or self._bridge.store is None:
            return
        try:
            self._bridge.store.record_shadows(tallies)
        except StoreError as error:
            if not self._down:
                logger.error("shadow mode: tallies are dropped until the store works: %s", error)
            self._down = True
        else:
            self._down = False
