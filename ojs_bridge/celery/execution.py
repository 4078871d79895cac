"""One run of a Celery task: begin, run, have it judged, execute the decision."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from ..bridge import Bridge
from ..decision import Complete, DeadLetter, Decision, RetryAt, Snooze
from ..errors import InvalidState, Response
from ..failures import Failure, Outcome, outcome_of
from ..job import Job, decode
from ..runs import Drop, Lost, Postpone, Refuse, Run
from ..store import StoreError
from . import wire as wires
from .attach import FRAMEWORK, attach, task_policy
from .eager import EAGER_RETRIES
from .interrupts import is_the_tasks_own, undisturbed
from .retry_state import store_retry
from .wire import HEADER, KEY, Carried, Wire
from .wish import Wish

logger = logging.getLogger("ojs_bridge")

NOT_NAMED = "which the task's autoretry_for does not name"
#: Seconds before a delivery goes back to a broker or store that could not be reached.
PAUSE = 1.0


class HandlerFailed(Exception):
    """Stands for what a task raised and Celery's pools cannot carry, such as MemoryError or SystemExit."""


class RefusedJob(Exception):
    """The message's retry state or policy cannot be read, so its task was not run."""


class LostAttempt(Exception):
    """The worker that ran this attempt is gone, so that its task is not run, and the attempt has failed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A run that succeeded, whose turn is settled when Celery has carried its success on."""

    bridge: Bridge
    run: Run

    def settle(self) -> None:
        """Settle it and tell of it; never raises."""
        self.bridge.settled(self.run, Complete())


