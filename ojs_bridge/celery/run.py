"""The run of a Celery task under the bridge: it begins, runs, is judged, and its decision is carried out.

An exception tells Celery how its delivery ends.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

from billiard import common, current_process, pool
from celery import Task
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    WorkerShutdown,
    WorkerTerminate,
)

from ..engine.carrying import may_pass
from ..engine.engine import Engine
from ..engine.events import MAY_ANSWER, hear, log_error, strikes
from ..engine.reservations import TakenOver
from ..engine.runs import Held, Lost, Postpone, Refuse, Run
from ..engine.threads import let_through
from ..errors import StoreError
from ..messages import HEADER
from ..rules.decision import Complete, Decision, RetryAt
from ..rules.failures import Failure, name_of, outcome_of, traceback_of
from ..rules.responses import ANSWERS
from ..store import Reservation
from . import compat
from .delivery import Delivery, outcome_asked, task_outcome
from .ends import Again, End, Kept, Over, Unsettled, kept_here, reopen_chord, shown_exception, telling
from .installation import task_policy
from .wire import NAME
from .wish import (
    OURS,
    Ended,
    Failed,
    Running,
    Wish,
    answered,
    is_automatic,
    limited,
    options_of,
    without_limit,
)

_SOFT_TIMEOUT = compat.soft_timeout_signal(pool)


@dataclass(eq=False, slots=True)
class Reserved(Ended):
    """The reservation of a run that has ended; Celery stores its result, and sends what follows it."""

    engine: Engine
    reservation: Reservation
    #: The run, if it has succeeded, and whether nothing has broken into its end.
    success: Run | None = None
    is_over: bool = False


@dataclass(eq=False)
class TaskRun(Running):
    """One run of a task under the bridge; the engine decides, the run and its delivery carry out."""

    delivery: Delivery
    admitted: Run | None = None
    wish: Wish | None = None
    #: The failure for which the bridge calls the task's own `retry`.
    failed: Failed | None = None
    #: What the request has of this run after its end.
    reserved: Reserved | None = None

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's code and carry the decision out; raises the exception that tells Celery of it."""
        delivery, engine = self.delivery, self.delivery.engine
        task, request = delivery.task, delivery.request
        if delivery.unsettled is not None:
            with undisturbed():
                end = self._safely(self._settle_late, delivery.unsettled)
                if end is not None:
                    raise telling(task, request, end)
            return delivery.unsettled.result
        # Without a store, listeners and a state nobody is told: the job begins only if it fails.
        if not (engine.is_silent and HEADER not in delivery.headers):
            try:
                self._begin()
            except SoftTimeLimitExceeded as struck:
                with undisturbed():
                    is_kept = delivery.can_wait
                    end = kept_here(struck) if is_kept else self._safely(self._out_of_time, struck)
                    raise telling(task, request, end) from None
        if engine.instruments.all and self.admitted is not None:
            enter = functools.partial(engine.instruments.running, NAME, self.admitted, delivery.headers)
            return run_within(enter, self._run, body, args, kwargs)
        return self._run(body, args, kwargs)

    def _run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        task, request = self.delivery.task, self.delivery.request
        try:
            result = body(*args, **kwargs)
            if result is not None and issubclass(type(result), MAY_ANSWER):
                hear(result, f"task {task.name}")
        except BaseException as exc:  # noqa: BLE001 - an error of the pool is raised again below
            # Raising it again adds this frame a second time.
            raised = BaseException.with_traceback(exc, (found := traceback_of(exc)) and found.tb_next)
        else:
            if self.wish is None or not self._goes_on_besides():
                end = self._succeed(result)
                if end is not None:
                    raise telling(task, request, end)
            return result
        if issubclass(type(raised), (Ignore, Reject)) and not (self.wish and self.wish.raised is raised):
            self._leave_to_celery(raised)
            raise raised
        if not is_the_tasks_own(raised, task, request):
            if self.admitted is not None:
                self.delivery.engine.settling.release(self.admitted)
            raise raised
        with undisturbed():
            told = telling(task, request, self._fail(raised))
        raise told

    def _begin(self) -> Run:
        """Return the run of the delivered job; if the job does not run, raise what tells Celery so."""
        delivery, engine = self.delivery, self.delivery.engine
        task, request = delivery.task, delivery.request
        try:
            job, bare = delivery.read()
            admission = engine.begin(
                *(job, bare, task_policy(task.app, task)),
                publication=delivery.publication,
                redelivered=not delivery.publication,
                can_wait=delivery.can_wait,
                reserve=not request.is_eager,
                argument=delivery.argument,
            )
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - Celery would take it for an error of the task
            with undisturbed():
                end = (kept_here if may_pass(delivery, error) else delivery.could_not_begin)(error)
                raise telling(task, request, end) from None
        run = admission.run if isinstance(admission, (Lost, Held)) else admission
        if isinstance(run, Run) and run.reservation is not None:
            self.reserved = Reserved(engine, run.reservation)
        if isinstance(admission, Run):
            self.admitted = admission
            return admission
        with undisturbed():
            raise telling(task, request, self._safely(delivery.not_run, admission))

    def _settle_late(self, unsettled: Unsettled) -> End | None:
        """Carry out the decision on a run that has ended before; None for a success that counts."""
        delivery = self.delivery
        try:
            admission = delivery.resume(unsettled.process)
        except StoreError as error:
            return Kept(repr(error), outcome=unsettled)
        if not isinstance(admission, Run):
            # Another worker may have the reservation: wait until it has run out.
            is_reserved = isinstance(admission, Postpone)
            why = f"attempt {admission.job.attempt} is reserved"
            return Kept(why, outcome=unsettled) if is_reserved else delivery.not_run(admission)
        if isinstance(unsettled.decision, Complete):
            self.admitted = admission
            return self._succeed(unsettled.result)
        return delivery.conclude(admission, unsettled.decision, unsettled.shown, changed=unsettled.wire)

    def _out_of_time(self, struck: SoftTimeLimitExceeded) -> End:
        """End a job whose soft time limit has struck before the store has answered."""
        delivery = self.delivery
        job, bare = delivery.read()
        admission = delivery.engine.admit(job, bare, task_policy(delivery.task.app, delivery.task))
        decision = admission.decision if isinstance(admission, Refuse) else delivery.judge(admission, struck)
        return delivery.conclude(admission, decision, struck)

    def _safely(self, end: Callable[[Any], End | None], what: Any) -> Any:
        """End a delivery that is not run; if that fails, keep its job as one that could not be begun."""
        try:
            return end(what)
        except Exception as error:  # noqa: BLE001 - Celery would acknowledge the message
            return self.delivery.could_not_begin(error)

    def retry(self, wish: Wish) -> BaseException:
        """Judge a call of `self.retry(...)`, send its retry down, and return what the call raises.

        Raises ValueError for an invalid time, and what the task's own `signature_from_request` raises.
        """
        delivery, failed = self.delivery, self.failed
        run = self._as_of_now(self.admitted or self._begin())
        if wish.max_retries is not None:
            run = limited(delivery.task, run, wish)
        if "expires" in wish.options:
            run = run._replace(job=run.job._replace(expires=wish.expires))
        now = delivery.engine.now()
        if failed is None:
            return self._send(wish, run, delivery.judge(run, outcome_asked(wish, run, now)))
        if wish.eta or wish.countdown != failed.countdown:
            hint = wish.after(now, delivery.task.app.timezone)
            return self._send(wish, run, delivery.judge(run, replace(failed.outcome, retry_after=hint)))
        if failed.retry and run.job.attempt < run.policy.runs:
            return self._send(wish, run, failed.retry)
        return self._send(wish, run, delivery.judge(run, failed.outcome))

    def _send(self, wish: Wish, run: Run, decision: Decision) -> BaseException:
        """Send a retry down, and return what tells of it; under a policy the message may go as it came."""
        self.wish, self.admitted = wish, run
        try:
            raised = wish.decide(run, decision, self.delivery.wire)
            if wish.accepted and not self.delivery.request.is_eager:
                wish.sending = wish.signal.sig.options.get("task_id")
                wish.signal.sig.apply_async()
        except BaseException as error:
            wish.accepted = wish.wire is not None
            is_struck = strikes(error) or isinstance(error, SoftTimeLimitExceeded)
            is_fatal = isinstance(error, MemoryError) or not isinstance(error, Exception)
            if is_struck or (is_fatal and not wish.accepted) or (wish.raised is None and self.failed is None):
                raise
            log_error(error, "job %s: its retry's own way down has failed", run.job)
            if wish.accepted:
                return wish.signal  # type: ignore[no-any-return]
            if wish.raised is not None and self.failed and not run.task.layers.is_native:
                wish.wire, wish.accepted = self.delivery.wire, True
                return wish.raised
            # Celery rejects the message of such a job, and runs it no more.
            wish.decision = self.delivery.engine.carrying.impossible(run.job, decision, error)
            raised = wish.raised = wish.error = Reject(error, requeue=False)
        finally:
            wish.sending = None
        return raised

    def _succeed(self, result: Any) -> End | None:
        """End the run; None for a success that counts.

        A reserved run is settled after Celery has stored its result and sent what follows.
        """
        run, delivery, settling = self.admitted, self.delivery, self.delivery.engine.settling
        if run is None:
            return None
        if run.job.replay_count:
            reopen_chord(delivery.task, delivery.request)
        if run.reservation is None:
            settling.settle(run, Complete())
            return None
        try:
            try:
                settling.check(run, can_wait=delivery.can_wait)
            except StoreError:
                with undisturbed():
                    settling.check(run, can_wait=delivery.can_wait, waits=True)
        except TakenOver as late:
            return delivery.dropped(late)
        except StoreError as error:
            return delivery.keep(run, error, Unsettled(os.getpid(), Complete(), Ignore(), result=result))
        self.reserved = self.reserved or Reserved(delivery.engine, run.reservation)
        self.reserved.success = run
        return None

    def _fail(self, raised: BaseException) -> End:
        """Judge a failure and carry its decision out."""
        run, earlier, delivery = self.admitted or self._begin(), self.wish, self.delivery
        task, engine = delivery.task, delivery.engine
        if earlier is not None and earlier.decision and earlier.raised is raised:
            shown = shown_exception(raised, earlier)
            return delivery.conclude(run, earlier.decision, shown, wish=earlier)
        self.wish, outcome, asks = None, None, False
        try:
            run = self._as_of_now(run)
            outcome = task_outcome(task, raised, run, engine.now())
            decision = delivery.judge(run, outcome)
            asks = isinstance(decision, RetryAt) or is_automatic(task, run, raised)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - it goes to the log
            log_error(error, "job %s: its failure cannot be judged", run.job)
            decision = engine.carrying.impossible(run.job, None, error)
        if asks and isinstance(outcome, Failure):
            return self._retried(run, raised, outcome, decision)
        if earlier is not None and not issubclass(type(raised), ANSWERS):
            self.wish = earlier
            if self._goes_on_besides():
                return Over(shown_exception(raised))
            self.wish = None
        return delivery.conclude(run, decision, shown_exception(raised))

    def _retried(self, run: Run, raised: BaseException, outcome: Failure, decision: Decision) -> End:
        """Call the task's own `retry` for a failure, and carry out what it answers.

        Celery calls it for what `autoretry_for` names, whether or not an attempt is left.
        """
        delivery, task = self.delivery, self.delivery.task
        retry = decision if isinstance(decision, RetryAt) else None
        automatically = compat.orig_run.name in vars(task) and is_automatic(task, run, raised)
        if automatically or not hasattr(task.retry, OURS):
            if retry is None:
                judged = delivery.judge(without_limit(run), outcome)
                retry = judged if isinstance(judged, RetryAt) else None
            options = options_of(task, run, retry, automatically=automatically)
            self.failed = Failed(outcome, retry, options.get("countdown"))
            answer = answered(task, raised, options)
        else:
            # It has no `retry` of its own.
            self.failed = Failed(outcome, retry, None)
            reason = vars(raised).get("exc") if issubclass(type(raised), Retry) else raised
            answer = self._send(Wish(task, reason), run, decision)
        self.failed, wish = None, self.wish
        if wish and wish.decision and wish.raised is answer:
            shown = shown_exception(answer, wish)
            return delivery.conclude(self.admitted or run, wish.decision, shown, wish=wish)
        if issubclass(type(answer), (Ignore, Reject, Retry)):
            # The task's own code has sent the retry, or wants none.
            self._leave_to_celery(answer)
            return Over(cast("Exception", answer))
        if not self._goes_on_besides():
            final = outcome_of(answer, run.task.errors, "and the task's own retry ended it")
            return delivery.conclude(run, delivery.judge(run, final), shown_exception(answer))
        return Over(shown_exception(answer))

    def _goes_on_besides(self) -> bool:
        """Carry out a retry that was asked for in a run that ends in another way; False if there is none."""
        wish, run = self.wish, self.admitted
        task, request = self.delivery.task, self.delivery.request
        if not (wish and wish.accepted and wish.decision and run) or request.is_eager:
            return False
        with undisturbed():
            shown = shown_exception(wish.error, wish)
            end = self.delivery.conclude(run, wish.decision, shown, wish=wish)
        if not isinstance(end, Again):
            raise telling(task, request, end)
        return True

    def _leave_to_celery(self, raised: BaseException) -> None:
        """Settle a run whose task has itself said to Celery what to do with the message."""
        if self._goes_on_besides() or self.admitted is None:
            return
        if issubclass(type(raised), Reject) and getattr(raised, "requeue", False):
            self.delivery.engine.settling.release(self.admitted)
        else:
            self.delivery.engine.settling.settle_natively(self.admitted)

    def _as_of_now(self, run: Run) -> Run:
        """Return a run under its task's settings as they are now: its code may have changed its options."""
        own = self.delivery.task
        task = task_policy(own.app, own).of_job(run.job.retry)
        return run if task is run.task else run._replace(task=task, policy=task.policy)


