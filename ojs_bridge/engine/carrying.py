"""The decisions are carried out: a job goes on or ends, in the store or through its adapter's outlet."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeVar

from typing_extensions import assert_never

from ..errors import InvalidState, StoreError
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import MAX_MESSAGE, Failure, cut, safe_repr
from ..rules.job import Header, Job
from ..rules.policy import RetryPolicy
from ..store import Settle, Store
from . import events
from .context import Context
from .harmless import Harmless
from .keeping import fates_of, letter_of, parked_of
from .ports import M, Message, Onward, Outlet, Settlement
from .rates import Rates
from .reservations import Reservations, TakenOver, was_lost
from .runs import Postpone, Refuse, Run
from .storage_retry import at_once

logger = logging.getLogger("ojs_bridge")

T = TypeVar("T")


class NotCarried(Exception):
    """A decision found no place, because of `error`; it may find one later."""

    def __init__(self, decision: Decision, error: Exception) -> None:
        super().__init__(repr(error))
        self.decision = decision
        self.error = error


class Carrying:
    """Carries out the decisions about the runs of one bridge, and settles the runs."""

    def __init__(
        self, context: Context, reservation: timedelta, park_after: timedelta, *, fail_open: bool
    ) -> None:
        self.context = context
        self.store = context.store
        #: Returns the time, in UTC.
        self.now = context.clock
        #: A retry that is due later than that waits in the store.
        self.park_after = park_after
        self._events = context.events
        self.instruments = context.instruments
        self._surely_held = reservation.total_seconds()
        self._rates = Rates(context.store, context.clock, park_after) if context.store else None
        self._reservations = Reservations(
            context.store, context.storage_retry, reservation, context.clock, fail_open=fail_open
        )

    def carry(self, begun: Run | Refuse, decision: Decision, outlet: Outlet[M]) -> None:
        """Carry a decision out, and settle the run.

        If the job's own message stands in the way, the job becomes a dead letter. Raises TakenOver, and
        NotCarried for an error that may be over later.
        """
        try:
            with self.instruments.step("ojs.nack", begun.job) if self.instruments.all else nullcontext():
                self._carry(begun, decision, outlet)
        except Exception as error:
            if outlet.can_wait and isinstance(error, outlet.unreachable):
                raise NotCarried(decision, error) from error
            logger.exception("job %s: its decision cannot be carried out", begun.job)
            decision = self.impossible(begun.job, decision, error)
            try:
                self._carry(begun, decision, outlet)
            except Exception as worse:
                raise NotCarried(decision, worse) from worse
        self.settle(begun, decision)

    def postpone(self, begun: Postpone, outlet: Outlet[M]) -> Refuse | None:
        """Send a job on that came before its time; return its refusal if no message can carry it.

        Raises TakenOver, and any error that may be over later.
        """
        try:
            self._send_on(begun, begun.job, begun.at, None, outlet)
        except Exception as error:
            # The worker that holds a reserved job ends it. Any other job would wait for ever.
            if outlet.can_wait and (begun.reservation is not None or isinstance(error, outlet.unreachable)):
                raise
            logger.exception("job %s cannot be put off", begun.job)
            return Refuse(begun.job, self.impossible(begun.job, None, error))
        return None

    def _carry(self, begun: Run | Refuse, decision: Decision, outlet: Outlet[M]) -> None:
        job = self.after(begun.job, decision)
        match decision:
            case RetryAt() | SnoozeUntil():
                self._send_on(begun, job, decision.at, decision, outlet)
            case DeadLettered():
                in_store = self.is_buried(begun, job, decision, outlet.framework, outlet.message(None))
                outlet.leave(Settlement(begun, job, decision, in_store=in_store))
            case Complete() | GiveBack() | Discarded():
                outlet.leave(Settlement(begun, job, decision))
            case _:
                assert_never(decision)

    def _send_on(
        self,
        begun: Run | Refuse | Postpone,
        job: Job,
        at: datetime,
        decision: RetryAt | SnoozeUntil | None,
        outlet: Outlet[M],
    ) -> None:
        """Park a job or publish it, as its time asks for; if that fails, do the other."""
        onward = Onward(job, self.header(job), at, decision)
        message = outlet.message(onward)
        if message is not None:
            parks = self.parks(at)
            try:
                self._put(begun, onward, message, outlet, parks=parks)
            except outlet.unreachable as error:
                if self.store is None:
                    raise
                self._put(begun, onward, message, outlet, parks=not parks)
                logger.warning("job %s: %r; it is kept the other way", job, error)
        outlet.leave(Settlement(begun, job, decision, message))

    def _put(
        self, begun: Run | Refuse | Postpone, onward: Onward, message: M, outlet: Outlet[M], *, parks: bool
    ) -> None:
        """Write a message that goes on to the store, or publish it; raises TakenOver."""
        if parks:
            self.park(begun, onward, outlet.framework, message.kept())
        else:
            outlet.publish(message, onward.at)

    def is_buried(
        self,
        begun: Run | Refuse,
        job: Job,
        decision: DeadLettered,
        framework: str,
        message: Message | None,
    ) -> bool:
        """Write a dead letter to the store; False if the broker's dead queue is to keep it."""
        if self.store is None or message is None:
            return False
        try:
            self.bury(begun, job, decision, framework, message.kept())
        except Exception:
            logger.exception("job %s: kept in the broker's dead queue, not in the store", job)
            return False
        return True

    def impossible(self, job: Job, decision: Decision | None, error: Exception) -> DeadLettered:
        """Return the decision for a job whose own message stands in the way of the decision before."""
        why = cut(safe_repr(error), MAX_MESSAGE)
        type_ = error.type if isinstance(error, InvalidState) else "bridge.undeliverable"
        failure = getattr(decision, "failure", None) or Failure(type_, why)
        return DeadLettered("invalid", failure, f"attempt {job.attempt} cannot be followed up: {why}")

    def after(self, job: Job, decision: Decision) -> Job:
        """Return the job as it goes on, or as it ends: with its failure recorded (spec section 10)."""
        match decision:
            case RetryAt():
                return self._failed(job, decision.failure, decision.at)
            case SnoozeUntil():
                return job.snoozed(decision.at)
            case Discarded() | DeadLettered():
                return self._failed(job, decision.failure)
            case Complete() | GiveBack():
                return job
            case _:
                assert_never(decision)

    def _failed(self, job: Job, failure: Failure, next_at: datetime | None = None) -> Job:
        traceparent = self.instruments.traceparent() if self.instruments.all else None
        return job.failed(failure, at=self.now(), next_at=next_at, traceparent=traceparent)

    def header(self, job: Job) -> Header:
        """Return a job's `ojs` header; the store keeps the errors for which the header has no room.

        Raises InvalidState if the state is too long for any message.
        """
        return self.context.history.header(job)

    def last_header(self, ended: Job) -> Header | None:
        """Return the header of a job that has ended; None if its state is too long for any message."""
        try:
            return self.context.history.header(ended, ended=True)
        except InvalidState:
            logger.exception("job %s: its dead letter keeps the state that it came with", ended)
            return None

    def bury(
        self,
        begun: Run | Refuse,
        job: Job,
        decision: DeadLettered,
        framework: str,
        message: Mapping[str, Any],
    ) -> None:
        """Write a dead letter to the store with the job's whole history (DLQ-001, DLQ-002).

        `job` is the job as `after` returned it. Its letter replaces an earlier one of the job. Raises
        StoreError, and TakenOver.
        """
        store, policy = self._needed(), begun.policy if isinstance(begun, Run) else RetryPolicy()
        errors = self.context.history.whole(job)
        letter = letter_of(job, decision, policy, framework, message, errors, at=self.now())
        earlier = self.context.storage_retry.run(store.get, letter.id)
        if earlier is None or earlier.failed_first_at == letter.failed_first_at:
            self._write(begun, store.bury, letter)
            return
        # Another job had this id, and the store has forgotten its run.
        own = replace(letter, id=f"{letter.id}~{uuid.uuid4().hex}")
        self._write(begun, store.bury, own)
        with Harmless(job):
            self.context.history.forget(job)

    def parks(self, at: datetime) -> bool:
        """Return whether a job that is due at a time waits in the store rather than in the broker."""
        return self.store is not None and at - self.now() > self.park_after

    def park(
        self,
        begun: Run | Refuse | Postpone,
        onward: Onward,
        framework: str,
        message: Mapping[str, Any],
    ) -> None:
        """Write a parked retry to the store; raises StoreError, and TakenOver."""
        store, job = self._needed(), onward.job
        limit = begun.policy.max_attempts if isinstance(begun, Run) else job.attempt
        parked = parked_of(onward, framework, message, max_attempts=limit, parked_at=self.now())
        self._write(begun, store.park, parked)

    def _write(
        self, begun: Run | Refuse | Postpone, write: Callable[[T, Settle | None], bool], record: T
    ) -> None:
        """Write to the store how a run ends, and settle its reservation in the same step."""
        if not isinstance(begun, Run) or begun.reservation is None:
            self.context.storage_retry.run(write, record, None)
        elif not self._reservations.settle_with(begun, write, record):
            raise TakenOver(begun.job)

    def _needed(self) -> Store:
        if self.store is None:
            raise StoreError("this bridge has no store")
        return self.store

    def at_once(self) -> AbstractContextManager[None]:
        """Have this thread try each operation once, because it must not wait."""
        return at_once()

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
                    with self.instruments.step("ojs.ack", run.job) if self.instruments.all else nullcontext():
                        self._reservations.settle(run)
                else:
                    self._reservations.settle(run)
        self._conclude(run, decision)

    def settle_with(self, run: Run, step: Callable[[Settle], bool]) -> None:
        """Settle a run that succeeded in one step with its acknowledgement (`step`); raises StoreError."""
        with self.instruments.step("ojs.ack", run.job) if self.instruments.all else nullcontext():
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
        if self._rates or self._events.listeners or self.instruments.all:
            self._tell(run, decision)
        if (job.errors or job.errors_dropped) and isinstance(decision, (Complete, Discarded)):
            with Harmless(job):
                self.context.history.forget(job)

    def tell_operation(self, job: Job, decision: Decision | None) -> None:
        """Write what became of a job that a bulk operation has sent; None is the beginning of a run."""
        if self.store is not None:
            with Harmless(job):
                for fate in fates_of(job, decision, self.now()):
                    self.store.write_document(fate)

    def _tell(self, run: Run | Refuse, decision: Decision) -> None:
        seconds = time.monotonic() - run.since if isinstance(run, Run) else 0.0
        if self._rates:
            with Harmless(run.job):
                self._rates.count(run.job, decision, seconds)
        if self.instruments.all:
            with Harmless(run.job):
                self.instruments.concluded(run, decision, seconds)
        if self._events.listeners:
            limit = run.policy.max_attempts if isinstance(run, Run) else RetryPolicy().max_attempts
            with Harmless(run.job):
                self._events.emit(
                    events.of(run.job, decision, max_attempts=limit, seconds=seconds, at=self.now())
                )

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
