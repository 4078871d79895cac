"""Compares the failed runs of a process on a thread of its own, and adds them to the store's tallies."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...bridge import Bridge
from ...engine.periodic import LAST_SECONDS, PERIOD, Periodic
from ...engine.runs import TaskPolicy
from ...errors import ConfigurationError, InvalidRetryPolicy, StoreError
from ...spec.failures import Failure, Outcome, cut
from ...spec.job import Job, format_time
from ...store import Tally
from .comparing import MAX_REASON, UNCOMPARED, Native, Verdict, compare, told

logger = logging.getLogger("ojs_bridge")

#: The largest number of failed runs that wait to be compared.
LIMIT = 1_000
#: The number of compared runs per second of the process's CPU time, on average, and at once.
COMPARED_PER_SECOND, COMPARED_AT_ONCE = 25, 100
#: The number of examples for each kind of difference.
EXAMPLES = 3
MAX_MESSAGE = 200
MAX_ID = 255
#: The seconds between two log lines of one kind.
_SILENT_SECONDS = 60.0
_said: dict[str, float] = {}


@contextmanager
def harmless(what: str) -> Iterator[None]:
    """Log any exception in the block, once a minute, and go on; even SystemExit from a `__str__`.

    Only our own errors are logged in full: another message may hold arguments, or raise.
    """
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - shadow mode may fail no job
        now = time.monotonic()
        if now - _said.get(what, float("-inf")) >= _SILENT_SECONDS:
            _said[what] = now
            with suppress(BaseException):
                known = isinstance(error, ConfigurationError | InvalidRetryPolicy)
                text = f"{type(error).__name__}: {error}" if known else type(error).__name__
                logger.error("shadow mode: %s: %s", what, text)


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A failed run. An exception would keep its frames and their variables alive, so there is none."""

    job: Job
    task: TaskPolicy
    outcome: Outcome
    native: Native
    at: datetime


class Budget:
    """A token bucket for comparisons. Each task has one run per second, so that rare tasks are always seen.

    The bucket fills with the CPU time of the process. That bounds the share of comparing in it, even on a
    busy machine and for failed runs that take hardly any time.
    """

    def __init__(self, per_second: int = COMPARED_PER_SECOND, at_once: int = COMPARED_AT_ONCE) -> None:
        self._per_second, self._at_once = per_second, at_once
        self._left = float(at_once)
        self._used = 0.0
        self._taken: dict[str, float] = {}

    def take(self, task: str, now: float, used: float) -> bool:
        """Return whether a failed run is compared, at a monotonic time and after `used` CPU seconds."""
        self._left = min(self._left + (used - self._used) * self._per_second, self._at_once)
        self._used = used
        if self._left >= 1:
            self._left -= 1
        elif now - self._taken.get(task, float("-inf")) < 1:
            return False
        self._taken[task] = now
        return True


class Pending:
    """The failed runs of a process that wait to be compared."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._budget = Budget()
        self._failed: list[FailedRun] = []
        self._counted: Counter[tuple[str, str]] = Counter()

    def takes(self, task: str) -> bool:
        """Return whether buffer and budget have room for a run; if not, count it as not compared."""
        with self._lock:
            used = time.monotonic(), time.process_time()
            if len(self._failed) < self._limit and self._budget.take(task, *used):
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
        """Return all runs and counts, and begin anew."""
        with self._lock:
            taken = self._failed, self._counted
            self._failed, self._counted = [], Counter()
        return taken


class Recorder:
    """Has failed runs compared on a thread of its own, so that no job waits for that.

    The thread starts with the first failed run of a process. So a forked child has its own thread and runs.
    """

    def __init__(self, framework: str, bridge: Bridge, *, period: float = PERIOD) -> None:
        self._framework = framework
        self._bridge = bridge
        self._periodic = Periodic("ojs-shadow", self._begin, period)
        self._pending = Pending()

    @property
    def pending(self) -> Pending:
        """The failed runs of this process. The first call starts its thread."""
        self._periodic.start()
        return self._pending

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Have the pending runs written, and wait for that for some seconds at most; never raises."""
        self._periodic.close(seconds)

    def _begin(self) -> Callable[[], None]:
        self._pending = pending = Pending()
        writer = Writer(self._framework, self._bridge)
        return lambda: writer.write(*pending.take())


class Writer:
    """Compares failed runs and adds them to the store's tallies. A store that is away costs tallies only."""

    def __init__(self, framework: str, bridge: Bridge) -> None:
        self._framework = framework
        self._bridge = bridge
        self._down = False
        #: The explanation and the newest examples of each kind of difference, by task and kind.
        self._differences: dict[tuple[str, str], tuple[str, deque[Mapping[str, Any]]]] = {}

    def write(self, failed: list[FailedRun], counted: Counter[tuple[str, str]]) -> None:
        """Compare runs, and write their tallies; never raises."""
        with harmless("tallies are dropped"):
            counts = Counter(counted)
            for run in failed:
                with harmless("a failed run cannot be compared"):
                    verdict = _verdict(run)
                    counts[run.job.type, verdict.kind] += 1
                    if verdict.kind != "same":
                        self._keep(run, verdict)
            now = self._bridge.engine.now()
            self._store([self._tally(*key, count, now) for key, count in counts.items()])

    def _keep(self, run: FailedRun, verdict: Verdict) -> None:
        """Keep a difference as an example."""
        failure = run.outcome if isinstance(run.outcome, Failure) else None
        message = failure.message if failure and not self._bridge.engine.context.redactor else ""
        example = {
            "job_id": cut(run.job.id, MAX_ID),
            "attempt": run.job.attempt,
            "at": format_time(run.at),
            "error_type": failure.type if failure else type(run.outcome).__name__.lower(),
            "message": cut(message, MAX_MESSAGE),
            "native": verdict.native,
            "ojs": verdict.ojs,
        }
        key = run.job.type, verdict.kind
        _, examples = self._differences.get(key, ("", deque(maxlen=EXAMPLES)))
        examples.append(example)
        self._differences[key] = verdict.explanation, examples

    def _tally(self, task: str, kind: str, count: int, now: datetime) -> Tally:
        explanation, examples = self._differences.get((task, kind), ("", ()))
        return Tally(self._framework, task, kind, count, now, explanation, tuple(examples))

    def _store(self, tallies: list[Tally]) -> None:
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


def _verdict(run: FailedRun) -> Verdict:
    try:
        policy = run.task.for_job(run.job.retry)
    except InvalidRetryPolicy as error:
        native = told(run.native, run.job.attempt)
        return Verdict("refused", native, "dead letter (invalid)", cut(str(error), MAX_REASON))
    capped = not run.task.layers.of_job(run.job.retry).waits_are_native
    return compare(policy, run.job, run.outcome, run.native, now=run.at, capped=capped)