class Execution:
    """One run of a task under the bridge: it translates and executes, it never decides."""

    def __init__(self, task: Task, request: Any, *, pause: float = PAUSE) -> None:
        self.task = task
        self.request = request
        self._parts = _take_parts(request)
        self._headers = (request.headers or {}) if self._parts is None else self._parts[3]
        self._wire: Wire | None = None
        self._pause = pause
        self.bridge: Bridge = attach(task.app)
        self.policy = task_policy(task.app, task)
        self.wish: Wish | None = None
        self._begun: Run | None = None

    def run(self, body: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run the user's code and carry out what is decided; raises what tells Celery of it."""
        if self.bridge.store or self.bridge.listened_to or not self._is_plain():
            self._begin_in_time()
        # Otherwise there is nothing to read and nobody to tell: the job is begun when it fails.
        try:
            result = body(*args, **kwargs)
        except (Ignore, Reject) as exc:
            self._end_natively(exc)
            raise
        except BaseException as exc:  # noqa: BLE001 - what is not the task's own is raised again below
            # Without this frame, which raising it again would show a second time.
            raised = exc.with_traceback(exc.__traceback__ and exc.__traceback__.tb_next)
        else:
            if self.wish is None or self.wish.refused:
                self._succeed()
                return result
            raised = self.wish.signal
        if not is_the_tasks_own(raised, self.task, self.request):
            if self._begun is not None:
                self.bridge.give_back(self._begun)
            raise raised
        with undisturbed():
            signal = self._settle(raised)
        raise signal

    def _succeed(self) -> None:
        """End the run; one that is reserved when Celery has stored its result and sent what follows it."""
        if self._begun is None:
            return
        end = Ended(self.bridge, self._begun)
        if self._begun.turn is None:
            end.settle()
        else:
            self.request.ojs_ended = end

    def _begin_in_time(self) -> None:
        """Begin, and give the delivery back when its time is up before anybody has said that it may run."""
        try:
            self._begin()
        except SoftTimeLimitExceeded as struck:
            if self._returnable:
                raise self._give_back(struck) from None
            begun = self._admitted()
            with undisturbed():
                decision = begun.decision if isinstance(begun, Refuse) else self.bridge.judge(begun, struck)
                raise self.conclude(begun, decision, struck) from None

    def _admitted(self) -> Run | Refuse:
        bare = self._bare_job()
        return self.bridge.admit(self._job(bare), bare, self.policy)

    def _end_natively(self, signal: Ignore | Reject) -> None:
        """End the run's reservation as Celery will end the message."""
        if self._begun is None:
            return
        if isinstance(signal, Reject) and signal.requeue:
            self.bridge.give_back(self._begun)
        else:
            self.bridge.let_end(self._begun)

    def _settle(self, raised: BaseException) -> Exception:
        wish = self.wish
        if wish and not wish.raised_as(raised):
            self.wish = wish = None
        begun = self._begun or self._begin()
        decision = wish.decision if wish else None
        if decision is None:
            decision = self.bridge.judge(begun, self._outcome(begun, raised))
        return self.conclude(begun, decision, self._shown(raised))

    def ask(self, wish: Wish) -> BaseException:
        """Take what `self.retry(...)` asks for, and return what it raises."""
        self.wish = wish
        begun = self._begun or self._begin()
        wish.decision = self.bridge.judge(begun, self._outcome(begun, wish.signal))
        answer: BaseException = wish.error if wish.refused else wish.signal
        return answer

    @property
    def wire(self) -> Wire:
        """The delivered message; an eagerly applied task gets the one it would have had."""
        if self._wire is None:
            if self._parts is None:
                self._wire = wires.eager(self.task.app, self.task.name, self.request, self._headers)
            else:
                info, properties = self.request.delivery_info or {}, self.request.properties or {}
                self._wire = wires.delivered(self.task.app, self._parts, properties, info)
        return self._wire

    @property
    def _publication(self) -> str:
        return "" if self._parts is None else self._parts[4]

    def _is_plain(self) -> bool:
        return HEADER not in self._headers

    def _begin(self) -> Run:
        """Ask the bridge whether the delivered job runs, and raise what Celery is told when it does not."""
        bare = self._bare_job()
        try:
            begun = self.bridge.begin(
                self._job(bare),
                bare,
                self.policy,
                publication=self._publication,
                can_wait=self._returnable,
                reserve=not self.request.is_eager,
            )
        except StoreError as error:
            raise self._give_back(error) from None
        if isinstance(begun, Run):
            self._begun = begun
            return begun
        with undisturbed():
            raise self._not_run(begun)

    def _not_run(self, begun: Lost | Postpone | Drop | Refuse) -> Exception:
        match begun:
            case Lost():
                decision = self.bridge.judge(begun.run, begun.failure)
                return self.conclude(begun.run, decision, LostAttempt(begun.failure.message))
            case Postpone():
                return self._postpone(begun)
            case Refuse():
                return self.conclude(begun, begun.decision, RefusedJob(begun.decision.reason))
            case Drop():
                dropped: Exception = Ignore(begun.reason)
                return dropped

    def resume(self) -> Run | Drop | Refuse:
        """Return the run that another process began and did not end."""
        bare = self._bare_job()
        return self.bridge.resume(self._job(bare), bare, self.policy, publication=self._publication)

    def conclude(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        """Carry a decision out and return the exception that tells Celery of it.

        What cannot be carried out now is given back to its queue; what never can be becomes a dead letter,
        and so does what its queue has forgotten, being acknowledged before it ran.
        """
        try:
            signal = self._execute(begun, decision, shown)
        except Exception as error:
            if self._returnable and isinstance(error, self._out_of_reach()):
                return self._leave(begun, error)
            logger.exception("job %s: what was decided cannot be carried out", begun.job.id)
            return self._keep(begun, self.bridge.impossible(begun.job, decision, error), shown)
        self.bridge.settled(begun, decision)
        return signal

    def _execute(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        match decision:
            case RetryAt() | Snooze():
                job = self.bridge.after(begun.job, decision)
                signal: Exception = self._send_on(begun, job, decision, shown)
                return signal
            case DeadLetter():
                self._bury(begun, decision)
        return shown

    def _keep(self, begun: Run | Refuse, decision: DeadLetter, shown: Exception) -> Exception:
        try:
            self._bury(begun, decision)
        except Exception as error:  # noqa: BLE001 - the delivery itself is the last place for the job
            if self._returnable:
                return self._leave(begun, error)
            logger.critical("job %s is lost, being acknowledged before it ran: %r", begun.job.id, error)
            return shown
        self.bridge.settled(begun, decision)
        return shown

    @property
    def _returnable(self) -> bool:
        return bool(self.task.acks_late and not self.request.is_eager)

    def _leave(self, begun: Run | Refuse, error: BaseException) -> Exception:
        """Give a delivery back whose outcome has no place; with a reservation, its attempt is lost."""
        if isinstance(begun, Run):
            self.bridge.let_run_out(begun)
        return self._give_back(error)

    def _give_back(self, error: BaseException) -> Exception:
        logger.error("job %s goes back to its queue: %r", self.request.id, error)
        time.sleep(self._pause)
        requeued: Exception = Reject(error, requeue=True)
        return requeued

    def _out_of_reach(self) -> tuple[type[Exception], ...]:
        return (StoreError, *wires.out_of_reach(self.task.app))

    def _send_on(self, begun: Run | Refuse, job: Job, decision: RetryAt | Snooze, shown: Exception) -> Retry:
        reason = self.wish.cause if self.wish and shown is self.wish.error else shown
        signal = Retry(exc=reason, when=decision.delay, is_eager=self.request.is_eager)
        # As Task.retry raises it: while what the task raised is handled, and shown with its traceback.
        signal.__context__ = shown
        if self.request.is_eager:
            # Eager retries run at once: a due time would only postpone them.
            header = self.bridge.header(replace(job, next_retry_at=None)).text
            signal.sig = self._eager_signature(job, {**(self.request.headers or {}), HEADER: header})
        else:
            changes = {"retries": job.attempt - 1, HEADER: self.bridge.header(job).text}
            store_retry(self.task, self.request, signal)
            self._hand_on(begun, job, decision.at, decision.reason, changes)
        return signal

    def _hand_on(
        self, begun: Run | Refuse | Postpone, job: Job, at: datetime, reason: str, changes: Mapping[str, Any]
    ) -> None:
        """Park a job or publish it, whichever its time asks for, and the other one where that fails."""
        wire, options = self._asked_for()
        headers = {**(options.get("headers") or {}), **changes}
        app, out_of_reach = self.task.app, self._out_of_reach()

        def park() -> None:
            message = wires.parked(wire, headers, options)
            self.bridge.park(begun, job, at, reason, FRAMEWORK, message)

        def publish() -> None:
            self.bridge.insist(
                lambda: wires.publish(app, wire, headers, due=at, options=options), out_of_reach
            )

        first, second = (park, publish) if self.bridge.parks(at) else (publish, park)
        try:
            first()
        except out_of_reach as error:
            if self.bridge.store is None:
                raise
            logger.warning("job %s: %r; it is kept the other way", job.id, error)
            second()

    def _asked_for(self) -> tuple[Wire, Mapping[str, Any]]:
        """Return the message and the publishing options, with what `self.retry(...)` changed of them."""
        wire, wish = self.wire, self.wish
        if wish and (wish.args is not None or wish.kwargs is not None):
            request = self.request
            args = request.args if wish.args is None else wish.args
            kwargs = request.kwargs if wish.kwargs is None else wish.kwargs
            wire = wires.with_arguments(wire, args, kwargs)
        return wire, wish.options if wish else {}

    def _postpone(self, begun: Postpone) -> Exception:
        ignored: Exception = Ignore()
        try:
            changes = {HEADER: self.bridge.header(begun.job).text}
            self._hand_on(begun, begun.job, begun.at, "came before its time", changes)
        except Exception as error:
            if self._returnable:
                return self._give_back(error)
            logger.exception("job %s cannot be put off", begun.job.id)
            refused = Refuse(begun.job, self.bridge.impossible(begun.job, None, error))
            return self._keep(refused, refused.decision, RefusedJob(refused.decision.reason))
        return ignored

    def _eager_signature(self, job: Job, headers: dict[str, Any]) -> Any:
        wish = self.wish
        return self.task.signature_from_request(
            self.request,
            wish.args if wish else None,
            wish.kwargs if wish else None,
            retries=job.attempt - 1,
            headers=headers,
            **{EAGER_RETRIES: job.attempt - 1},
        )

    def _bury(self, begun: Run | Refuse, decision: DeadLetter) -> None:
        job = self.bridge.after(begun.job, decision)
        if self.bridge.store is not None:
            try:
                self.bridge.bury(begun, job, decision, FRAMEWORK, wires.to_json(self.wire))
            except Exception:
                logger.exception("job %s: kept in the broker's dead queue, not in the store", job.id)
            else:
                return
        if not self.request.is_eager:
            wires.bury(self.task.app, self.wire, {"retries": job.attempt, **self._final_state(job)})

    def _final_state(self, job: Job) -> dict[str, str]:
        try:
            return {HEADER: self.bridge.header(job, ended=True).text}
        except InvalidState:
            logger.exception("job %s: its dead letter keeps the state that it came with", job.id)
            return {}

    def _bare_job(self) -> Job:
        return Job(
            id=self.request.id,
            type=self.task.name,
            queue=self.wire.queue,
            attempt=1 + (self.request.retries or 0),
            fence=self.request.retries or 0,
            expires=wires.expiry(self.task.app, self.wire.headers),
        )

    def _job(self, bare: Job) -> Job | InvalidState:
        state = self.wire.headers.get(HEADER)
        if state is None:
            return bare
        try:
            return decode(state, bare)
        except InvalidState as error:
            return error

    def _outcome(self, begun: Run, raised: BaseException) -> Outcome:
        wish = self.wish
        if wish is None or not wish.raised_as(raised):
            return self._ruled(outcome_of(raised, begun.errors), raised)
        asked = outcome_of(wish.cause or wish.error, begun.errors)
        if not isinstance(asked, Failure):
            return asked
        after = wish.after(self.bridge.now(), self.task.app.timezone)
        return replace(asked, code="RETRY", retry_after=after if after is not None else asked.retry_after)

    def _ruled(self, outcome: Outcome, exc: BaseException) -> Outcome:
        """Apply a native task's autoretry_for: what it does not name was never retried, and still is not."""
        named = tuple(getattr(self.task, "autoretry_for", ()))
        if not named or not isinstance(outcome, Failure) or isinstance(exc, Response):
            return outcome
        excluded = tuple(getattr(self.task, "dont_autoretry_for", ()))
        if isinstance(exc, named) and not isinstance(exc, excluded):
            return outcome
        return replace(outcome, final=NOT_NAMED)

    def _shown(self, raised: BaseException) -> Exception:
        """Return the exception that Celery is shown, one that its pools can carry and that is an end."""
        if self.wish and raised is self.wish.signal:
            raised = self.wish.error
        if isinstance(raised, Exception) and not isinstance(raised, (MemoryError, Retry)):
            shown: Exception = raised
            return shown
        return HandlerFailed(f"{type(raised).__name__}: {raised}").with_traceback(raised.__traceback__)


def _take_parts(request: Any) -> Carried | None:
    """Return the message a request carries, and take it and the job's state from what users pass on."""
    properties = dict(request.properties or {})
    parts: Carried | None = properties.pop(KEY, None)
    request.properties = properties
    return parts
