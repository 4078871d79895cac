"""Jobs of a user's transaction: they are published as soon as it has committed.

Any worker publishes them, too, within a second: what a killed process leaves, waits in the store, and is due.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from ..errors import StoreError, Unreachable
from ..store import Due, Parked, Transaction
from .context import Context
from .scheduler import Scheduler
from .threads import keep_going, starting

logger = logging.getLogger("ojs_bridge")

#: What is due later than that is delayed. The time of a job is rounded up to a millisecond.
MOMENT = timedelta(milliseconds=1)
#: How long the store is asked for a job whose transaction does not say when it has committed. A worker asks
#: for all jobs each second, which is as often as this asks at the end.
ASKING_SECONDS = 10.0
#: The shortest pause between two questions for a job; the longest is a tenth of the job's age.
PAUSE_SECONDS = 0.01
#: How long a job is claimed: if this process is killed meanwhile, workers publish the job afterwards.
CLAIM = timedelta(seconds=10)
#: How long a process that ends goes on to publish.
LAST_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Expected:
    """A job that may be there soon: asked for at `next`, until `last`; all are monotonic times."""

    framework: str
    key: str
    since: float
    next: float
    last: float

    def again(self, now: float) -> Expected:
        """Return when to ask for it next."""
        return replace(self, next=now + max(PAUSE_SECONDS, (now - self.since) / 10))


class Outbox:
    """Writes jobs in transactions of a user's, and has a thread that publishes them after the commit."""

    def __init__(self, context: Context, give_up: Callable[[Parked, Exception], None]) -> None:
        self._context, self._give_up = context, give_up
        self._asking: _Asking | None = None

    def join(self, connection: Any) -> Transaction:
        """Return the open transaction of a connection; raises NotInTransaction and ConfigurationError."""
        return self._context.store_for("jobs of a transaction").join(connection)

    def joined(self) -> Transaction | None:
        """Return the transaction of Django's that this thread is in, or None; raises as `join` does."""
        return self._context.store_for("jobs of a transaction").joined()

    def put(self, transaction: Transaction, parked: Parked) -> None:
        """Write a job in a transaction; raises StoreError."""
        transaction.park(parked)
        if parked.next_retry_at > parked.parked_at + MOMENT:
            return
        if not transaction.then(lambda: self.expect(parked, 0.0)):
            self.expect(parked, ASKING_SECONDS)

    def expect(self, parked: Parked, seconds: float) -> None:
        """Have a job published as soon as it is there, if that is within some seconds; never raises."""
        if parked.framework not in self._context.publishers:
            return  # a worker of its framework publishes it
        now = time.monotonic()
        first = now + PAUSE_SECONDS if seconds else now
        try:
            asking = self._asking
            if asking is None or not asking.is_ours:
                asking = self._start()
            asking.told.put(Expected(parked.framework, parked.key, now, first, now + seconds))
        except Exception as error:  # noqa: BLE001 - the job is written, and workers publish it
            logger.debug("job %s: a worker publishes it: %r", parked.id, error)

    def close(self) -> None:
        """Publish what is there now, and end the thread; a later job starts another."""
        asking, self._asking = self._asking, None
        atexit.unregister(self.close)
        if asking is not None and asking.is_ours:
            asking.end()

    def _start(self) -> _Asking:
        context, store = self._context, self._context.store_for("jobs of a transaction")
        parts = store.parked, store.reservations, context.publishers, context.clock, self._give_up
        with starting.lock:
            if self._asking is None or not self._asking.is_ours:
                self._asking = _Asking(Scheduler(*parts))
                # The thread would end with the process, in the midst of its work.
                atexit.register(self.close)
            return self._asking


class _Asking:
    """The thread of one process that asks the store for jobs, and publishes those that are there."""

    def __init__(self, scheduler: Scheduler) -> None:
        #: The jobs that were sent; None after the last one.
        self.told: queue.SimpleQueue[Expected | None] = queue.SimpleQueue()
        self._scheduler = scheduler
        self._expected: dict[str, Expected] = {}
        self._pid = os.getpid()
        self._thread = keep_going("ojs-outbox", self._round)

    @property
    def is_ours(self) -> bool:
        """Whether the thread is of this process; a forked child has none."""
        return self._pid == os.getpid()

    def end(self) -> None:
        """Ask for all jobs once more, and end the thread; wait for it, but not for long."""
        self.told.put(None)
        self._thread.join(LAST_SECONDS)

    def _round(self) -> bool:
        """Hear of new jobs, and ask for those for which it is time."""
        goes_on = self._hear()
        now = time.monotonic()
        asked = [each for each in self._expected.values() if each.next <= now or not goes_on]
        for framework in {each.framework for each in asked}:
            keys = [each.key for each in asked if each.framework == framework]
            try:
                self._publish(framework, keys)
            except (StoreError, Unreachable):  # they are left to the workers
                for key in keys:
                    self._expected.pop(key, None)
        for each in asked:
            if each.last <= now:
                self._expected.pop(each.key, None)
            elif each.key in self._expected:
                self._expected[each.key] = each.again(now)
        return goes_on

    def _hear(self) -> bool:
        """Wait until it is time to ask for a job, or until one was sent; return False after the last one."""
        soonest = min((each.next for each in self._expected.values()), default=None)
        pause = None if soonest is None else max(0.0, soonest - time.monotonic())
        with suppress(queue.Empty):
            while (each := self.told.get(timeout=pause)) is not None:
                self._expected[each.key] = each
                pause = 0.0
            return False
        return True

    def _publish(self, framework: str, keys: Sequence[str]) -> None:
        """Publish the jobs that are there, in the order in which they were sent."""
        scheduler, ends = self._scheduler, time.monotonic() + CLAIM.total_seconds() / 2
        due = self._claim(keys)
        ours = [each.key for each in self._expected.values() if each.framework == framework]
        if due.retries and len(keys) < len(ours):
            # Jobs that were sent before these may have been committed since they were asked for.
            scheduler.parked.unclaim(due.retries, due.claim)
            due = self._claim(ours)
        if not due.retries:
            return
        places = {key: place for place, key in enumerate(ours)}
        for parked in due.retries:
            del self._expected[parked.key]
        in_order = tuple(sorted(due.retries, key=lambda parked: places[parked.key]))
        scheduler.publish(replace(due, retries=in_order), scheduler.publishers[framework], ends)

    def _claim(self, keys: Sequence[str]) -> Due:
        now = self._scheduler.clock()
        return self._scheduler.parked.claim(keys, now=now, until=now + CLAIM)
