"""The end of a Celery delivery: its job goes on, is a dead letter, or waits in the worker."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry

from ..engine.carrying import NotCarried
from ..engine.engine import Engine
from ..engine.ports import Ended, Onward
from ..engine.reservations import TakenOver
from ..engine.runs import Postpone, Refuse, Run
from ..errors import StoreError
from ..messages import HEADER, parameters_of
from ..rules.decision import Decision, GiveBack, RetryAt, SnoozeUntil
from ..rules.job import Job
from . import sending
from . import wire as wires
from .attach import FRAMEWORK
from .delivery import Delivery
from .holding import Hold, Unsettled, portable
from .results import store_retry
from .wire import EAGER_RETRIES, Wire, known
from .wish import NOTHING_ASKED, Asked, Wish

logger = logging.getLogger("ojs_bridge")


class RefusedJob(Exception):
    """The message's retry state or policy cannot be read, so its task was not run."""


def dropped(job: Job, late: TakenOver, *, returnable: bool) -> Exception:
    """Log that the outcome of a run does not count; return the exception with which Celery stores nothing.

    The message goes back to the queue, because the worker that took the run over may have died since. The
    next delivery finds out.
    """
    logger.warning("job %s: %s", job, late)
    told: Exception = Reject(str(late), requeue=True) if returnable else Ignore(str(late))
    return told


