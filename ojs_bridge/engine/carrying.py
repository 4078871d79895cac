"""The decisions are carried out: a job goes on or ends, in the store or through its adapter's outlet."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from datetime import datetime

from typing_extensions import assert_never

from ..errors import InvalidState
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import MAX_MESSAGE, Failure, cut, safe_repr
from ..rules.job import Job
from .context import Context
from .keeping import Keeping
from .ports import M, Onward, Outlet, Settlement
from .runs import Postpone, Refuse, Run
from .settling import Settling

logger = logging.getLogger("ojs_bridge")


class NotCarried(Exception):
    """A decision found no place, because of `error`; it may find one later."""

    def __init__(self, decision: Decision, error: Exception) -> None:
        super().__init__(repr(error))
        self.decision = decision
        self.error = error


class Carrying:
    """Carries decisions out: a job goes on by the store or the broker, or its delivery ends."""

    def __init__(self, context: Context, keeping: Keeping, settling: Settling) -> None:
        self._now = context.clock
        self._instruments = context.instruments
        self._keeping = keeping
        self._settling = settling

    def carry(self, begun: Run | Refuse, decision: Decision, outlet: Outlet[M]) -> None:
        """Carry a decision out, and settle the run.

        If the job's own message stands in the way, the job becomes a dead letter. Raises TakenOver, and
        NotCarried for an error that may be over later.
        """
        try:
            with self._instruments.step("ojs.nack", begun.job) if self._instruments.all else nullcontext():
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
        self._settling.settle(begun, decision)

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
                in_store = self._keeping.is_buried(
                    begun, job, decision, outlet.framework, outlet.message(None)
                )
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
        onward = Onward(job, self._keeping.header(job), at, decision)
        message = outlet.message(onward)
        if message is not None:
            parks = self._keeping.parks(at)
            try:
                self._put(begun, onward, message, outlet, parks=parks)
            except outlet.unreachable as error:
                if self._keeping.store is None:
                    raise
                self._put(begun, onward, message, outlet, parks=not parks)
                logger.warning("job %s: %r; it is kept the other way", job, error)
        outlet.leave(Settlement(begun, job, decision, message))

    def _put(
        self, begun: Run | Refuse | Postpone, onward: Onward, message: M, outlet: Outlet[M], *, parks: bool
    ) -> None:
        """Write a message that goes on to the store, or publish it; raises TakenOver."""
        if parks:
            self._keeping.park(begun, onward, outlet.framework, message.kept())
        else:
            outlet.publish(message, onward.at)

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
        traceparent = self._instruments.traceparent() if self._instruments.all else None
        return job.failed(failure, at=self._now(), next_at=next_at, traceparent=traceparent)
