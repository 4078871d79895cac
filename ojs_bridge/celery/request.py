"""The request in the worker's main process: it sends the message along, and judges the crash of a child."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from copy import copy
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.exceptions import Retry
from celery.worker import state
from celery.worker.request import Request

from ..engine.events import log_error
from ..engine.runs import Postpone, Run
from ..engine.storage_retry import at_once
from ..errors import StoreError
from ..messages import HEADER
from ..rules.decision import Discarded
from ..rules.failures import outcome_of
from ..rules.job import Job
from ..store import Reservation
from . import compat
from .delivery import Delivery
from .ends import (
    Again,
    Done,
    End,
    GivenBack,
    Keep,
    Kept,
    Over,
    count_in_chord,
    is_acknowledged,
    report_retry,
    requeues,
    telling,
)
from .installation import Installation, installation
from .keeping import await_stop, is_cold, keep, may_be_of_a_stop
from .wire import KEY, OUTCOME, carried, chain_of, known

logger = logging.getLogger("ojs_bridge")


class Received:
    """What the worker's main process knows of a message; each has one, so that its making has to be cheap."""

    own: Installation
    #: When the worker received the message.
    at: float
    #: Since when the worker keeps the message, and when its run began that has crashed since.
    kept_at: float = 0.0
    began: datetime | None = None
    #: Whether its crash is judged, its run is cancelled, and the pool of this process has told of its end.
    is_judged: bool = False
    is_cancelled: bool = False
    is_told: bool = False


