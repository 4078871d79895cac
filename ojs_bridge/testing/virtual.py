"""Virtual time for the jobs of a test: each delay is jumped over, and each attempt is run for real."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from ..bridge import Bridge
from ..engine.events import Event
from ..engine.scheduler import Scheduler
from ..operations.letters import MAX_PAGE, every_page
from ..rules.duration import read_duration
from ..store import Letter, Parked
from .bridging import Clock, VirtualBridge, WorkerDied
from .jobs import Job, jobs_of
from .working import Agenda, Handler, VirtualWorker, instance_of

#: After so many deliveries in one run a test is told that its jobs do not end.
MOST = 10_000


class NothingRan(AssertionError):
    """A test let jobs run, and there was none."""


class VirtualTime:
    """The jobs of an app or broker in a test, in memory, and under a clock that the test moves.

    `bridge` is the bridge of the app or broker; its store is in memory.
    """

    def __init__(self, bridge: VirtualBridge, clock: Clock, agenda: Agenda, worker: VirtualWorker) -> None:
        self.bridge: Bridge = bridge
        self._engine = bridge.engine
        self._recorder = bridge.recorder
        self._clock, self._agenda, self._worker = clock, agenda, worker
        publishers = self._engine.context.publishers
        self._publisher = publishers[worker.framework]
        self._scheduler = Scheduler(bridge.store, publishers, clock, self._engine.give_up)
        self._failures: defaultdict[str, deque[BaseException | type[BaseException]]] = defaultdict(deque)
        self._delivering = False
        self._dues: list[datetime] = []
        self._engine.parked_until = self._parked_until

    @property
    def now(self) -> datetime:
        """The time of the clock, in UTC; it begins at the real time."""
        return self._clock()

    @property
    def elapsed(self) -> timedelta:
        """For how long the clock has run."""
        return self._clock.elapsed

    @property
    def events(self) -> list[Event]:
        """All events of the jobs, in order."""
        return list(self._recorder.events)

    @property
    def jobs(self) -> list[Job]:
        """All jobs that have begun, in order."""
        return jobs_of(self._recorder.events)

    @property
    def dead_letters(self) -> tuple[Letter, ...]:
        """The dead letters, newest first."""
        read = self.bridge.dead_letters.list
        pages = every_page(lambda cursor: read(limit=MAX_PAGE, cursor=cursor))
        return tuple(letter for page in pages for letter in page.letters)

    @property
    def parked(self) -> tuple[Parked, ...]:
        """The retries that wait in the store, the next one due first."""
        read = self.bridge.retries.list
        pages = every_page(lambda cursor: read(limit=MAX_PAGE, cursor=cursor))
        return tuple(retry for page in pages for retry in page.retries)

    def run(self) -> Job:
        """Run all that there is to run, and jump over every delay; return the job that began first.

        Raises NothingRan, and RuntimeError for jobs that do not end.
        """
        return self._told(self._go)

    def step(self) -> Job:
        """Run one attempt, and jump over the delay before it; return its job. Raises NothingRan."""
        return self._told(self._go_once)

    def advance(self, time: str | timedelta) -> None:
        """Let time pass, such as `"PT1H"`; what is due meanwhile is run at its time."""
        until = self._clock() + read_duration(time)
        self._go(until)
        self._clock.move(until)

    def crash(self) -> None:
        """Kill the worker of the next attempt as the attempt begins.

        Called in a task, kill the worker of this attempt at once. The attempt is lost: when its reservation
        has run out, its policy decides.
        """
        if self._delivering:
            self._engine.die()
        self._engine.deaths += 1

    def fail(self, task: Any, error: BaseException | type[BaseException], times: int = 1) -> None:
        """Have a task or actor, or the one of this name, raise an error instead of its next runs."""
        name: str = getattr(task, "actor_name", None) or getattr(task, "name", task)
        if name not in self._failures:
            self._worker.put_in(name, lambda own: _failing(own, self._failures[name]))
        self._failures[name].extend([error] * times)

    def _told(self, go: Callable[[], object]) -> Job:
        before = len(self._recorder.events)
        go()
        new = jobs_of(self._recorder.events[before:])
        if not new:
            raise NothingRan(
                "no job under the bridge has run: send one first, in the test and to the app or broker of "
                "this fixture; neither a broadcast nor a task that the policies of `install` do not name is "
                "under the bridge"
            )
        return next(job for job in self.jobs if job.id == new[0].id)

    def _go_once(self) -> None:
        self._look_at_parked()
        before = self._engine.runs
        for _ in range(MOST):
            if self._engine.runs > before or not self._deliver_next(None):
                return

    def _go(self, until: datetime | None = None) -> None:
        self._look_at_parked()
        for _ in range(MOST):
            if not self._deliver_next(until):
                return
        last = self._recorder.events[-1:]
        raise RuntimeError(
            f"{MOST} messages were delivered, and there are more: do jobs send each other, or snooze, for "
            f"ever? The last event is {last}; `step` runs one attempt at a time"
        )

    def _deliver_next(self, until: datetime | None) -> bool:
        """Deliver a message, or jump to the time at which the next is due; False if there is none."""
        if self._deliver():
            return True
        due = min((due for due in (self._agenda.next_due(), *self._dues[:1]) if due), default=None)
        if due is None or (until is not None and due > until):
            return False
        self._clock.move(due)
        if self._dues and self._dues[0] <= due:
            heapq.heappop(self._dues)
            self._scheduler.publish_due(self._worker.framework, self._publisher)
        return True

    def _deliver(self) -> bool:
        if self._delivering:
            raise RuntimeError("a task cannot have other jobs run while it runs itself")
        self._delivering, self._recorder.raised = True, None
        try:
            delivered = self._worker.deliver()
        except WorkerDied:
            self._engine.revive()
            self._worker.replace()
            delivered = True
        finally:
            self._delivering = False
        if self._recorder.raised:
            raise self._recorder.raised
        return delivered

    def _parked_until(self, due: datetime) -> None:
        heapq.heappush(self._dues, due)

    def _look_at_parked(self) -> None:
        """See which retries are parked: the test may have cancelled some, or made them due now."""
        self._dues = [retry.next_retry_at for retry in self.parked]


def _failing(own: Handler, failures: deque[BaseException | type[BaseException]]) -> Handler:
    def run(*args: Any, **kwargs: Any) -> Any:
        if failures:
            raise instance_of(failures.popleft())
        return own(*args, **kwargs)

    return run