def run_within(
    enter: Callable[[], AbstractContextManager[Any]],
    run: Callable[[Callable[..., Any], Any, Any], Any],
    body: Callable[..., Any],
    args: Any,
    kwargs: Any,
) -> Any:
    """Run the user's code within the instruments; an interrupt that strikes in one is the job's."""
    try:
        running = enter()
        running.__enter__()
    except BaseException as struck:  # noqa: BLE001 - it is raised again in the place of the user's code
        error = struck

        def raise_it() -> None:
            raise error

        return run(raise_it, (), {})

    def leave(*error: Any) -> None:
        with undisturbed():
            running.__exit__(*error)

    with ExitStack() as stack:
        stack.push(leave)
        return run(body, args, kwargs)


def is_the_tasks_own(exc: BaseException, task: Task, request: Any) -> bool:
    """Return whether the task itself raised this, and not Celery's pool, to end it."""
    if issubclass(type(exc), SystemExit):
        return not _is_aimed(exc)
    if issubclass(type(exc), Exception) or not name_of(type(exc)).startswith(compat.GREEN):
        return True
    # A task may use timeouts itself; the pool has one only for a hard time limit.
    limited = bool((request.timelimit or (None,))[0] or task.time_limit)
    return "Timeout" in name_of(type(exc)) and not limited


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let no soft time limit strike while an outcome is carried out; the hard one still may."""
    if _SOFT_TIMEOUT is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(_SOFT_TIMEOUT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(_SOFT_TIMEOUT, before or signal.SIG_DFL)


def settle_success(task: Task | None = None, **_: Any) -> None:
    """Settle a success after its result is stored and its chain and links are sent."""
    run: Any = task and task.request.ojs_run
    reserved = run.reserved if isinstance(run, TaskRun) else run
    if not isinstance(reserved, Reserved):
        return
    engine, success, reserved.success = reserved.engine, reserved.success, None
    try:
        if reserved.is_over and success and not _breaks_off(sys.exc_info()[1]):
            engine.settling.settle(success, Complete())
    finally:
        heart = engine.reservations.heart
        if heart and heart.holds(reserved.reservation):
            # Something has broken into its end.
            heart.abandon(reserved.reservation)


def _breaks_off(struck: BaseException | None) -> bool:
    """Return whether an error after a success keeps Celery from its end: then the job comes again."""
    fired = isinstance(struck, SystemExit) and compat.terminate_handler_fired(common, None)
    return bool(fired and fired()) or type(struck).__name__ in ("MemoryError", "GreenletExit")


def _is_aimed(exc: BaseException) -> bool:
    """Return whether Celery or its pool raises this from outside, to end what the thread does."""
    if issubclass(type(exc), (WorkerShutdown, WorkerTerminate)):
        return True
    if issubclass(type(exc), SystemExit):
        # Billiard may have raised it, to end a terminated child.
        fired = compat.terminate_handler_fired(common, None)
        # An older billiard does not say so; only its child processes end this way.
        return bool(fired()) if fired else current_process().name != "MainProcess"
    if issubclass(type(exc), Exception):
        return issubclass(type(exc), SoftTimeLimitExceeded)
    return name_of(type(exc)).startswith(compat.GREEN)


let_through(_is_aimed)