class OJSRequest(Request):  # type: ignore[misc]
    """A request whose job runs under the bridge."""

    acknowledged: bool
    ojs: Received

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self.ojs = received = Received()
        received.own, received.at = installation(self.app), time.monotonic()
        publication = received.own.source.publication(message)
        parts = carried(message, self.body, options.get("headers"), self.app, publication)
        self.request_dict["properties"] = {**self.request_dict["properties"], KEY: parts}

    def cancel(self, *args: Any, **options: Any) -> None:
        """End the run, and leave the message to the broker; green pools take a killed run for a success.

        A pool that cannot end a run lets it go on: Celery would raise that within the run itself.
        """
        self.ojs.is_cancelled = True
        try:
            super().cancel(*args, **options)
        except BaseException as error:
            self.ojs.is_cancelled = False
            if not isinstance(error, NotImplementedError):
                raise

    def acknowledge(self) -> None:
        """Acknowledge the message; if it surely has no copy, the store can forget its reservation."""
        if self.ojs.is_cancelled:
            return
        super().acknowledge()
        try:
            headers, own = self.request_dict, self.ojs.own
            if own.bridge and own.bridge.store and not headers.get("retries") and HEADER not in headers:
                key = Job(str(self.id), "", "", chain=chain_of(headers)).key
                for keeper in tuple(own.keepers):
                    keeper.forget(self, Reservation(key, 0))
        except Exception:
            logger.exception("job %s: the store keeps its last reservation for a day", known(self))

    def ojs_end(self, end: Any) -> None:
        """Handle what a pool of this process tells of a run: a killed greenlet looks like a success."""
        if isinstance(end, tuple) and end[0] is False and not (self.ojs.is_cancelled or _is_over(self)):
            end = _info(WorkerLostError("its greenlet was killed"))
        if isinstance(end, ExceptionInfo):
            self.on_failure(end)
        else:
            self.on_success(end)
        self.ojs.is_told = True
        self.ojs.own.running.pop(self, None)

    def ojs_left(self, error: BaseException | None) -> None:
        """End a run that its thread or greenlet has left without an end, as if its process had died.

        `error` is what the pool has of that.
        """
        is_acknowledged = self.acknowledged or self.message.acknowledged
        is_ended = is_acknowledged and self not in compat.active_requests(state)
        if not (self.ojs.is_told or is_ended or self.ojs.is_cancelled or _is_over(self)):
            self.acknowledged = is_acknowledged
            for settle in ("ack", "reject"):
                setattr(self.message, settle, partial(_once, self.message, getattr(self.message, settle)))
            logger.error("job %s: its run has broken off: %r", known(self), error)
            self.ojs.is_judged = False
            self.on_failure(_info(WorkerLostError(f"its thread has left it: {error!r}")))

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Handle a failure; the crash of a child is judged here."""
        raised = exc_info.exception
        if isinstance(raised, ExceptionWithTraceback):
            raised = raised.exc
        if isinstance(raised, Keep) and self._ojs_keep(raised.kept):
            return None
        if not isinstance(raised, Retry):
            self._ojs_leave(is_acknowledged(raised))
        if not return_ok and is_cold() and compat.already_cancelled(self):
            # The process may have died before it gave its attempt back.
            self._ojs_release()
        crash = None if return_ok or _is_over(self) else _crash(raised)
        if crash is None or self.ojs.is_judged or self._ojs_succeeded(crash):
            return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)
        natively = partial(super().on_failure, exc_info, send_failed_event, return_ok)
        if requeues(self.task, crash):
            # Celery tells of this failure in `on_timeout` alone.
            natively = partial(super().on_timeout, soft=False, timeout=crash.args[0] if crash.args else None)
        judge = partial(self._ojs_end, crash, exc_info, self.worker_pid, natively)
        if isinstance(crash, WorkerLostError) and self.task.acks_late and may_be_of_a_stop(raised):
            self.ojs.is_judged = True
            return await_stop(self.app, self._ojs_give_back, judge)
        return judge()

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Handle a time limit; a hard one is judged here, once."""
        if soft:
            return super().on_timeout(soft, timeout)
        if self.ojs.is_judged:
            return None
        exc = TimeLimitExceeded(timeout)
        return self._ojs_end(exc, _info(exc), self.worker_pid, partial(super().on_timeout, soft, timeout))

    def ojs_send_on(self) -> bool:
        """Publish the message of a job that waits anew, and acknowledge it; False if that cannot be."""
        delivery = self._ojs_delivery()
        (job, _), at = delivery.read(), delivery.engine.now() + timedelta(seconds=1)
        with at_once():
            sent = isinstance(job, Job) and isinstance(delivery.postpone(Postpone(job.waiting(at), at)), Done)
        if sent:
            compat.task_ready(state)(self)
            self.acknowledge()
        return sent

    def _ojs_keep(self, kept: Kept, again: Callable[[], object] | None = None) -> bool:
        """Let the worker keep the message; False if it cannot."""
        self.ojs.kept_at = self.ojs.kept_at or time.monotonic()
        if kept.outcome is not None:
            self.request_dict["properties"] = {**self.request_dict["properties"], OUTCOME: kept.outcome}
        return keep(self.app, self, kept, again)

    def _ojs_delivery(self) -> Delivery:
        # It takes the message out of its context, and another run may follow.
        return Delivery(self.task, copy(compat.context(self)))

    def _ojs_succeeded(self, crash: Exception) -> bool:
        """Return whether the task had succeeded before its process died (Celery 5.7 and newer)."""
        look = compat.success_was_stored(self, None)
        stored = look() if look and isinstance(crash, WorkerLostError) else None
        if stored:
            # Celery only acknowledges. The chord may not have counted the job.
            count_in_chord(self.task, compat.context(self), stored.get("result"))
        return bool(stored)

    def _ojs_release(self) -> None:
        """Release the reservation of a run whose process ended with its worker."""
        delivery = self._ojs_delivery()
        with at_once(), suppress(StoreError):
            run = delivery.resume(self.worker_pid)
            if isinstance(run, Run):
                delivery.engine.settling.release(run)

    def _ojs_give_back(self) -> None:
        """Give the message back, its attempt unused: the worker's shutdown ended the process."""
        logger.info("job %s: its process ended with its worker, and its attempt is not used", known(self))
        compat.task_ready(state)(self)
        self._ojs_release()
        if not is_cold():
            # This worker may wait for other jobs. A cold shutdown closes the connection at once.
            self.reject(requeue=True)

    def _ojs_end(
        self, exc: Exception, exc_info: Any, process: int | None, natively: Callable[[], object]
    ) -> Any:
        """Judge a crash; `natively` lets Celery end a job that does not go on."""
        self.ojs.is_judged = True
        if self.time_start:
            self.ojs.began = datetime.fromtimestamp(self.time_start, timezone.utc)
        try:
            # The worker's main process must not wait.
            with at_once():
                end = crashed(self._ojs_delivery(), exc, process, self.ojs.began)
        except StoreError as error:
            end = Kept(repr(error))
        except Exception as error:
            logger.exception("job %s: its crash cannot be judged", known(self))
            end = Kept(repr(error))
        again = partial(self._ojs_end, exc, exc_info, process, natively)
        if isinstance(end, Kept) and self._ojs_keep(Kept(end.why), again):
            return
        compat.task_ready(state)(self)
        match end:
            case Done():
                self.acknowledge()
            case GivenBack() | Kept():
                # Another worker has the job, or this worker cannot keep the message.
                self.reject(requeue=True)
            case Again():
                self._ojs_report_retry(end, exc, exc_info)
            case Over():
                self._ojs_leave(end.is_acknowledged)
                natively()

    def _ojs_leave(self, is_acknowledged: bool | None) -> None:
        """Acknowledge or reject the message of a job that has ended, before Celery does it by its options."""
        if is_acknowledged:
            self.acknowledge()
        elif is_acknowledged is not None:
            self.reject(requeue=False)

    def _ojs_report_retry(self, end: Again, exc: Exception, exc_info: Any) -> None:
        if self.task.acks_late:
            self.acknowledge()
        try:
            self.send_event("task-retried", exception=repr(exc), traceback=str(exc_info.traceback))
            stack, context = compat.request_stack(self.task), compat.context(self)
            context.args, context.kwargs = self.args, self.kwargs
            stack.push(context)
            try:
                report_retry(self.task, context, telling(self.task, context, end))
            finally:
                stack.pop()
        except Exception as error:  # noqa: BLE001 - it goes to the log
            log_error(error, "job %s was sent on; what reports its retry failed", known(self))


