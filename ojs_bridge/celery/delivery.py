"""One delivery of a Celery task: what is known of it, what is published for it, and how it ends.

The process that runs the task ends it, or the worker's main process, when that process has died.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from numbers import Real
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Retry

from ..adapters import argument_of, parameters_of
from ..engine.carrying import NotCarried
from ..engine.engine import Engine
from ..engine.reservations import TakenOver
from ..engine.runs import Drop, Held, Lost, Onward, Postpone, Refuse, Run, Settlement
from ..engine.storage_retry import is_of_process
from ..engine.threads import cached
from ..errors import InvalidState, StoreError
from ..messages import HEADER
from ..rules.decision import Complete, Decision, RetryAt
from ..rules.failures import ErrorMap, Failure, Outcome, outcome_of
from ..rules.job import Job
from ..rules.responses import Snooze
from . import wire as wires
from .ends import (
    Again,
    Done,
    End,
    GivenBack,
    LostAttempt,
    RefusedJob,
    Unsettled,
    carried_on,
    end_of,
    kept_here,
    kept_or_lost,
    portable,
)
from .installation import attach, installation, task_policy
from .wire import KEY, NAME, OUTCOME, Carried, Wire, known
from .wish import Wish, countdown_of, eager_signature, reason_of, until

logger = logging.getLogger("ojs_bridge")


class Delivery:
    """One delivery of a task, the engine's outlet: what is published for it, and how it ends."""

    framework = NAME

    def __init__(self, task: Task, request: Any) -> None:
        self.own = installation(task.app)
        self.engine: Engine = (self.own.bridge or attach(task.app)).engine
        self.task = task
        self.request = request
        #: Whether the broker still has the message, and takes it back.
        self.can_wait = bool(task.acks_late and not request.is_eager)
        #: Whether the job was applied here and now: then it has no message, and no worker.
        self.at_once = bool(request.is_eager)
        # The properties of the bridge are hidden from the task.
        properties = request.properties = dict(request.properties or {})
        #: The message; None for an eagerly applied task, which has none.
        self.carried: Carried | None = properties.pop(KEY, None)
        #: The decision on a run that has ended, if it could not be carried out yet.
        self.unsettled: Unsettled | None = properties.pop(OUTCOME, None)
        self.headers: Mapping[str, Any] = (request.headers or {}) if self.carried is None else self.carried[3]
        #: The mark by which two messages of the job's first run differ; "" if the broker gives none.
        self.publication = "" if self.carried is None else self.carried[4]
        self.parts = self.headers, request.args, request.kwargs
        #: The message of a retry, as the task's own way down has made it, and the Retry that asks for it.
        self.changed: Wire | None = None
        self.asked: Any = None

    @property
    def unreachable(self) -> tuple[type[Exception], ...]:
        """The errors of a store or a broker that is out of reach."""
        return (StoreError, *self.own.broker.unreachable)

    @cached
    def wire(self) -> Wire:
        """The message; an eagerly applied task gets the one that it would have had."""
        app, request = self.task.app, self.request
        if self.carried is None:
            return wires.eager(app, self.task.name, request, self.headers)
        return wires.delivered(app, self.carried, request.properties or {}, request.delivery_info or {})

    def read(self) -> tuple[Job | InvalidState, Job]:
        """Return the job by its message's state, or the error in that state, and as Celery alone has it."""
        # The whole message takes time to make, and only a job that goes on needs it.
        wire = self.wire if self.carried is None else None
        return wires.read(self.task, self.request, self.headers, wire)

    def argument(self, name: str) -> object:
        """Return an argument of the job by its name; None if it has none."""
        return argument_of(self.task.run, self.request.args or (), self.request.kwargs or {}, name)

    def message(self, onward: Onward | None) -> wires.Outgoing:
        """Return the message as it came, or as it goes on."""
        wire, parameters = self.wire, parameters_of(self.task.run)
        if onward is None:
            return wires.Outgoing(wire, None, parameters)
        if self.at_once and onward.decision is not None:
            # A due time would only postpone it.
            header = self.engine.storing.header(onward.job._replace(next_retry_at=None))
            asked = self.asked and self.asked.sig
            again = eager_signature(self.task, self.request, asked, onward.job, header)
            return wires.Outgoing(wire, None, parameters, again)
        changes: dict[str, Any] = {HEADER: onward.header.text}
        if onward.decision is not None:
            changes["retries"] = onward.job.attempt - 1
        if isinstance(onward.decision, RetryAt):
            wire = self.changed or wire
        return wires.Outgoing(wire, changes, parameters)

    def publish(self, message: wires.Outgoing, at: datetime) -> None:
        """Publish a message, which is due at a time."""
        publish = functools.partial(self.own.broker.publish, message, self.engine.now(), at)
        self.engine.context.storage_retry.run(publish, retry_on=self.unreachable)

    def bury(self, job: Job) -> bool:
        """Bury the message in its queue's dead queue; False if there is none, or for an eager task."""
        if self.at_once:
            return False
        header = self.engine.storing.last_header(job)
        changes = {"retries": job.attempt, **({} if header is None else {HEADER: header.text})}
        return self.own.broker.is_buried(self.engine, self.wire, changes, can_wait=self.can_wait)

    def judge(self, run: Run, outcome: BaseException | Outcome) -> Decision:
        """Return the decision about a run. Celery sends a retry that comes too late, and revokes it then."""
        if run.job.expires and run.task.layers.is_native:
            run = run._replace(job=run.job._replace(expires=None))
        return self.engine.judge(run, outcome)

    def conclude(
        self,
        run: Run | Refuse,
        decision: Decision,
        shown: Exception,
        *,
        wish: Wish | None = None,
        changed: Wire | None = None,
    ) -> End:
        """Carry a decision out, and settle the run.

        `shown` is the error that Celery shows. A retry has the `wish` that asks for it, or a `changed`
        message. A decision that finds no place waits in the worker. A run that was taken over does not count.
        """
        self.changed, self.asked = wish.wire if wish else changed, wish and wish.signal
        try:
            self.engine.settling.check(run, can_wait=self.can_wait, waits=True)
            if wish and wish.accepted and wish.wire is None and not self.at_once:
                # The task's own code has sent the retry by itself, or has sent none.
                settlement: Settlement[wires.Outgoing] = Settlement(run, run.job, decision)
            else:
                settlement = self.engine.carrying.carry(run, decision, self)
        except TakenOver as late:
            return self.dropped(late)
        except (NotCarried, StoreError) as left:
            decision, error = getattr(left, "decision", decision), getattr(left, "error", left)
            return self.keep(run, error, Unsettled(os.getpid(), decision, shown, self.changed))
        self.engine.settling.settle(run, settlement.decision)
        return end_of(self.task, self.request, settlement, shown, wish)

    def dropped(self, late: TakenOver) -> End:
        """Log that the outcome of a run does not count: Celery is to store nothing."""
        logger.warning("job %s: %s", late.job, late)
        # The worker that took the run over may have died since. The next delivery finds out.
        return GivenBack(str(late)) if self.can_wait else Done(str(late))

    def keep(self, run: Run | Refuse, error: Exception, unsettled: Unsettled) -> End:
        """Return the end of a delivery whose outcome has to wait."""
        if isinstance(run, Run):
            self.engine.reservations.expire(run)
        return kept_or_lost(self.request, error, portable(unsettled), returnable=self.can_wait)

    def not_run(self, admission: Lost | Held | Postpone | Drop | Refuse) -> End:
        """Carry out the engine's answer to a delivery whose task is not run."""
        match admission:
            case Lost() if carried_on(self.task, self.request, admission.run.began):
                self.engine.settling.settle(admission.run, Complete())
                return Done("its worker had stored its success before it died")
            case Lost():
                decision = self.judge(admission.run, admission.failure)
                return self.conclude(admission.run, decision, LostAttempt(admission.failure.message))
            case Held(run, decision):
                end = self.conclude(run, decision, Ignore(decision.reason))
                # Its state is that of a job that has not begun.
                return Done(decision.reason) if isinstance(end, Again) else end
            case Postpone():
                return self.postpone(admission)
            case Refuse():
                return self.refuse(admission)
            case Drop():
                return Done(admission.reason)

    def refuse(self, refused: Refuse) -> End:
        """Keep a job that cannot be read as a dead letter."""
        return self.conclude(refused, refused.decision, RefusedJob(refused.decision.reason))

    def postpone(self, early: Postpone) -> End:
        """Send a job on that came before its time."""
        try:
            sent = self.engine.carrying.postpone(early, self)
        except Exception as error:  # noqa: BLE001 - the job waits in the worker
            return kept_here(error)
        return self.refuse(sent) if isinstance(sent, Refuse) else Done(early.reason)

    def resume(self, process: int | None) -> Run | Drop | Postpone | Refuse:
        """Return the run that another process of this machine began and did not end; raises StoreError."""
        job, bare = self.read()
        return self.engine.resume(
            job, bare, task_policy(self.task.app, self.task), publication=self.publication, process=process
        )

    def could_not_begin(self, error: Exception) -> End:
        """Keep a job that could not be begun."""
        if not self.request.is_eager and is_of_process(error, *self.parts):
            return kept_here(error, self.unsettled)
        logger.error("job %s could not be begun", known(self.request), exc_info=error)
        try:
            job, bare = self.read()
        except Exception:  # noqa: BLE001 - anything may be wrong with the message
            job = bare = Job(str(self.request.id), str(self.task.name), "")
        try:
            return self.refuse(self.engine.refuse(job if isinstance(job, Job) else bare, error))
        except Exception as worse:  # noqa: BLE001 - the delivery itself is the last place for the job
            return kept_or_lost(self.request, worse, returnable=self.can_wait)


