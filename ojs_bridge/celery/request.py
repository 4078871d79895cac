"""The request in the worker's main process: it carries the message along, and speaks for a killed child."""

from __future__ import annotations

import logging
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import signals
from celery.exceptions import Ignore, Reject, Retry
from celery.worker import state
from celery.worker.request import Request
from celery.worker.state import task_ready

from ..job import Job, count_of, decoded, key_of
from ..runs import Drop, Postpone, Refuse, Run
from ..store import Turn
from .attach import attach
from .canary import handled_natively, is_outside
from .execution import Execution
from .wire import HEADER, KEY, carried, chain_of

logger = logging.getLogger("ojs_bridge")


class OJSRequest(Request):  # type: ignore[misc]
    """A request whose task runs under the bridge."""

    _ojs_settled = False

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        state = self._request_dict.get(HEADER)
        self._ojs_outside = is_outside(self.task, self.id, state)
        if self._ojs_outside and state is None:
            return
        parts = carried(message, self._body, options.get("headers"), self._app)
        self._request_dict["properties"] = {**self._request_dict["properties"], KEY: parts}

    def acknowledge(self) -> None:
        """Acknowledge the message, and have the store forget it, some time, if it was a job's only one."""
        super().acknowledge()
        headers, bridge = self._request_dict, attach(self._app)
        if bridge.store is None or not self.acknowledged or self._ojs_outside:
            return
        if not headers.get("retries") and HEADER not in headers:
            bridge.acknowledged(Turn(key_of(str(self.id), chain_of(headers)), 0))

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Handle a failure; what the child could not report, because it died, is judged here."""
        if self._ojs_is_native():
            with handled_natively():
                return super().on_failure(exc_info, send_failed_event, return_ok)
        crash = None if return_ok or self._already_cancelled or self._already_revoked else _crash(exc_info)
        pending = crash is not None and not self._ojs_settled and not self._ojs_succeeded(crash)
        if crash is not None and pending:
            if isinstance(crash, WorkerLostError) and self.task.acks_late and _is_cold_shutdown():
                return self._ojs_give_back()
            if self._ojs_retried(crash, exc_info):
                return None
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Handle a time limit; the hard one is judged here, once."""
        if self._ojs_is_native():
            with handled_natively():
                return super().on_timeout(soft, timeout)
        if soft:
            return super().on_timeout(soft, timeout)
        if self._ojs_settled:
            return None
        exc = TimeLimitExceeded(timeout)
        if self._ojs_retried(exc, _info(exc)):
            return None
        return super().on_timeout(soft, timeout)

    def _ojs_is_native(self) -> bool:
        """Return whether Celery itself runs the job, rather than the bridge sends it on until its time."""
        if not self._ojs_outside:
            return False
        headers = self._request_dict
        bare = Job(str(self.id), self.task.name, "", 1 + (count_of(headers.get("retries")) or 0))
        job = decoded(headers.get(HEADER), bare)
        return not (isinstance(job, Job) and attach(self._app).early(job))

    def _ojs_succeeded(self, crash: Exception) -> bool:
        """Return whether the task had succeeded before its process died (Celery 5.7 and newer look)."""
        look = getattr(self, "_success_was_stored", None)
        return bool(look and isinstance(crash, WorkerLostError) and look())

    def _ojs_give_back(self) -> None:
        """Leave the message to the broker, its attempt unused: the worker itself has ended the process."""
        self._ojs_settled = True
        task_ready(self)
        execution = Execution(self.task, self._context, pause=0)
        with execution.bridge.at_once():
            begun = execution.resume(self.worker_pid)
            if isinstance(begun, Run):
                execution.bridge.give_back(begun)

    def _ojs_retried(self, exc: Exception, exc_info: Any) -> bool:
        """Have a crash judged; True when the job was sent on and is done with here."""
        self._ojs_settled = True
        # This is the worker's main process, which must not wait.
        execution = Execution(self.task, self._context, pause=0)
        with execution.bridge.at_once():
            signal = self._ojs_judged(execution, exc)
        if isinstance(signal, Ignore):
            task_ready(self)
            self.acknowledge()
            return True
        if isinstance(signal, Reject):
            task_ready(self)
            self.reject(requeue=True)
            return True
        if not isinstance(signal, Retry):
            return False
        task_ready(self)
        self._ojs_report_retry(signal, exc, exc_info)
        return True

    def _ojs_judged(self, execution: Execution, exc: Exception) -> Exception:
        """Return what tells Celery of what was decided of a crash."""
        # Nobody knows which child it was when it died before the word of its beginning was read.
        begun = execution.resume(self.worker_pid)
        match begun:
            case Drop():
                # The child died after it had ended the job, and before it could say so.
                logger.info("job %s: %s", self.id, begun.reason)
                dropped: Exception = Ignore(begun.reason)
                return dropped
            case Postpone():
                return execution.postpone(begun)
            case Refuse():
                return execution.conclude(begun, begun.decision, exc)
            case Run():
                return execution.conclude(begun, execution.judge_crash(begun, exc), exc)

    def _ojs_report_retry(self, signal: Retry, exc: Exception, exc_info: Any) -> None:
        if self.task.acks_late:
            self.acknowledge()
        self.send_event("task-retried", exception=repr(exc), traceback=str(exc_info.traceback))
        self.task.request_stack.push(self._context)
        try:
            self.task.on_retry(exc, self.id, self.args, self.kwargs, exc_info)
            signals.task_retry.send(self.task, request=self._context, reason=signal, einfo=exc_info)
        except Exception:
            logger.exception("job %s was sent on; what reports its retry failed", self.id)
        finally:
            self.task.request_stack.pop()


def _crash(exc_info: Any) -> Exception | None:
    """Return what killed the process that ran the task, or None for what the task itself raised."""
    exc: BaseException = exc_info.exception
    if isinstance(exc, ExceptionWithTraceback):
        exc = exc.exc
    if isinstance(exc, Exception):
        return exc if isinstance(exc, (WorkerLostError, TimeLimitExceeded)) else None
    lost: Exception = WorkerLostError(f"the worker process ended: {exc!r}")
    return lost


def _is_cold_shutdown() -> bool:
    return state.should_terminate is not None and state.should_terminate is not False


def _info(exc: Exception) -> Any:
    try:
        raise exc
    except Exception:  # noqa: BLE001 - Celery reads the exception that is being handled
        return ExceptionInfo()
