"""A run that has ended is settled: its reservation, its history, and all that hear of its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta

from ..rules.decision import Complete, Decision, Discarded, GiveBack
from ..rules.job import Job
from ..rules.policy import RetryPolicy
from ..store import Settle
from . import events
from .context import Context
from .harmless import Harmless
from .keeping import fates_of
from .rates import Rates
from .reservations import Reservations, was_lost
from .runs import Refuse, Run


class Settling:
    """Settles runs that have ended, and tells the log, the listeners and the instruments of their ends."""

    def __init__(
        self, context: Context, reservations: Reservations, reservation: timedelta, park_after: timedelta
    ) -> None:
        self._store = context.store
        self._now = context.clock
        self._history = context.history
        self._events = context.events
        self._instruments = context.instruments
        self._surely_held = reservation.total_seconds()
        self._rates = Rates(context.store, context.clock, park_after) if context.store else None
        self._reservations = reservations

    def check(self, run: Run | Refuse) -> None:
        """Raise TakenOver for a run whose reservation ran out and was taken over: its outcome does not count.

        The store is asked only if the reservation may have run out by this process's own clock.
        """
        if isinstance(run, Run) and run.reservation and time.monotonic() - run.since >= self._surely_held:
            self._reservations.check(run)

    def settle(self, run: Run | Refuse, decision: Decision) -> None:
        """Settle a run whose decision was carried out, and tell the log and the listeners; never raises."""
        if isinstance(run, Run):
            with Harmless(run.job):
                if isinstance(decision, GiveBack):
                    self._reservations.settle(run, used=False)
                elif isinstance(decision, Complete):
                    with (
                        self._instruments.step("ojs.ack", run.job) if self._instruments.all else nullcontext()
                    ):
                        self._reservations.settle(run)
                else:
                    self._reservations.settle(run)
        self._conclude(run, decision)

    def settle_with(self, run: Run, step: Callable[[Settle], bool]) -> None:
        """Settle a run that succeeded in one step with its acknowledgement (`step`); raises StoreError."""
        with self._instruments.step("ojs.ack", run.job) if self._instruments.all else nullcontext():
            settled = self._reservations.settle_with(run, step)
        if not settled:
            was_lost(run.job)
        self._conclude(run, Complete())

    def _conclude(self, run: Run | Refuse, decision: Decision) -> None:
        job = run.job
        if not isinstance(decision, Complete):
            with Harmless(job):
                events.log(job, decision)
        if job.operation:
            self.tell_operation(job, decision)
        if self._rates or self._events.listeners or self._instruments.all:
            self._tell(run, decision)
        if (job.errors or job.errors_dropped) and isinstance(decision, (Complete, Discarded)):
            with Harmless(job):
                self._history.forget(job)

    def _tell(self, run: Run | Refuse, decision: Decision) -> None:
        seconds = time.monotonic() - run.since if isinstance(run, Run) else 0.0
        if self._rates:
            with Harmless(run.job):
                self._rates.count(run.job, decision, seconds)
        if self._instruments.all:
            with Harmless(run.job):
                self._instruments.concluded(run, decision, seconds)
        if self._events.listeners:
            limit = run.policy.max_attempts if isinstance(run, Run) else RetryPolicy().max_attempts
            with Harmless(run.job):
                self._events.emit(
                    events.of(run.job, decision, max_attempts=limit, seconds=seconds, at=self._now())
                )

    def tell_operation(self, job: Job, decision: Decision | None) -> None:
        """Write what became of a job that a bulk operation has sent; None is the beginning of a run."""
        if self._store is not None:
            with Harmless(job):
                for fate in fates_of(job, decision, self._now()):
                    self._store.write_document(fate)

    def release(self, run: Run) -> None:
        """Release the reservation of a run that this process does not end; never raises."""
        with Harmless(run.job):
            self._reservations.settle(run, used=False)

    def settle_natively(self, run: Run) -> None:
        """Settle the reservation of a run that the framework itself ends; never raises."""
        with Harmless(run.job):
            self._reservations.settle(run)

    def flush(self, seconds: float) -> bool:
        """Write the rates, and let the listeners hear every event; return whether they have in time."""
        deadline = time.monotonic() + seconds
        if self._rates:
            self._rates.close(seconds)
        return self._events.flush(deadline - time.monotonic())
