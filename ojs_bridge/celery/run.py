"""The life of a delivery of a Celery task: it begins, runs, is judged, and its decision is carried out.

An exception tells Celery how a delivery ends.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, cast

from billiard.exceptions import WorkerLostError
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from ..engine.carrying import NotCarried, may_pass
from ..engine.events import MAY_ANSWER, hear, log_error, strikes
from ..engine.reservations import TakenOver
from ..engine.runs import Drop, Lost, Postpone, Refuse, Run
from ..engine.storage_retry import is_of_process
from ..errors import InvalidState, StoreError
from ..messages import HEADER
from ..rules.decision import Complete, Decision, Discarded, RetryAt
from ..rules.failures import ANSWERS, Failure, Outcome, outcome_of, traceback_of
from ..rules.job import Job
from .attach import AUTORETRYING, FRAMEWORK, task_policy
from .holding import Hold, Unsettled, held, portable, run_within, until_begun
from .outcomes import (
    Delivery,
    LostAttempt,
    RefusedJob,
    carried_on,
    dropped,
    ignored,
    is_the_tasks_own,
    outcome_asked,
    reopen_chord,
    requeues,
    retried,
    shown_exception,
    task_outcome,
    undisturbed,
    unless_terminated,
)
from .wire import known, read
from .wish import (
    OURS,
    Failed,
    Wish,
    answered,
    is_automatic,
    limited,
    options_of,
    whole,
    without_limit,
)

logger = logging.getLogger("ojs_bridge")


class TaskRun(Delivery):
    """One delivery of a task under the bridge, and its outlet; the engine decides, the run carries out."""

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's code and carry the decision out; raises the exception that tells Celery of it."""
        if self.unsettled is not None:
            with undisturbed():
                ended = self._safely(self._end, self.unsettled)
            if ended is None:
                return self.unsettled.result
            raise ended
        # Without a store, listeners and a state nobody is told: the job begins only if it fails.
        if not (self.engine.is_silent and HEADER not in self.headers):
            try:
                self._begin()
            except SoftTimeLimitExceeded as struck:
                if self.can_wait:
                    raise until_begun(struck) from None
                with undisturbed():
                    raise self._safely(self._out_of_time, struck) from None
        if self.engine.instruments.all and self.begun is not None:
            enter = functools.partial(self.engine.instruments.running, FRAMEWORK, self.begun, self.headers)
            return run_within(enter, self._run, body, args, kwargs)
        return self._run(body, args, kwargs)

    def _run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            result = body(*args, **kwargs)
            if result is not None and issubclass(type(result), MAY_ANSWER):
                hear(result, f"task {self.task.name}")
        except BaseException as exc:  # noqa: BLE001 - an error of the pool is raised again below
            # Raising it again adds this frame a second time.
            raised = BaseException.with_traceback(exc, (found := traceback_of(exc)) and found.tb_next)
        else:
            if self.wish is None or not self._goes_on_besides():
                self._succeed(result)
            return result
        if issubclass(type(raised), (Ignore, Reject)) and not (self.wish and self.wish.raised is raised):
            self._leave_to_celery(raised)
            raise raised
        if not is_the_tasks_own(raised, self.task, self.request):
            if self.begun is not None:
                self.engine.settling.release(self.begun)
            raise raised
        with undisturbed():
            self.signal = self._fail(raised)
        raise self.signal

    def _begin(self) -> Run:
        """Return the run of the delivered job; if the job does not run, raise what tells Celery so."""
        try:
            job, bare = self._read()
            begun = self.engine.begin(
                *(job, bare, task_policy(self.task.app, self.task)),
                publication=self.publication,
                redelivered=not self.publication,
                can_wait=self.can_wait,
                reserve=not self.request.is_eager,
            )
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - Celery would take it for an error of the task
            with undisturbed():
                raise (until_begun if may_pass(self, error) else self.unbegun)(error) from None
        self.request.ojs_held = isinstance(begun, (Run, Lost)) and (self.engine.reservations.heart, begun)
        if isinstance(begun, Run):
            self.begun = begun
            return begun
        with undisturbed():
            raise self._safely(self._not_run, begun)

    def _read(self) -> tuple[Job | InvalidState, Job]:
        """Return the job by its message's state, or the error in that state, and as Celery alone has it."""
        # The whole message takes time to make, and only a job that goes on needs it.
        wire = self.wire if self.carried is None else None
        return read(self.task, self.request, self.headers, wire)

    def _not_run(self, begun: Lost | Postpone | Drop | Refuse) -> Exception:
        """Carry out the engine's answer to a delivery whose task is not run."""
        match begun:
            case Lost() if carried_on(self.task, self.request, begun.run.began):
                self.engine.settling.settle(begun.run, Complete())
                return ignored("its worker had stored its success before it died")
            case Lost():
                decision = self._judge(begun.run, begun.failure)
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
                self.begun = begun
                self._succeed(unsettled.result)
                return None
            case Run():
                self.unsent = unsettled.wire
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
        lost = isinstance(crash, WorkerLostError) and self.task.acks_late
        final = None if lost else begun.task.layers.retries.rules_out(crash)
        decision = self._judge(begun, outcome_of(crash, begun.task.errors, final))
        if requeues(self.task, crash) and isinstance(decision, Discarded) and begun.task.layers.is_native:
            # No owner has said how often the job runs: Celery runs it again.
            self.engine.settling.release(begun)
            return crash
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
        if not self.request.is_eager and is_of_process(error, *self.parts):
            return until_begun(error, self.unsettled)
        logger.error("job %s could not be begun", known(self.request), exc_info=error)
        try:
            job, bare = self._read()
        except Exception:  # noqa: BLE001 - anything may be wrong with the message
            job = bare = Job(str(self.request.id), str(self.task.name), "")
        try:
            return self._refuse(self.engine.unbegun(job if isinstance(job, Job) else bare, error))
        except Exception as worse:  # noqa: BLE001 - the delivery itself is the last place for the job
            return held(self.request, worse, returnable=self.can_wait)

    def _resume(self, process: int | None) -> Run | Drop | Postpone | Refuse:
        """Return the run that another process of this machine began and did not end; raises StoreError."""
        job, bare = self._read()
        return self.engine.resume(
            job, bare, task_policy(self.task.app, self.task), publication=self.publication, process=process
        )

    def _out_of_time(self, struck: SoftTimeLimitExceeded) -> Exception:
        """End a job whose soft time limit has struck before the store has answered."""
        job, bare = self._read()
        begun = self.engine.admit(job, bare, task_policy(self.task.app, self.task))
        decision = begun.decision if isinstance(begun, Refuse) else self._judge(begun, struck)
        return self._conclude(begun, decision, struck)

    def _safely(self, end: Callable[[Any], Exception | None], what: Any) -> Any:
        """End a delivery that is not run; if that fails, keep its job as one that could not be begun."""
        try:
            return end(what)
        except Exception as error:  # noqa: BLE001 - Celery would acknowledge the message
            return self.unbegun(error)

    def retry(self, wish: Wish) -> BaseException:
        """Judge a call of `self.retry(...)`, send its retry down, and return what the call raises.

        Raises ValueError for an invalid time, and what the task's own `signature_from_request` raises.
        """
        begun, failed = self._as_of_now(self.begun or self._begin()), self.failed
        if wish.max_retries is not None:
            begun = limited(self.task, begun, wish)
        if "expires" in wish.options:
            begun = begun._replace(job=begun.job._replace(expires=wish.expires))
        now = self.engine.now()
        if failed is None:
            return self._send(wish, begun, self._judge(begun, outcome_asked(wish, begun, now)))
        if wish.eta or wish.countdown != failed.countdown:
            hint = wish.after(now, self.task.app.timezone)
            return self._send(wish, begun, self._judge(begun, replace(failed.outcome, retry_after=hint)))
        if failed.retry and begun.job.attempt < begun.policy.runs:
            return self._send(wish, begun, failed.retry)
        return self._send(wish, begun, self._judge(begun, failed.outcome))

    def _send(self, wish: Wish, begun: Run, decision: Decision) -> BaseException:
        """Send a retry down, and return what tells of it; under a policy the message may go as it came."""
        self.wish, self.begun = wish, begun
        try:
            raised = wish.decide(begun, decision, self.wire)
            if wish.accepted and not self.request.is_eager:
                wish.sending = wish.signal.sig.options.get("task_id")
                wish.signal.sig.apply_async()
        except BaseException as error:
            wish.accepted = wish.wire is not None
            is_struck = strikes(error) or isinstance(error, SoftTimeLimitExceeded)
            is_fatal = isinstance(error, MemoryError) or not isinstance(error, Exception)
            if is_struck or (is_fatal and not wish.accepted) or (wish.raised is None and self.failed is None):
                raise
            log_error(error, "job %s: its retry's own way down has failed", begun.job)
            if wish.accepted:
                return wish.signal  # type: ignore[no-any-return]
            if wish.raised is not None and self.failed and not begun.task.layers.is_native:
                wish.wire, wish.accepted = self.wire, True
                return wish.raised
            # Celery rejects the message of such a job, and runs it no more.
            wish.decision = self.engine.carrying.impossible(begun.job, decision, error)
            raised = wish.raised = wish.error = Reject(error, requeue=False)
        finally:
            wish.sending = None
        return raised

    def _succeed(self, result: Any) -> None:
        """End the run; a reserved run ends after Celery has stored its result and sent what follows."""
        begun = self.begun
        if begun is None:
            return
        if begun.job.replay_count:
            reopen_chord(self.task, self.request)
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
            unsettled = Unsettled(os.getpid(), Complete(), self.shown, result=result)
            raise self._held(begun, error, unsettled) from None
        self.ended = functools.partial(unless_terminated, settle)

    def _held(self, begun: Run | Refuse, error: Exception, unsettled: Unsettled) -> Exception:
        """Return what has the worker hold a delivery whose outcome has to wait."""
        if isinstance(begun, Run):
            self.engine.reservations.expire(begun)
        return held(self.request, error, portable(unsettled), returnable=self.can_wait)

    def _fail(self, raised: BaseException) -> Exception:
        """Judge a failure and carry its decision out."""
        begun, earlier = self.begun or self._begin(), self.wish
        if earlier is not None and earlier.decision and earlier.raised is raised:
            return self._conclude(begun, earlier.decision, shown_exception(raised, earlier))
        self.wish, outcome, asks = None, None, False
        try:
            begun = self._as_of_now(begun)
            outcome = task_outcome(self.task, raised, begun, self.engine.now())
            decision = self._judge(begun, outcome)
            asks = isinstance(decision, RetryAt) or is_automatic(self.task, begun, raised)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - it goes to the log
            log_error(error, "job %s: its failure cannot be judged", begun.job)
            decision = self.engine.carrying.impossible(begun.job, None, error)
        if asks and isinstance(outcome, Failure):
            return self._retried(begun, raised, outcome, decision)
        if earlier is not None and not issubclass(type(raised), ANSWERS):
            self.wish = earlier
            if self._goes_on_besides():
                return shown_exception(raised)
            self.wish = None
        return self._conclude(begun, decision, shown_exception(raised))

    def _retried(self, begun: Run, raised: BaseException, outcome: Failure, decision: Decision) -> Exception:
        """Call the task's own `retry` for a failure, and carry out what it answers.

        Celery calls it for what `autoretry_for` names, whether or not an attempt is left.
        """
        task, retry = self.task, decision if isinstance(decision, RetryAt) else None
        automatically = AUTORETRYING in vars(task) and is_automatic(task, begun, raised)
        if automatically or not hasattr(task.retry, OURS):
            if retry is None:
                judged = self._judge(without_limit(begun), outcome)
                retry = judged if isinstance(judged, RetryAt) else None
            options = options_of(task, begun, retry, automatically=automatically)
            self.failed = Failed(outcome, retry, options.get("countdown"))
            answer = answered(task, raised, options)
        else:
            # It has no `retry` of its own.
            self.failed = Failed(outcome, retry, None)
            reason = vars(raised).get("exc") if issubclass(type(raised), Retry) else raised
            answer = self._send(Wish(task, reason), begun, decision)
        self.failed, wish = None, self.wish
        if wish and wish.decision and wish.raised is answer:
            return self._conclude(self.begun or begun, wish.decision, shown_exception(answer, wish))
        if issubclass(type(answer), (Ignore, Reject, Retry)):
            # The task's own code has sent the retry, or wants none.
            self._leave_to_celery(answer)
            return cast("Exception", answer)
        if not self._goes_on_besides():
            final = outcome_of(answer, begun.task.errors, "and the task's own retry ended it")
            return self._conclude(begun, self._judge(begun, final), shown_exception(answer))
        return shown_exception(answer)

    def _judge(self, begun: Run, outcome: BaseException | Outcome) -> Decision:
        """Return the decision about a run. Celery sends a retry that comes too late, and revokes it then."""
        if begun.job.expires and begun.task.layers.is_native:
            begun = begun._replace(job=begun.job._replace(expires=None))
        return self.engine.judge(begun, outcome)

    def _goes_on_besides(self) -> bool:
        """Carry out a retry that was asked for in a run that ends in another way; False if there is none."""
        wish, begun = self.wish, self.begun
        if not (wish and wish.accepted and wish.decision and begun) or self.request.is_eager:
            return False
        with undisturbed():
            signal = self._conclude(begun, wish.decision, shown_exception(wish.error, wish), shows=False)
        if self.goes_on is None:
            raise signal
        return True

    def _leave_to_celery(self, raised: BaseException) -> None:
        """Settle a run whose task has itself said to Celery what to do with the message."""
        if self._goes_on_besides() or self.begun is None:
            return
        if issubclass(type(raised), Reject) and getattr(raised, "requeue", False):
            self.engine.settling.release(self.begun)
        else:
            self.engine.settling.settle_natively(self.begun)

    def _as_of_now(self, begun: Run) -> Run:
        """Return a run under its task's settings as they are now: its code may have changed its options."""
        task = task_policy(self.task.app, self.task).of_job(begun.job.retry)
        return begun if task is begun.task else begun._replace(task=task, policy=task.policy)

    def _conclude(
        self, begun: Run | Refuse, decision: Decision, shown: Exception, *, shows: bool = True
    ) -> Exception:
        """Carry a decision out, and return the exception that tells Celery of it.

        A decision that has no place now waits in the worker. A run that was taken over is dropped. Unless it
        `shows`, Celery hears of another end.
        """
        self.shown = self.signal = shown
        wish = self.wish if self.wish is not None and self.wish.decision is decision else None
        try:
            self.engine.settling.check(begun, can_wait=self.can_wait, waits=True)
            if wish and wish.accepted and wish.wire is None and not self.request.is_eager:
                # The task's own code has sent the retry by itself, or has sent none.
                self.engine.settling.settle(begun, decision)
                self.goes_on = decision if isinstance(decision, RetryAt) else None
            else:
                self.engine.carrying.carry(begun, decision, self)
        except TakenOver as late:
            return dropped(begun.job, late, returnable=self.can_wait)
        except (NotCarried, StoreError) as left:
            decision, error = getattr(left, "decision", decision), getattr(left, "error", left)
            unsent = wish.wire if wish else self.unsent
            return self._held(begun, error, Unsettled(os.getpid(), decision, shown, unsent))
        if shows and self.goes_on is not None and isinstance(begun, Run):
            asked = wish and wish.signal
            when = asked.when if asked else whole(self.goes_on.delay)
            cause = None if wish is not None and wish.exc is None else shown
            again = self.again or (asked and asked.sig)
            return retried(self.task, self.request, begun, when, cause, shown, again)
        return self.signal

    def _refuse(self, refused: Refuse) -> Exception:
        """Keep a job that cannot be read as a dead letter."""
        return self._conclude(refused, refused.decision, RefusedJob(refused.decision.reason))

    def _postpone(self, begun: Postpone) -> Exception:
        """Send a job on that came before its time."""
        try:
            refused = self.engine.carrying.postpone(begun, self)
        except Exception as error:  # noqa: BLE001 - the job waits in the worker
            return until_begun(error)
        return self.signal if refused is None else self._refuse(refused)
