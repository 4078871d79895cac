"""One run of a Celery task: it begins, the task's code runs, and the decision is carried out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from billiard.exceptions import WorkerLostError
from celery import Task
from celery.exceptions import Ignore, Reject, SoftTimeLimitExceeded

from ..engine.engine import Engine
from ..engine.reservations import TakenOver
from ..engine.runs import Begun, Drop, Lost, Postpone, Refuse, Run, TaskPolicy
from ..errors import StoreError, Unstorable
from ..rules.decision import Complete, Decision, RetryAt, SnoozeUntil
from ..rules.failures import Outcome, outcome_of
from ..rules.job import Job
from ..rules.policy import RetryPolicy
from . import wire as wires
from .attach import FRAMEWORK, attach, task_policy
from .carrying import Conclusion, dropped
from .delivery import Delivery
from .holding import Hold, Unsettled
from .native_options import retry_kwargs
from .outcomes import is_the_tasks_own, shown_exception, task_outcome, undisturbed
from .results import carried_on, reopen_chord
from .wire import Arguments, known, time_in
from .wish import NOTHING_ASKED, Asked, Wish, say_once

logger = logging.getLogger("ojs_bridge")

T = TypeVar("T")

#: When a message is due that is published only to be delivered anew.
SOON = timedelta(seconds=1)


class LostAttempt(Exception):
    """The worker that ran this attempt is gone: the attempt has failed, and its task is not run."""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """A run that succeeded; it is settled after Celery has stored its result and sent what follows."""

    engine: Engine
    run: Run

    def settle(self) -> None:
        """Settle the run; never raises."""
        self.engine.settle(self.run, Complete())


class TaskRun:
    """One run of a task under the bridge; the engine decides, the run carries out."""

    def __init__(self, task: Task, request: Any) -> None:
        self._task = task
        self._request = request
        self._delivery = Delivery(task, request)
        self._wish: Wish | None = None
        self._asked_for = NOTHING_ASKED
        self._begun: Run | None = None
        self.engine: Engine = attach(task.app).engine

    @property
    def _policy(self) -> TaskPolicy:
        return task_policy(self._task.app, self._task)

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's code and carry the decision out; raises the exception that tells Celery of it."""
        if self._delivery.unsettled is not None:
            with undisturbed():
                raise self._safely(self._end, self._delivery.unsettled)
        if not (self.engine.is_silent and self._delivery.is_plain):
            self._begin_in_time()
        # Otherwise there is nothing to read and nobody to tell: the job begins only if it fails.
        if self.engine.instruments and self._begun is not None:
            return self._run_within(self._begun, body, args, kwargs)
        return self._run(body, args, kwargs)

    def _run_within(self, begun: Run, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's code within the instruments; an interrupt that strikes in one is the job's."""
        try:
            within = self.engine.instruments.running(FRAMEWORK, begun, self._delivery.headers)
            within.__enter__()
        except BaseException as exc:  # noqa: BLE001 - it is raised again in the place of the user's code
            return self._run(_raise, (exc,), {})

        def leave(*error: Any) -> None:
            with undisturbed():
                within.__exit__(*error)

        with ExitStack() as stack:
            stack.push(leave)
            return self._run(body, args, kwargs)

    def _run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        try:
            result = body(*args, **kwargs)
        except (Ignore, Reject) as exc:
            self._end_natively(exc)
            raise
        except BaseException as exc:  # noqa: BLE001 - an error of the pool is raised again below
            # Raising it again adds this frame a second time.
            raised = exc.with_traceback(exc.__traceback__ and exc.__traceback__.tb_next)
        else:
            if self._wish is None or self._wish.refused:
                self._succeed()
                return result
            raised = self._wish.signal
        if not is_the_tasks_own(raised, self._task, self._request):
            if self._begun is not None:
                self.engine.release(self._begun)
            raise raised
        with undisturbed():
            signal = self._settle(raised)
        raise signal

    def ask(self, wish: Wish) -> BaseException:
        """Judge a call of `self.retry(...)`, and return what it raises; ValueError for an invalid time."""
        begun = self._limited(self._as_of_now(self._begun or self._begin()), wish)
        if "expires" in wish.options:
            expires = time_in(self._task.app, wish.options["expires"])
            begun = begun._replace(job=begun.job._replace(expires=expires))
        wish.decision = self.engine.judge(begun, self._outcome(begun, wish.signal, wish))
        self._wish, self._begun = wish, begun
        return wish.answer()

    def _limited(self, begun: Run, wish: Wish) -> Run:
        """Return the run under the `max_retries` of a `self.retry(...)`, unless an owner has set a limit."""
        limit = wish.max_attempts
        if limit is None:
            return begun
        if not begun.layers.limit_is_native:
            if limit != begun.policy.runs:
                say_once(
                    self._task, "max_retries", f"its policy has max_attempts={begun.policy.max_attempts}"
                )
            return begun
        return begun._replace(policy=RetryPolicy.merge(begun.policy, {"max_attempts": limit}))

    def given(self, *, partly: bool) -> Arguments:
        """Return the arguments of this run; with `partly`, those that a retry keeps beside new ones."""
        if partly and not self._request.is_eager and not self._is_native:
            return wires.arguments_of(self._delivery.wire)
        return self._request.args or (), self._request.kwargs or {}

    @property
    def job(self) -> Job | None:
        """The job of this run; None before it has begun."""
        return self._begun and self._begun.job

    @property
    def _is_native(self) -> bool:
        """Whether Celery alone says how the job is retried; a retry then has the arguments of now."""
        begun = self._begun or self._begin()
        return begun.layers.is_native

    def resume(self, process: int | None) -> Run | Drop | Postpone | Refuse:
        """Return the run that another process of this machine began and did not end."""
        bare = self._delivery.bare_job()
        job, publication = self._delivery.job(bare), self._delivery.publication
        return self.engine.resume(job, bare, self._policy, publication=publication, process=process)

    def judge_crash(self, begun: Run, crash: Exception) -> Decision:
        """Return the decision on a job whose process was killed, or died.

        If the broker still has the message, the attempt is lost, whatever `retry_on` says.
        """
        lost = isinstance(crash, WorkerLostError) and self._task.acks_late
        final = None if lost else begun.layers.retries.rules_out(crash)
        return self.engine.judge(begun, outcome_of(crash, begun.task.errors, final))

    def conclude(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        """Carry a decision out and return the exception that tells Celery of it."""
        return self._conclusion().conclude(begun, decision, shown)

    def postpone(self, begun: Postpone) -> Exception:
        """Send a job on that came before its time, and return the exception that tells Celery of it."""
        return self._conclusion().postpone(begun)

    def unbegun(self, error: Exception) -> Exception:
        """Keep a job that could not be begun, and return the exception that tells Celery of it."""
        logger.error("job %s could not be begun", known(self._request), exc_info=error)
        conclusion = self._conclusion()
        try:
            return conclusion.refuse(self.engine.unbegun(self._delivery.known_job(), error))
        except Exception as worse:  # noqa: BLE001 - the delivery itself is the last place for the job
            return conclusion.leave(worse)

    def send_on(self) -> Exception:
        """Publish the message of a job that waits anew, and return the exception that tells Celery of it."""
        job, at = self._delivery.job(self._delivery.bare_job()), self.engine.now() + SOON
        if not isinstance(job, Job):
            return Hold("its message cannot be read")
        return self.postpone(Postpone(job.waiting(at), at))

    def _end(self, unsettled: Unsettled) -> Exception:
        """Carry out the decision on a run that has ended."""
        begun = self.resume(unsettled.process)
        match begun:
            case Run():
                return self._conclusion(unsettled).conclude(begun, unsettled.decision, unsettled.shown)
            case Postpone():
                # Another worker may have the reservation: wait until it has run out.
                return Hold(f"attempt {begun.job.attempt} is reserved", outcome=unsettled)
            case Refuse():
                return self._conclusion().refuse(begun)
            case Drop():
                ignored: Exception = Ignore(begun.reason)
                return ignored

    def _conclusion(self, unsettled: Unsettled | None = None) -> Conclusion:
        asked = Asked(unsettled.arguments, unsettled.options) if unsettled else self._asked_for
        wish = None if unsettled else self._wish
        return Conclusion(self.engine, self._task, self._request, self._delivery, wish, asked)

    def _succeed(self) -> None:
        """End the run; a reserved run ends after Celery has stored its result and sent what follows."""
        if self._begun is None:
            return
        end, job = Succeeded(self.engine, self._begun), self._begun.job
        if job.replay_count:
            reopen_chord(self._task, self._request)
        if self._begun.reservation is None:
            end.settle()
            return
        try:
            self.engine.check(self._begun)
        except TakenOver as late:
            raise dropped(self._begun.job, late, returnable=self._delivery.returnable) from None
        self._request.ojs_ended = end

    def _begin_in_time(self) -> None:
        """Begin; the delivery waits if a soft time limit strikes before the store has answered."""
        try:
            self._begin()
        except SoftTimeLimitExceeded as struck:
            if self._delivery.returnable:
                raise self._conclusion().wait(struck) from None
            with undisturbed():
                raise self._safely(self._out_of_time, struck) from None

    def _out_of_time(self, struck: SoftTimeLimitExceeded) -> Exception:
        bare = self._delivery.bare_job()
        begun = self.engine.admit(self._delivery.job(bare), bare, self._policy)
        decision = begun.decision if isinstance(begun, Refuse) else self.engine.judge(begun, struck)
        return self.conclude(begun, decision, struck)

    def _safely(self, end: Callable[[T], Exception], what: T) -> Exception:
        """End a delivery that is not run; if that fails, keep its job as one that could not be begun."""
        try:
            return end(what)
        except Exception as error:  # noqa: BLE001 - Celery would acknowledge the message
            return self.unbegun(error)

    def _begin(self) -> Run:
        """Return the run of the delivered job; if the job does not run, raise what tells Celery so."""
        try:
            begun = self._asked()
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - Celery would take it for an error of the task
            if isinstance(error, StoreError) and not isinstance(error, Unstorable):
                raise self._conclusion().wait(error) from None
            with undisturbed():
                raise self.unbegun(error) from None
        if isinstance(begun, Run):
            self._begun = begun
            return begun
        with undisturbed():
            raise self._safely(self._not_run, begun)

    def _asked(self) -> Begun:
        bare = self._delivery.bare_job()
        return self.engine.begin(
            self._delivery.job(bare),
            bare,
            self._policy,
            publication=self._delivery.publication,
            can_wait=self._delivery.returnable,
            reserve=not self._request.is_eager,
        )

    def _not_run(self, begun: Lost | Postpone | Drop | Refuse) -> Exception:
        match begun:
            case Lost() if carried_on(self._task, self._request, begun.since):
                self.engine.settle(begun.run, Complete())
                known: Exception = Ignore("its worker had stored its success before it died")
                return known
            case Lost():
                decision = self.engine.judge(begun.run, begun.failure)
                return self.conclude(begun.run, decision, LostAttempt(begun.failure.message))
            case Postpone():
                return self.postpone(begun)
            case Refuse():
                return self._conclusion().refuse(begun)
            case Drop():
                dropped: Exception = Ignore(begun.reason)
                return dropped

    def _end_natively(self, signal: Ignore | Reject) -> None:
        """End the run's reservation: the task itself has told Celery what to do with the message."""
        if self._begun is None:
            return
        if isinstance(signal, Reject) and signal.requeue:
            self.engine.release(self._begun)
        else:
            self.engine.settle_natively(self._begun)

    def _settle(self, raised: BaseException) -> Exception:
        wish = self._wish
        if wish and not wish.raised_as(raised):
            self._wish = wish = None
        begun = self._begun or self._begin()
        decision = (wish and wish.decision) or self._judged(begun, raised)
        self._asked_for = self._changes(begun, decision, raised)
        return self.conclude(begun, decision, shown_exception(raised, wish))

    def _changes(self, begun: Run, decision: Decision, raised: BaseException) -> Asked:
        """Return what the next run has in another way: as the task's code, or its `retry_kwargs`, ask."""
        if not isinstance(decision, (RetryAt, SnoozeUntil)):
            return NOTHING_ASKED
        wish = self._wish
        asked = Asked(wish.arguments, wish.options) if wish else self._automatic(raised)
        if asked.arguments or self._request.is_eager or not begun.layers.is_native:
            return asked
        given = self.given(partly=False)
        return asked._replace(arguments=given) if self._are_changed(begun.job, given) else asked

    def _automatic(self, raised: BaseException) -> Asked:
        """Return what `retry_kwargs` ask for an error that Celery retries by itself."""
        options = retry_kwargs(self._task, raised)
        if not options:
            return NOTHING_ASKED
        if options.pop("eta", None):
            say_once(self._task, "eta", "a time in retry_kwargs would be the same for every job")
        args, kwargs = options.pop("args", None), options.pop("kwargs", None)
        try:
            given = self.given(partly=(args is None) is not (kwargs is None))
            wish = Wish(self._task, given, None, args, kwargs, None, None, options)
        except (TypeError, ValueError) as error:
            say_once(self._task, "**retry_kwargs", str(error))
            return NOTHING_ASKED
        return Asked(wish.arguments, wish.options)

    def _are_changed(self, job: Job, given: Arguments) -> bool:
        """Return whether a run has changed its arguments, and a message can carry them."""
        wire = self._delivery.wire
        try:
            came = wires.arguments_of(wire)
            if (list(given[0]), given[1]) == (list(came[0]), came[1]):
                return False
            wires.with_arguments(wire, *given)
        except Exception as error:  # noqa: BLE001 - the arguments are of the user's classes
            logger.warning("job %s: its retry has the arguments as they came: %r", job, error)
            return False
        return True

    def _judged(self, begun: Run, raised: BaseException) -> Decision:
        try:
            begun = self._as_of_now(begun)
            return self.engine.judge(begun, self._outcome(begun, raised))
        except Exception as error:
            logger.exception("job %s: its failure cannot be judged", begun.job)
            return self.engine.impossible(begun.job, None, error)

    def _as_of_now(self, begun: Run) -> Run:
        """Return a run under its task's settings as they are now: its code may have changed its options."""
        task = self._policy
        return (
            begun if task is begun.task else begun._replace(task=task, policy=task.for_job(begun.job.retry))
        )

    def _outcome(self, begun: Run, raised: BaseException, wish: Wish | None = None) -> Outcome:
        return task_outcome(self._task, raised, wish, begun, self.engine.now())


def _raise(error: BaseException) -> None:
    raise error