class Conclusion:
    """The end of one delivery, and its outlet for the engine; an exception tells Celery of the end."""

    framework = FRAMEWORK

    def __init__(
        self,
        engine: Engine,
        task: Task,
        request: Any,
        delivery: Delivery,
        wish: Wish | None = None,
        asked: Asked = NOTHING_ASKED,
    ) -> None:
        self._engine = engine
        self._task = task
        self._request = request
        self._delivery = delivery
        self._wish = wish
        self._asked = asked
        #: The task's error, as Celery shows it, and the exception that tells Celery of the end.
        self._shown: Exception = Ignore()
        self._signal: Exception = self._shown
        #: The headers of the message that goes on.
        self._headers: dict[str, Any] = {}

    def conclude(self, begun: Run | Refuse, decision: Decision, shown: Exception) -> Exception:
        """Have a decision carried out, and return the exception that tells Celery of it.

        A decision that has no place now waits in the worker. A run that was taken over is dropped.
        """
        self._shown = self._signal = shown
        try:
            self._engine.check(begun)
            self._engine.carry(begun, decision, self)
        except TakenOver as late:
            return dropped(begun.job, late, returnable=self.can_wait)
        except NotCarried as left:
            return self._leave(begun, left.decision, left.error)
        return self._signal

    def refuse(self, refused: Refuse) -> Exception:
        """Keep a job that cannot be read as a dead letter."""
        return self.conclude(refused, refused.decision, RefusedJob(refused.decision.reason))

    def postpone(self, begun: Postpone) -> Exception:
        """Send a job on that came before its time."""
        try:
            refused = self._engine.postpone(begun, self)
        except Exception as error:  # noqa: BLE001 - the job waits in the worker
            return self.wait(error)
        return self._signal if refused is None else self.refuse(refused)

    def wait(self, error: BaseException) -> Exception:
        """Have the worker hold the delivery until the job can begin."""
        return Hold(repr(error), needs_store=isinstance(error, StoreError))

    def leave(self, error: Exception, outcome: Unsettled | None = None) -> Exception:
        """Have the worker hold a delivery that has no other place, if the broker still has its message."""
        if self.can_wait:
            return Hold(repr(error), outcome=outcome)
        logger.critical("job %s is lost, being acknowledged before it ran: %r", known(self._request), error)
        return error

    def _leave(self, begun: Run | Refuse, decision: Decision, error: Exception) -> Exception:
        """Have the worker keep a decision that has no place now; if the worker dies, the attempt is lost."""
        if isinstance(begun, Run):
            self._engine.expire(begun)
        goes_on = isinstance(decision, (RetryAt, SnoozeUntil))
        shown = (self._reason or self._shown) if goes_on else self._shown
        return self.leave(error, portable(Unsettled(os.getpid(), decision, shown, *self._asked)))

    @property
    def _reason(self) -> Any:
        """The error that Celery shows as the cause of a retry."""
        wish = self._wish
        return wish.cause if wish and self._shown is wish.error else self._shown

    @property
    def can_wait(self) -> bool:
        """Whether the broker still has the message."""
        return self._delivery.returnable

    @property
    def unreachable(self) -> tuple[type[Exception], ...]:
        """The errors of a store or a broker that is out of reach."""
        return (StoreError, *sending.out_of_reach(self._task.app))

    def prepare(self, onward: Onward) -> bool:
        """Make the exception for Celery, and the headers; False for an eager retry, which runs at once."""
        job, decision = onward.job, onward.decision
        if decision is not None:
            signal = Retry(exc=self._reason, when=decision.delay, is_eager=self._request.is_eager)
            # Celery raises a Retry while it handles the task's error, and shows the error's traceback.
            signal.__context__ = self._shown
            self._signal = signal
            if self._request.is_eager:
                signal.sig = self._eager_signature(job)
                return False
        changes: dict[str, Any] = {HEADER: onward.header.text}
        if decision is not None:
            changes = {"retries": job.attempt - 1, **changes}
            store_retry(self._task, self._request, self._signal)
        self._headers = {**(self._asked.options.get("headers") or {}), **changes}
        return True

    def publish(self, onward: Onward) -> None:
        """Publish the message as it goes on."""
        wire, options = self._asked_for()
        # Nobody is told of a postponement: Celery itself would hold the message.
        told = onward.decision is not None
        self._engine.context.storage_retry.run(
            lambda: sending.publish(
                *(self._task.app, wire, self._headers, self._engine.now()),
                due=onward.at,
                options=options,
                told=told,
            ),
            retry_on=self.unreachable,
        )

    def kept(self, onward: Onward | None) -> dict[str, Any]:
        """Return the message as the store keeps it, with the names of what the task takes."""
        names = {"parameters": [*parameters_of(self._task.run)]}
        if onward is None:
            return {**wires.to_json(self._delivery.wire), **names}
        wire, options = self._asked_for()
        return {**sending.parked_message(wire, self._headers, options), **names}

    def sent(self, onward: Onward) -> None:
        """Do nothing: the exception for Celery ends the delivery."""

    def complete(self) -> None:
        """Do nothing: Celery stores the result."""

    def release(self, decision: GiveBack) -> None:
        """Have Celery give the message back to its queue."""
        self._signal = Reject(decision.reason, requeue=True)

    def discard(self, ended: Ended) -> None:  # noqa: ARG002 - as the engine calls it
        """Show the failure."""
        self._signal = self._shown

    def dead_letter(self, ended: Ended, *, in_store: bool) -> None:
        """Show the failure; a job that the store does not have goes to its queue's dead queue."""
        self._signal = self._shown
        if in_store or self._request.is_eager:
            return
        header = self._engine.last_header(ended.job)
        state = {} if header is None else {HEADER: header.text}
        wire, changes = self._delivery.wire, {"retries": ended.job.attempt, **state}
        if not sending.is_buried(self._engine, self._task.app, wire, changes, can_wait=self.can_wait):
            vars(self._shown)[sending.REJECTED] = True

    def _asked_for(self) -> tuple[Wire, Mapping[str, Any]]:
        """Return the message and the options of its route, as the retry changes them."""
        wire, (arguments, options) = self._delivery.wire, self._asked
        if arguments:
            wire = wires.with_arguments(wire, *arguments)
        return (wires.with_options(wire, options), options) if options else (wire, options)

    def _eager_signature(self, job: Job) -> Any:
        # A due time would only postpone what runs at once.
        header = self._engine.header(job._replace(next_retry_at=None)).text
        arguments, options = self._asked
        args, kwargs = arguments or (None, None)
        headers = {**(self._request.headers or {}), **(options.get("headers") or {}), HEADER: header}
        others = {**options, "headers": headers, EAGER_RETRIES: job.attempt - 1}
        return self._task.signature_from_request(
            self._request, args, kwargs, retries=job.attempt - 1, **others
        )