def crashed(delivery: Delivery, crash: Exception, process: int | None, began: datetime | None) -> End:
    """Judge a job whose process was killed, or died.

    `process` is its number; None if the child died at once. It `began` the job at about this time. If the
    broker still has the message, the attempt is lost, whatever `retry_on` says. Raises StoreError.
    """
    run, task = delivery.resume(process), delivery.task
    if not isinstance(run, Run):
        return delivery.not_run(run)
    run = run._replace(began=run.began or began)
    lost = isinstance(crash, WorkerLostError) and task.acks_late
    final = None if lost else run.task.layers.retries.rules_out(crash)
    decision = delivery.judge(run, outcome_of(crash, run.task.errors, final))
    if requeues(task, crash) and isinstance(decision, Discarded) and run.task.layers.is_native:
        # No owner has said how often the job runs: Celery runs it again.
        delivery.engine.settling.release(run)
        return Over(crash)
    return delivery.conclude(run, decision, crash)


def _once(message: Any, settle: Callable[..., None], **options: Any) -> None:
    """Acknowledge or reject a message, unless that is done: a second time would end Celery's main thread.

    The acknowledgement of a run that broke off may still be on its way to that thread.
    """
    if not message.acknowledged:
        settle(**options)


def _is_over(request: Any) -> bool:
    """Return whether Celery itself has ended the run."""
    return bool(compat.already_cancelled(request) or compat.already_revoked(request))


def _crash(exc: BaseException) -> Exception | None:
    """Return the error of a process that died, or ran out of memory beside its task; None for another."""
    if isinstance(exc, Exception) and not isinstance(exc, MemoryError):
        return exc if isinstance(exc, (WorkerLostError, TimeLimitExceeded)) else None
    lost: Exception = WorkerLostError(f"the worker process ended: {exc!r}")
    return lost


def _info(exc: Exception) -> Any:
    try:
        raise exc
    except Exception:  # noqa: BLE001 - Celery reads the exception that is being handled
        return ExceptionInfo()