def outcome_asked(wish: Wish, run: Run, now: datetime) -> Outcome:
    """Return the outcome of a run whose task has called `self.retry(...)`."""
    # Unless an owner has set waits, those of the policy are for autoretry_for alone.
    default = wish.default_delay if run.task.layers.waits_are_native else None
    cause = _causeless(wish, run) if wish.cause is None else wish.cause
    return _asked(cause, wish.after(now, wish.task.app.timezone), run.task.errors, default)


def task_outcome(task: Task, raised: BaseException, run: Run, now: datetime) -> Outcome:
    """Return the outcome of a run whose task raised; Celery's Retry asks for a retry."""
    if issubclass(type(raised), Retry):
        return _asked(reason_of(raised), _hint(raised, now, task.app.timezone), run.task.errors)
    return outcome_of(raised, run.task.errors, run.task.layers.retries.rules_out(raised))


def _causeless(wish: Wish, run: Run) -> BaseException:
    """Return what stands in the history for a call of `self.retry(...)` without an error."""
    if run.job.attempt >= run.policy.runs:
        return wish.error
    asked: BaseException = Retry("self.retry() was called without an error")
    return asked


def _asked(
    cause: BaseException, after: timedelta | None, errors: ErrorMap, default: timedelta | None = None
) -> Outcome:
    asked = outcome_of(cause, errors)
    if not isinstance(asked, Failure):
        # A Snooze has a time of its own; an error that the map makes one has none.
        has_time = after is None or issubclass(type(cause), Snooze)
        return asked if has_time else replace(asked, after=after)
    said = asked.retry_after if after is None else after
    return replace(asked, code="RETRY", retry_after=default if said is None else said)


def _hint(signal: Any, now: datetime, zone: Any) -> timedelta | None:
    """Return the delay that Celery's Retry asks for; None if it is no time."""
    with suppress(ValueError):
        return countdown_of(signal.when) if isinstance(signal.when, Real) else until(signal.when, now, zone)
    return None
