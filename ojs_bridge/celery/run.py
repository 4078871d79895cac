"""The life of a delivery of a Celery task: it begins, runs, is judged, and its decision is carried out.

An exception tells Celery how a delivery ends.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded
from typing_extensions import assert_never

from ..engine.carrying import NotCarried, may_pass
from ..engine.engine import Engine
from ..engine.events import log_error
from ..engine.reservations import TakenOver
from ..engine.runs import Drop, Lost, Onward, Postpone, Refuse, Run, Settlement
from ..engine.storage_retry import is_of_process
from ..errors import InvalidState, StoreError
from ..messages import HEADER, parameters_of
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import outcome_of, traceback_of
from ..rules.job import Job
from . import sending
from . import wire as wires
from .attach import FRAMEWORK, HELD, attach, task_policy
from .holding import Hold, Unsettled, held, portable, until_begun
from .outcomes import (
    LostAttempt,
    RefusedJob,
    carried_on,
    dropped,
    given_back,
    ignored,
    is_the_tasks_own,
    reopen_chord,
    retried,
    run_within,
    shown_exception,
    task_outcome,
    undisturbed,
)
from .wire import KEY, OUTCOME, Arguments, Carried, Wire, known
from .wish import NOTHING_ASKED, Asked, Wish, are_changed, automatically, eager_signature, limited

logger = logging.getLogger("ojs_bridge")


class TaskRun:
    """One delivery of a task under the bridge, and its outlet; the engine decides, the run carries out."""

    framework = FRAMEWORK

    def __init__(self, task: Task, request: Any) -> None:
        self._task = task
        self._request = request
        self.engine: Engine = attach(task.app).engine
        # The properties of the bridge are hidden from the task.
        properties = dict(request.properties or {})
        #: The message; None for an eagerly applied task, which has none.
        self._parts: Carried | None = properties.pop(KEY, None)
        #: The decision on a run that has ended, if it could not be carried out yet.
        self._unsettled: Unsettled | None = properties.pop(OUTCOME, None)
        request.properties = properties
        self._headers: Mapping[str, Any] = (request.headers or {}) if self._parts is None else self._parts[3]
        #: The mark by which two messages of the job's first run differ; "" if the broker gives none.
        self._publication = "" if self._parts is None else self._parts[4]
        self.parts = self._headers, request.args, request.kwargs
        self._begun: Run | None = None
        self._wish: Wish | None = None
        #: What a retry changes of its job.
        self._asked = NOTHING_ASKED
        #: The task's error, as Celery shows it, and the exception that tells Celery of the end.
        self._shown: Exception = Ignore()
        self._signal: Exception = self._shown
        #: The decision on a job that goes on, when it was carried out, and an eager retry's signature.
        self._goes_on: RetryAt | SnoozeUntil | None = None
        self._again: Any = None

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's code and carry the decision out; raises the exception that tells Celery of it."""
        if self._unsettled is not None:
            with undisturbed():
                ended = self._safely(self._end, self._unsettled)
            if ended is None:
                return self._unsettled.result
            raise ended
        # Without a store, listeners and a state there is nothing to read and nobody to tell: the job begins
        # only if it fails.
        if not (self.engine.is_silent and HEADER not in self._headers):
            try:
                self._begin()
            except SoftTimeLimitExceeded as struck:
                if self.can_wait:
                    raise until_begun(struck) from None
                with undisturbed():
                    raise self._safely(self._out_of_time, struck) from None
        if self.engine.instruments.all and self._begun is not None:
            enter = functools.partial(self.engine.instruments.running, FRAMEWORK, self._begun, self._headers)
            return run_within(enter, self._run, body, args, kwargs)
        return self._run(body, args, kwargs)

    def _run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            result = body(*args, **kwargs)
        except (Ignore, Reject) as exc:
            # The task itself has said to Celery what to do with the message.
            if self._begun is not None and isinstance(exc, Reject) and exc.requeue:
                self.engine.settling.release(self._begun)
            elif self._begun is not None:
                self.engine.settling.settle_natively(self._begun)
            raise
        except BaseException as exc:  # noqa: BLE001 - an error of the pool is raised again below
            # Raising it again adds this frame a second time.
            raised = BaseException.with_traceback(exc, (found := traceback_of(exc)) and found.tb_next)
        else:
            if self._wish is None or self._wish.refused:
                self._succeed(result)
                return result
            raised = self._wish.signal
        if not is_the_tasks_own(raised, self._task, self._request):
            if self._begun is not None:
                self.engine.settling.release(self._begun)
            raise raised
        with undisturbed():
            signal = self._fail(raised)
        raise signal

    def _begin(self) -> Run:
        """Return the run of the delivered job; if the job does not run, raise what tells Celery so."""
        try:
            job, bare = self._read()
            begun = self.engine.begin(
                *(job, bare, task_policy(self._task.app, self._task)),
                publication=self._publication,
                redelivered=not self._publication,
                can_wait=self.can_wait,
                reserve=not self._request.is_eager,
            )
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - Celery would take it for an error of the task
            with undisturbed():
                raise (until_begun if may_pass(self, error) else self.unbegun)(error) from None
        setattr(self._request, HELD, begun if isinstance(begun, (Run, Lost)) else None)
        if isinstance(begun, Run):
            self._begun = begun
            return begun
        with undisturbed():
            raise self._safely(self._not_run, begun)

    def _not_run(self, begun: Lost | Postpone | Drop | Refuse) -> Exception:
        """Carry out the engine's answer to a delivery whose task is not run."""
        match begun:
            case Lost() if carried_on(self._task, self._request, begun.run.began):
                self.engine.settling.settle(begun.run, Complete())
                return ignored("its worker had stored its success before it died")
            case Lost():
                decision = self.engine.judge(begun.run, begun.failure)
                return self._conclude(begun.run, decision, LostAttempt(begun.failure.message))
            case Postpone():
                return self._postpone(begun)
            case Refuse():
                return self._refuse(begun)
            case Drop():
                return ignored(begun.reason)

    def _end(self, unsettled: Unsettled) -> Exception | None:
        """Carry out the decision on a run that has ended before; None for a success that counts."""
        try:
            begun = self._resume(unsettled.process)
        except StoreError as error:
            return Hold(repr(error), outcome=unsettled)
        match begun:
            case Run() if isinstance(unsettled.decision, Complete):
                self._begun = begun
                self._succeed(unsettled.result)
                return None
            case Run():
                self._asked = Asked(unsettled.arguments, unsettled.options)
                return self._conclude(begun, unsettled.decision, unsettled.shown)
            case Postpone():
                # Another worker may have the reservation: wait until it has run out.
                return Hold(f"attempt {begun.job.attempt} is reserved", outcome=unsettled)
            case _:
                return self._not_run(begun)

    def crashed(self, crash: Exception, process: int | None, began: datetime | None) -> Exception:
        """Judge a job whose process was killed, or died, and return the exception that tells Celery of it.

        `process` is its number; None if the child died at once. It `began` the job at about this time. If the
        broker still has the message, the attempt is lost, whatever `retry_on` says. Raises StoreError.
        """
        begun = self._resume(process)
        if not isinstance(begun, Run):
            return self._not_run(begun)
        begun = begun._replace(began=begun.began or began)
        lost = isinstance(crash, WorkerLostError) and self._task.acks_late
        final = None if lost else begun.task.layers.retries.rules_out(crash)
        decision = self.engine.judge(begun, outcome_of(crash, begun.task.errors, final))
        return self._conclude(begun, decision, crash)

    def give_back(self, process: int | None) -> None:
        """Release the reservation of a run whose process ended with its worker; raises StoreError."""
        begun = self._resume(process)
        if isinstance(begun, Run):
            self.engine.settling.release(begun)

    def send_on(self) -> Exception:
        """Publish the message of a job that waits anew, and return the exception that tells Celery of it."""
        (job, _), at = self._read(), self.engine.now() + timedelta(seconds=1)
        if not isinstance(job, Job):
            return Hold("its message cannot be read")
        return self._postpone(Postpone(job.waiting(at), at))

    def unbegun(self, error: Exception) -> Exception:
        """Keep a job that could not be begun, and return the exception that tells Celery of it."""
        if not self._request.is_eager and is_of_process(error, *self.parts):
            return until_begun(error, self._unsettled)
        logger.error("job %s could not be begun", known(self._request), exc_info=error)
        try:
            job, bare = self._read()
        except Exception:  # noqa: BLE001 - anything may be wrong with the message
            job = bare = Job(str(self._request.id), str(self._task.name), "")
        try:
            return self._refuse(self.engine.unbegun(job if isinstance(job, Job) else bare, error))
        except Exception as worse:  # noqa: BLE001 - the delivery itself is the last place for the job
            return held(self._request, worse, returnable=self.can_wait)

    def _resume(self, process: int | None) -> Run | Drop | Postpone | Refuse:
        """Return the run that another process of this machine began and did not end; raises StoreError."""
        job, bare = self._read()
        return self.engine.resume(
            job, bare, task_policy(self._task.app, self._task), publication=self._publication, process=process
        )

    def _out_of_time(self, struck: SoftTimeLimitExceeded) -> Exception:
        """End a job whose soft time limit has struck before the store has answered."""
        job, bare = self._read()
        begun = self.engine.admit(job, bare, task_policy(self._task.app, self._task))
        decision = begun.decision if isinstance(begun, Refuse) else self.engine.judge(begun, struck)
        return self._conclude(begun, decision, struck)

    def _safely(self, end: Callable[[Any], Exception | None], what: Any) -> Any:
        """End a delivery that is not run; if that fails, keep its job as one that could not be begun."""
        try:
            return end(what)
        except Exception as error:  # noqa: BLE001 - Celery would acknowledge the message
            return self.unbegun(error)

    def ask(self, wish: Wish) -> BaseException:
        """Judge a call of `self.retry(...)`, and return what it raises; ValueError for an invalid time."""
        begun = limited(self._task, self._as_of_now(self._begun or self._begin()), wish)
        if "expires" in wish.options:
            expires = wires.time_in(self._task.app, wish.options["expires"])
            begun = begun._replace(job=begun.job._replace(expires=expires))
        outcome = task_outcome(self._task, wish.signal, wish, begun, self.engine.now())
        wish.decision = self.engine.judge(begun, outcome)
        self._wish, self._begun = wish, begun
        return wish.answer()

    def given(self, *, partly: bool) -> Arguments:
        """Return the arguments of this run; with `partly`, those that a retry keeps beside new ones."""
        if partly and not self._request.is_eager and not (self._begun or self._begin()).task.layers.is_native:
            return wires.arguments_of(self._wire)
        return self._request.args or (), self._request.kwargs or {}

    @property
    def job(self) -> Job | None:
        """The job of this run; None before it has begun."""
        return self._begun and self._begun.job

    def _succeed(self, result: Any) -> None:
        """End the run; a reserved run ends after Celery has stored its result and sent what follows."""
        begun = self._begun
        if begun is None:
            return
        if begun.job.replay_count:
            reopen_chord(self._task, self._request)
        settle = functools.partial(self.engine.settling.settle, begun, Complete())
        if begun.reservation is None:
            settle()
            return
        try:
            try:
                self.engine.settling.check(begun, can_wait=self.can_wait)
            except StoreError:
                with undisturbed():
                    self.engine.settling.check(begun, can_wait=self.can_wait, waits=True)
        except TakenOver as late:
            raise dropped(begun.job, late, returnable=self.can_wait) from None
        except StoreError as error:
            unsettled = Unsettled(os.getpid(), Complete(), self._shown, result=result)
            raise self._held(begun, error, unsettled) from None
        self._request.ojs_ended = settle

    def _held(self, begun: Run | Refuse, error: Exception, unsettled: Unsettled) -> Exception:
        """Return what has the worker hold a delivery whose outcome has to wait."""
        if isinstance(begun, Run):
            self.engine.reservations.expire(begun)
        return held(self._request, error, portable(unsettled), returnable=self.can_wait)

    def _fail(self, raised: BaseException) -> Exception:
        """Judge a failure and carry its decision out."""
        if self._wish is not None and not self._wish.raised_as(raised):
            self._wish = None
        begun, wish = self._begun or self._begin(), self._wish
        decision = None if wish is None else wish.decision
        if decision is None:
            try:
                begun = self._as_of_now(begun)
                outcome = task_outcome(self._task, raised, None, begun, self.engine.now())
                decision = self.engine.judge(begun, outcome)
            except Exception as error:  # noqa: BLE001 - it goes to the log
                log_error(error, "job %s: its failure cannot be judged", begun.job)
                decision = self.engine.carrying.impossible(begun.job, None, error)
        if isinstance(decision, (RetryAt, SnoozeUntil)):
            self._asked = self._changes(begun, raised)
        return self._conclude(begun, decision, shown_exception(raised, wish))

    def _changes(self, begun: Run, raised: BaseException) -> Asked:
        """Return what the next run has in another way: as the task's code, or its `retry_kwargs`, ask."""
        wish = self._wish
        asked = Asked(wish.arguments, wish.options) if wish else automatically(self._task, raised, self.given)
        if asked.arguments or self._request.is_eager or not begun.task.layers.is_native:
            return asked
        given = self.given(partly=False)
        return asked._replace(arguments=given) if are_changed(begun.job, self._wire, given) else asked

    def _as_of_now(self, begun: Run) -> Run:
        """Return a run under its task's settings as they are now: its code may have changed its options."""
        task = task_policy(self._task.app, self._task).of_job(begun.job.retry)
        return begun if task is begun.task else begun._replace(task=task, policy=task.policy)

    def _conclude(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        """Carry a decision out, and return the exception that tells Celery of it.

        A decision that has no place now waits in the worker. A run that was taken over is dropped.
        """
        self._shown = self._signal = shown
        cause: Exception | None = shown
        if self._wish is not None and self._wish.exc is None and shown is self._wish.error:
            cause = None if self._wish.cause is None else shown_exception(self._wish.cause)
        try:
            self.engine.settling.check(begun, can_wait=self.can_wait, waits=True)
            self.engine.carrying.carry(begun, decision, self)
        except TakenOver as late:
            return dropped(begun.job, late, returnable=self.can_wait)
        except (NotCarried, StoreError) as left:
            decision, error = getattr(left, "decision", decision), getattr(left, "error", left)
            seen = shown if cause is None or isinstance(decision, (Discarded, DeadLettered)) else cause
            return self._held(begun, error, Unsettled(os.getpid(), decision, seen, *self._asked))
        if self._goes_on is not None and isinstance(begun, Run):
            return retried(self._task, self._request, begun, self._goes_on.delay, cause, shown, self._again)
        return self._signal

    def _refuse(self, refused: Refuse) -> Exception:
        """Keep a job that cannot be read as a dead letter."""
        return self._conclude(refused, refused.decision, RefusedJob(refused.decision.reason))

    def _postpone(self, begun: Postpone) -> Exception:
        """Send a job on that came before its time."""
        try:
            refused = self.engine.carrying.postpone(begun, self)
        except Exception as error:  # noqa: BLE001 - the job waits in the worker
            return until_begun(error)
        return self._signal if refused is None else self._refuse(refused)

    @property
    def can_wait(self) -> bool:
        """Whether the broker still has the message, and takes it back."""
        return bool(self._task.acks_late and not self._request.is_eager)

    @property
    def unreachable(self) -> tuple[type[Exception], ...]:
        """The errors of a store or a broker that is out of reach."""
        return (StoreError, *sending.out_of_reach(self._task.app))

    def message(self, onward: Onward | None) -> sending.Outgoing | None:
        """Return the message as it came, or as it goes on; None for an eager retry, which runs at once."""
        if onward is not None and self._request.is_eager:
            return None
        wire, parameters = self._wire, parameters_of(self._task.run)
        if onward is None:
            return sending.Outgoing(wire, parameters=parameters)
        arguments, options = self._asked
        if arguments:
            wire = wires.with_arguments(wire, *arguments)
        if options:
            wire = wires.with_options(wire, options)
        changes = {**(options.get("headers") or {}), HEADER: onward.header.text}
        if onward.decision is not None:
            changes["retries"] = onward.job.attempt - 1
        # No event tells of a postponement: Celery itself would hold the message.
        return sending.Outgoing(wire, changes, options, parameters, is_announced=onward.decision is not None)

    def publish(self, message: sending.Outgoing, at: datetime) -> None:
        """Publish a message, which is due at a time."""
        self.engine.context.storage_retry.run(
            lambda: sending.publish(self._task.app, message, self.engine.now(), at), retry_on=self.unreachable
        )

    def leave(self, settlement: Settlement[sending.Outgoing]) -> None:
        """Choose the exception that ends the delivery, and bury what the store does not have."""
        job, eager, decision = settlement.job, self._request.is_eager, settlement.decision
        match decision:
            case GiveBack():
                self._signal = given_back(decision.reason)
            case RetryAt() | SnoozeUntil():
                if eager:
                    # A due time would only postpone what runs at once.
                    now = self.engine.keeping.header(job._replace(next_retry_at=None))
                    self._again = eager_signature(self._task, self._request, self._asked, job, now)
                self._goes_on = decision
            case Discarded() | DeadLettered():
                self._signal = self._shown
                if isinstance(decision, DeadLettered) and not settlement.in_store and not eager:
                    self._bury(job)
            case Complete() | None:
                pass
            case _:
                assert_never(decision)

    def _bury(self, job: Job) -> None:
        """Put the message into its queue's dead queue; else the worker rejects the message."""
        header, app = self.engine.keeping.last_header(job), self._task.app
        changes = {"retries": job.attempt, **({} if header is None else {HEADER: header.text})}
        if not sending.is_buried(self.engine, app, self._wire, changes, can_wait=self.can_wait):
            vars(self._shown)[sending.REJECTED] = True

    @functools.cached_property
    def _wire(self) -> Wire:
        """The message; an eagerly applied task gets the one that it would have had."""
        app, request = self._task.app, self._request
        if self._parts is None:
            return wires.eager(app, self._task.name, request, self._headers)
        return wires.delivered(app, self._parts, request.properties or {}, request.delivery_info or {})

    def _read(self) -> tuple[Job | InvalidState, Job]:
        """Return the job by its message's state, or the error in that state, and as Celery alone has it."""
        # The whole message takes time to make, and only a job that goes on needs it.
        wire = self._wire if self._parts is None else None
        return wires.read(self._task, self._request, self._headers, wire)
