"""A decision is carried out: its job goes on or ends, and its run is settled."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from typing_extensions import assert_never

from ..errors import InvalidState, Unstorable
from ..rules.decision import (
    Complete,
    DeadLettered,
    Decision,
    Discarded,
    GiveBack,
    RetryAt,
    SnoozeUntil,
    later,
)
from ..rules.failures import MAX_MESSAGE, Failure, cut, safe_repr
from ..rules.job import Job
from ..rules.policy import RetryPolicy
from . import events
from .breakers import WITHOUT_STORE, Breakers
from .context import Context
from .events import harmless, log_error, strikes
from .heartbeat import SUSPICION
from .limits import Limits
from .rates import Rates
from .reservations import Reservations
from .runs import M, Onward, Outlet, Postpone, Refuse, Run, Settlement
from .storage_retry import is_of_process
from .storing import Storing, fates_of

logger = logging.getLogger("ojs_bridge")


class Settling:
    """Settles runs that have ended, and tells the log, the listeners and the instruments of their ends."""

    def __init__(
        self,
        context: Context,
        reservations: Reservations,
        storing: Storing,
        limits: Limits | None,
        reservation: timedelta,
        park_after: timedelta,
        breakers: Breakers | None = None,
    ) -> None:
        self._breakers = breakers
        self._documents = context.store.documents if context.store else None
        self._now = context.clock
        self._storing = storing
        self._limits = limits
        self._events = context.events
        self._instruments = context.instruments
        self._surely_held = min(reservation, SUSPICION).total_seconds()
        self._rates: Rates | None = None
        if context.store:
            runs, facts = reservations.runs, (context.publishers, bool(context.redactor))
            clocks = context.clock, context.surely
            self._rates = Rates(context.store.documents, *clocks, park_after, runs.now, *facts)
            runs.starts = self._begins
        self._reservations = reservations

    def start(self) -> None:
        """Start the thread that writes the rates; raises RuntimeError where none can start."""
        if self._rates:
            self._rates.start()

    def _begins(self) -> None:
        """Start the thread before the first job, which may run for hours; else its end starts it."""
        with suppress(RuntimeError):
            self.start()

    def check(self, run: Run | Refuse, *, can_wait: bool = True, waits: bool = False) -> None:
        """Raise TakenOver for a run whose reservation was taken over: its outcome does not count.

        The store is asked only if that may have happened by this process's own clock. Raises StoreError if it
        does not answer, and the outcome can wait; with `waits` the store is asked for a while here.
        """
        if isinstance(run, Run) and run.reservation and time.monotonic() - run.since >= self._surely_held:
            self._reservations.check(run, can_wait=can_wait, waits=waits)

    def settle(self, run: Run | Refuse, decision: Decision) -> None:
        """Settle a run whose decision was carried out, and tell the log and the listeners; never raises."""
        if isinstance(run, Run):
            if isinstance(decision, Complete):
                with self._instruments.step("ojs.ack", run.job) if self._instruments.all else nullcontext():
                    harmless(run.job, self._reservations.settle_success, run)
            else:
                ways = {"used": not isinstance(decision, GiveBack), "ends": isinstance(decision, Discarded)}
                harmless(run.job, self._reservations.settle, run, **ways)
        self._conclude(run, decision)

    def settle_successes(self, runs: Sequence[Run]) -> None:
        """Settle runs that have succeeded, in one step; never raises."""
        harmless(runs[0].job, self._reservations.settle_successes, runs)
        for run in runs:
            self._conclude(run, Complete())

    def _conclude(self, run: Run | Refuse, decision: Decision) -> None:
        """Tell all that hear of it, each by itself, how a run has ended."""
        job = run.job
        self._free(run)
        if not isinstance(decision, Complete):
            harmless(job, events.log, job, decision)
        if job.operation:
            self.tell_operation(job, decision)
        seconds = 0.0
        if isinstance(run, Run) and run.began is not None:
            seconds = max((self._now() - run.began).total_seconds(), 0.0)
        elif isinstance(run, Run):
            seconds = time.monotonic() - run.since
        has_run = not (isinstance(decision, SnoozeUntil) and decision.hold)
        if self._rates and has_run:
            harmless(job, self._rates.count, job, decision, seconds)
        if self._breakers:
            harmless(job, self._breakers.heard, run, decision)
        if self._instruments.all and has_run:
            harmless(job, self._instruments.concluded, run, decision, seconds)
        if self._events.listeners:
            limit = run.policy.max_attempts if isinstance(run, Run) else RetryPolicy().max_attempts
            events_at = partial(events.of, job, decision, max_attempts=limit, seconds=seconds)
            harmless(job, lambda: self._events.emit(events_at(at=self._now())))
        if (job.errors or job.errors_dropped) and isinstance(decision, (Complete, Discarded)):
            harmless(job, self._storing.forget, job)

    def tell_operation(self, job: Job, decision: Decision | None) -> None:
        """Write what became of a job that a bulk operation has sent; None is the beginning of a run."""
        if self._documents is not None:
            for fate in fates_of(job, decision, self._now()):
                harmless(job, self._documents.write, fate)

    def release(self, run: Run) -> None:
        """Release the reservation of a run that this process does not end; never raises."""
        harmless(run.job, self._reservations.settle, run, used=False)
        self._free(run)

    def settle_natively(self, run: Run) -> None:
        """Settle the reservation of a run that the framework itself ends; never raises."""
        harmless(run.job, self._reservations.settle, run)
        self._free(run)

    def _free(self, run: Run | Refuse) -> None:
        """Give the slots that a run had to the next jobs."""
        if self._limits and isinstance(run, Run):
            harmless(run.job, self._limits.release, run.job, run.reservation)

    def flush(self, seconds: float) -> bool:
        """Write the rates, and let the listeners hear every event; return whether they have in time."""
        deadline = time.monotonic() + seconds
        self._reservations.flush(seconds)
        if self._rates:
            self._rates.close(seconds)
        return self._events.flush(deadline - time.monotonic())


class NotCarried(Exception):
    """A decision found no place, because of `error`; it may find one later."""

    def __init__(self, decision: Decision, error: BaseException) -> None:
        super().__init__(safe_repr(error))
        self.decision = decision
        self.error = error


def may_pass(outlet: Outlet[Any], error: BaseException) -> bool:
    """Return whether an error is over later: something is out of reach, or this process lacks something."""
    is_away = isinstance(error, outlet.unreachable) and not isinstance(error, Unstorable)
    return is_away or is_of_process(error, *outlet.parts)


class Carrying:
    """Carries decisions out: a job goes on by the store or the broker, or becomes a dead letter."""

    def __init__(self, context: Context, storing: Storing) -> None:
        self._now = context.clock
        self._instruments = context.instruments
        self._storing = storing

    def carry(self, run: Run | Refuse, decision: Decision, outlet: Outlet[M]) -> Settlement[M]:
        """Carry a decision out, and return what was done: the adapter settles it, and ends its delivery.

        If the job's own message stands in the way, the job becomes a dead letter. Raises TakenOver, and
        NotCarried for an error that may be over later.
        """
        try:
            with self._instruments.step("ojs.nack", run.job) if self._instruments.all else nullcontext():
                return self._carry(run, decision, outlet)
        except BaseException as error:
            if strikes(error):
                raise
            if outlet.can_wait and may_pass(outlet, error):
                raise NotCarried(decision, error) from error
            log_error(error, "job %s: its decision cannot be carried out", run.job)
            decision = self.impossible(run.job, decision, error)
            try:
                return self._carry(run, decision, outlet)
            except BaseException as worse:
                if strikes(worse):
                    raise
                raise NotCarried(decision, worse) from worse

    def postpone(self, early: Postpone, outlet: Outlet[M]) -> M | Refuse:
        """Send a job on that came before its time; return its message, or its refusal if none can carry it.

        Raises TakenOver, and any error that may be over later.
        """
        try:
            return self._send_on(early, early.job, early.at, None, outlet)
        except Exception as error:
            # The worker that holds a reserved job ends it. Any other job would wait for ever.
            if outlet.can_wait and (early.reservation is not None or may_pass(outlet, error)):
                raise
            logger.exception("job %s cannot be put off", early.job)
            return Refuse(early.job, self.impossible(early.job, None, error))

    def _carry(self, run: Run | Refuse, decision: Decision, outlet: Outlet[M]) -> Settlement[M]:
        job = self.after(run.job, decision)
        match decision:
            case RetryAt() | SnoozeUntil():
                message = self._send_on(run, job, decision.at, decision, outlet)
                return Settlement(run, job, decision, message)
            case DeadLettered():
                in_store = self._storing.is_buried(
                    run, job, decision, outlet.framework, outlet.message(None), can_wait=outlet.can_wait
                )
                return Settlement(run, job, decision, in_place=in_store or outlet.bury(job))
            case Complete() | GiveBack() | Discarded():
                return Settlement(run, job, decision)
            case _:
                assert_never(decision)

    def _send_on(
        self,
        admission: Run | Refuse | Postpone,
        job: Job,
        at: datetime,
        decision: RetryAt | SnoozeUntil | None,
        outlet: Outlet[M],
    ) -> M:
        """Park a job or publish it, as its time asks for; if that fails, do the other. Return its message."""
        onward = Onward(job, self._storing.header(job), at, decision)
        is_held = isinstance(decision, SnoozeUntil) and bool(decision.hold and self._storing.store)
        message, parks, failed = outlet.message(onward), is_held or self._storing.parks(at), None
        for in_store in () if outlet.at_once else (parks, not parks):
            try:
                if in_store:
                    self._storing.park(admission, onward, outlet.framework, message.kept())
                else:
                    outlet.publish(message, at)
                break
            except outlet.unreachable as error:
                if failed is not None or self._storing.store is None:
                    raise
                failed = error
                if is_held:
                    # No worker looks after it in the broker, when nothing holds it any more.
                    at = min(at, later(self._now(), WITHOUT_STORE.total_seconds()))
                    job = job._replace(next_retry_at=at)
                    message = outlet.message(Onward(job, self._storing.header(job), at, decision))
        if failed is not None:
            logger.warning("job %s: %r; it is kept the other way", job, failed)
        return message

    def impossible(self, job: Job, decision: Decision | None, error: BaseException) -> DeadLettered:
        """Return the decision for a job whose own message stands in the way of the decision before."""
        why = cut(safe_repr(error), MAX_MESSAGE)
        type_ = error.type if isinstance(error, InvalidState) else "bridge.undeliverable"
        failure = getattr(decision, "failure", None) or Failure(type_, why)
        return DeadLettered("invalid", failure, f"attempt {job.attempt} cannot be followed up: {why}")

    def after(self, job: Job, decision: Decision) -> Job:
        """Return the job as it goes on, or as it ends: with its failure recorded (spec section 10)."""
        match decision:
            case SnoozeUntil():
                return job.snoozed(decision.at, decision.hold if decision.is_turn else "")
            case RetryAt() | Discarded() | DeadLettered():
                next_at = decision.at if isinstance(decision, RetryAt) else None
                trace = self._instruments.traceparent() if self._instruments.all else None
                return job.failed(decision.failure, at=self._now(), next_at=next_at, traceparent=trace)
            case Complete() | GiveBack():
                return job
            case _:
                assert_never(decision)
