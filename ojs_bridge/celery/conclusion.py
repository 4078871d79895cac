"""Carrying out what was decided of a Celery job: sent on, parked, buried, or held by the worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Retry

from ..engine.engine import Engine
from ..engine.reservations import TakenOver
from ..engine.runs import Postpone, Refuse, Run
from ..errors import InvalidState, StoreError
from ..messages import parameters_of
from ..spec.decision import DeadLetter, Decision, RetryAt, Snooze
from ..spec.job import Job
from . import sending
from . import wire as wires
from .attach import FRAMEWORK
from .delivery import Delivery
from .holding import Held, Unsettled, portable
from .results import store_retry
from .wire import EAGER_RETRIES, HEADER, Wire
from .wish import Wish

logger = logging.getLogger("ojs_bridge")


class RefusedJob(Exception):
    """The message's retry state or policy cannot be read, so its task was not run."""


def dropped(job: Job, late: TakenOver) -> Exception:
    """Say that a run was not heard, and return what has Celery acknowledge it and store nothing of it."""
    logger.warning("job %s: %s", job.id, late)
    ignored: Exception = Ignore(str(late))
    return ignored


class Conclusion:
    """The end of one delivery; every method returns the exception that tells Celery of it."""

    def __init__(
        self, engine: Engine, task: Task, request: Any, delivery: Delivery, wish: Wish | Unsettled | None
    ) -> None:
        self._engine = engine
        self._task = task
        self._request = request
        self._delivery = delivery
        self._wish = wish

    def conclude(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        """Carry a decision out.

        What cannot be carried out now is held by the worker; what never can be becomes a dead letter, and so
        does what its queue has forgotten, being acknowledged before it ran. A run whose reservation was taken
        over is dropped.
        """
        try:
            self._engine.check(begun)
            return self._carry_out(begun, decision, shown)
        except TakenOver as late:
            return dropped(begun.job, late)

    def _carry_out(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        try:
            signal = self._execute(begun, decision, shown)
        except Exception as error:
            if self._delivery.returnable and isinstance(error, self._out_of_reach()):
                return self._leave(begun, decision, shown, error)
            logger.exception("job %s: what was decided cannot be carried out", begun.job.id)
            return self._keep(begun, self._engine.impossible(begun.job, decision, error), shown)
        self._engine.settle(begun, decision)
        return signal

    def refuse(self, refused: Refuse) -> Exception:
        """Keep a job that cannot be read as a dead letter."""
        return self.conclude(refused, refused.decision, RefusedJob(refused.decision.reason))

    def postpone(self, begun: Postpone) -> Exception:
        """Send a job on that came before its time."""
        ignored: Exception = Ignore()
        try:
            changes = {HEADER: self._engine.header(begun.job).text}
            self._hand_on(begun, begun.job, begun.at, "came before its time", changes)
        except Exception as error:
            # A reserved job is ended by its worker; another that no message can carry would wait for ever.
            passes = begun.reservation is not None or isinstance(error, self._out_of_reach())
            if self._delivery.returnable and passes:
                return self.wait(error)
            logger.exception("job %s cannot be put off", begun.job.id)
            refused = Refuse(begun.job, self._engine.impossible(begun.job, None, error))
            return self._keep(refused, refused.decision, RefusedJob(refused.decision.reason))
        return ignored

    def wait(self, error: BaseException) -> Exception:
        """Have the worker hold the delivery, and hand it to its pool again when the job may begin."""
        return Held(repr(error), needs_store=isinstance(error, StoreError))

    def _execute(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        match decision:
            case RetryAt() | Snooze():
                job = self._engine.after(begun.job, decision)
                signal: Exception = self._send_on(begun, job, decision, shown)
                return signal
            case DeadLetter():
                self._bury(begun, decision)
        return shown

    def _keep(self, begun: Run | Refuse, decision: DeadLetter, shown: Exception) -> Exception:
        try:
            self._bury(begun, decision)
        except Exception as error:  # noqa: BLE001 - the delivery itself is the last place for the job
            return self._leave(begun, decision, shown, error)
        self._engine.settle(begun, decision)
        return shown

    def _leave(
        self, begun: Run | Refuse, decision: Decision, shown: Exception, error: Exception
    ) -> Exception:
        """Leave an outcome that has no place now to the worker; if the worker dies, the attempt is lost."""
        if isinstance(begun, Run):
            self._engine.expire(begun)
        if isinstance(decision, (RetryAt, Snooze)):
            shown = self._reason(shown) or shown
        wish = self._wish
        asked = (wish.arguments, wish.options) if wish else ()
        return self.leave(error, portable(Unsettled(os.getpid(), decision, shown, *asked)))

    def leave(self, error: Exception, outcome: Unsettled | None = None) -> Exception:
        """Have the worker hold a delivery that has no other place, if the broker still has it."""
        if self._delivery.returnable:
            return Held(repr(error), outcome=outcome)
        logger.critical("job %s is lost, being acknowledged before it ran: %r", self._request.id, error)
        return error

    def _reason(self, shown: Exception) -> Any:
        """Return the error that a retry is shown to be for."""
        wish = self._wish
        return wish.cause if isinstance(wish, Wish) and shown is wish.error else shown

    def _out_of_reach(self) -> tuple[type[Exception], ...]:
        return (StoreError, *sending.out_of_reach(self._task.app))

    def _send_on(self, begun: Run | Refuse, job: Job, decision: RetryAt | Snooze, shown: Exception) -> Retry:
        signal = Retry(exc=self._reason(shown), when=decision.delay, is_eager=self._request.is_eager)
        # As Task.retry raises it: while what the task raised is handled, and shown with its traceback.
        signal.__context__ = shown
        if self._request.is_eager:
            # Eager retries run at once: a due time would only postpone them.
            header = self._engine.header(job._replace(next_retry_at=None)).text
            signal.sig = self._eager_signature(job, {**(self._request.headers or {}), HEADER: header})
        else:
            changes = {"retries": job.attempt - 1, HEADER: self._engine.header(job).text}
            store_retry(self._task, self._request, signal)
            self._hand_on(begun, job, decision.at, decision.reason, changes)
        return signal

    def _hand_on(
        self, begun: Run | Refuse | Postpone, job: Job, at: datetime, reason: str, changes: Mapping[str, Any]
    ) -> None:
        """Park a job or publish it, whichever its time asks for, and the other one where that fails."""
        wire, options = self._asked_for()
        headers = {**(options.get("headers") or {}), **changes}
        app, out_of_reach = self._task.app, self._out_of_reach()
        # A postponement is no news: Celery itself would hold the message.
        told = not isinstance(begun, Postpone)

        def park() -> None:
            message = {**sending.parked(wire, headers, options), **self._parameters()}
            self._engine.park(begun, job, at, reason, FRAMEWORK, message)

        def publish() -> None:
            self._engine.insist(
                lambda: sending.publish(app, wire, headers, due=at, options=options, told=told), out_of_reach
            )

        first, second = (park, publish) if self._engine.parks(at) else (publish, park)
        try:
            first()
        except out_of_reach as error:
            if self._engine.store is None:
                raise
            second()
            logger.warning("job %s: %r; it is kept the other way", job.id, error)

    def _asked_for(self) -> tuple[Wire, Mapping[str, Any]]:
        """Return the message and the publishing options, with what `self.retry(...)` changed of them."""
        wire, wish = self._delivery.wire, self._wish
        if wish and wish.arguments:
            wire = wires.with_arguments(wire, *wish.arguments)
        return wire, wish.options if wish else {}

    def _eager_signature(self, job: Job, headers: dict[str, Any]) -> Any:
        args, kwargs = (self._wish and self._wish.arguments) or (None, None)
        return self._task.signature_from_request(
            self._request,
            args,
            kwargs,
            retries=job.attempt - 1,
            headers=headers,
            **{EAGER_RETRIES: job.attempt - 1},
        )

    def _bury(self, begun: Run | Refuse, decision: DeadLetter) -> None:
        job = self._engine.after(begun.job, decision)
        wire = self._delivery.wire
        if self._engine.store is not None:
            try:
                message = {**wires.to_json(wire), **self._parameters()}
                self._engine.bury(begun, job, decision, FRAMEWORK, message)
            except Exception:
                self._bury_in_broker(wire, job)
                logger.exception("job %s: kept in the broker's dead queue, not in the store", job.id)
        else:
            self._bury_in_broker(wire, job)

    def _bury_in_broker(self, wire: Wire, job: Job) -> None:
        if not self._request.is_eager:
            sending.bury(self._task.app, wire, {"retries": job.attempt, **self._final_state(job)})

    def _parameters(self) -> dict[str, list[str]]:
        """Return the names of what the task takes, which its message does not carry."""
        return {"parameters": [*parameters_of(self._task.run)]}

    def _final_state(self, job: Job) -> dict[str, str]:
        try:
            return {HEADER: self._engine.header(job, ended=True).text}
        except InvalidState:
            logger.exception("job %s: its dead letter keeps the state that it came with", job.id)
            return {}
