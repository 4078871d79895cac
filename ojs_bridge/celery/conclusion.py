"""Carrying out what was decided of a Celery job: sent on, parked, buried, or given back to its queue."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from ..bridge import Bridge
from ..decision import DeadLetter, Decision, RetryAt, Snooze
from ..errors import InvalidState
from ..job import Job
from ..reading import parameters_of
from ..runs import Postpone, Refuse, Run
from ..store import StoreError
from ..turns import TakenOver
from . import sending
from . import wire as wires
from .attach import FRAMEWORK
from .delivery import Delivery
from .eager import EAGER_RETRIES
from .retry_state import store_retry
from .wire import HEADER, Wire
from .wish import Wish

logger = logging.getLogger("ojs_bridge")

#: Seconds before a delivery goes back to a broker or store that could not be reached.
PAUSE = 1.0


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
        self, bridge: Bridge, task: Task, request: Any, delivery: Delivery, wish: Wish | None, pause: float
    ) -> None:
        self._bridge = bridge
        self._task = task
        self._request = request
        self._delivery = delivery
        self._wish = wish
        self._pause = pause

    def conclude(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        """Carry a decision out.

        What cannot be carried out now is given back to its queue; what never can be becomes a dead letter,
        and so does what its queue has forgotten, being acknowledged before it ran. A run whose reservation
        was taken over is dropped.
        """
        try:
            self._bridge.check_turn(begun)
            return self._carry_out(begun, decision, shown)
        except TakenOver as late:
            return dropped(begun.job, late)

    def _carry_out(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        try:
            signal = self._execute(begun, decision, shown)
        except Exception as error:
            if self._delivery.returnable and isinstance(error, self._out_of_reach()):
                return self._leave(begun, error)
            logger.exception("job %s: what was decided cannot be carried out", begun.job.id)
            return self._keep(begun, self._bridge.impossible(begun.job, decision, error), shown)
        self._bridge.settled(begun, decision)
        return signal

    def refuse(self, refused: Refuse) -> Exception:
        """Keep a job that cannot be read as a dead letter."""
        return self.conclude(refused, refused.decision, RefusedJob(refused.decision.reason))

    def postpone(self, begun: Postpone) -> Exception:
        """Send a job on that came before its time."""
        ignored: Exception = Ignore()
        try:
            changes = {HEADER: self._bridge.header(begun.job).text}
            self._hand_on(begun, begun.job, begun.at, "came before its time", changes)
        except Exception as error:
            # Who holds its turn ends it; any other job that no message can carry would come again for ever.
            passes = begun.turn is not None or isinstance(error, self._out_of_reach())
            if self._delivery.returnable and passes:
                return self.give_back(error)
            logger.exception("job %s cannot be put off", begun.job.id)
            refused = Refuse(begun.job, self._bridge.impossible(begun.job, None, error))
            return self._keep(refused, refused.decision, RefusedJob(refused.decision.reason))
        return ignored

    def give_back(self, error: BaseException) -> Exception:
        """Have the broker deliver the message again, after a pause."""
        logger.error("job %s goes back to its queue: %r", self._request.id, error)
        time.sleep(self._pause)
        requeued: Exception = Reject(error, requeue=True)
        return requeued

    def _execute(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        match decision:
            case RetryAt() | Snooze():
                job = self._bridge.after(begun.job, decision)
                signal: Exception = self._send_on(begun, job, decision, shown)
                return signal
            case DeadLetter():
                self._bury(begun, decision)
        return shown

    def _keep(self, begun: Run | Refuse, decision: DeadLetter, shown: Exception) -> Exception:
        try:
            self._bury(begun, decision)
        except Exception as error:  # noqa: BLE001 - the delivery itself is the last place for the job
            return self._leave(begun, error)
        self._bridge.settled(begun, decision)
        return shown

    def _leave(self, begun: Run | Refuse, error: Exception) -> Exception:
        """Leave a delivery whose outcome has no place; with a reservation, its attempt is lost."""
        if isinstance(begun, Run):
            self._bridge.let_run_out(begun)
        return self.leave(error)

    def leave(self, error: Exception) -> Exception:
        """Give a delivery back that has no other place, if the broker still has it."""
        if self._delivery.returnable:
            return self.give_back(error)
        logger.critical("job %s is lost, being acknowledged before it ran: %r", self._request.id, error)
        return error

    def _out_of_reach(self) -> tuple[type[Exception], ...]:
        return (StoreError, *sending.out_of_reach(self._task.app))

    def _send_on(self, begun: Run | Refuse, job: Job, decision: RetryAt | Snooze, shown: Exception) -> Retry:
        wish = self._wish
        reason = wish.cause if wish and shown is wish.error else shown
        signal = Retry(exc=reason, when=decision.delay, is_eager=self._request.is_eager)
        # As Task.retry raises it: while what the task raised is handled, and shown with its traceback.
        signal.__context__ = shown
        if self._request.is_eager:
            # Eager retries run at once: a due time would only postpone them.
            header = self._bridge.header(job._replace(next_retry_at=None)).text
            signal.sig = self._eager_signature(job, {**(self._request.headers or {}), HEADER: header})
        else:
            changes = {"retries": job.attempt - 1, HEADER: self._bridge.header(job).text}
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
            self._bridge.park(begun, job, at, reason, FRAMEWORK, message)

        def publish() -> None:
            self._bridge.insist(
                lambda: sending.publish(app, wire, headers, due=at, options=options, told=told), out_of_reach
            )

        first, second = (park, publish) if self._bridge.parks(at) else (publish, park)
        try:
            first()
        except out_of_reach as error:
            if self._bridge.store is None:
                raise
            logger.warning("job %s: %r; it is kept the other way", job.id, error)
            second()

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
        job = self._bridge.after(begun.job, decision)
        wire = self._delivery.wire
        if self._bridge.store is not None:
            try:
                message = {**wires.to_json(wire), **self._parameters()}
                self._bridge.bury(begun, job, decision, FRAMEWORK, message)
            except Exception:
                logger.exception("job %s: kept in the broker's dead queue, not in the store", job.id)
            else:
                return
        if not self._request.is_eager:
            sending.bury(self._task.app, wire, {"retries": job.attempt, **self._final_state(job)})

    def _parameters(self) -> dict[str, list[str]]:
        """Return the names of what the task takes, which its message does not carry."""
        return {"parameters": [*parameters_of(self._task.run)]}

    def _final_state(self, job: Job) -> dict[str, str]:
        try:
            return {HEADER: self._bridge.header(job, ended=True).text}
        except InvalidState:
            logger.exception("job %s: its dead letter keeps the state that it came with", job.id)
            return {}
