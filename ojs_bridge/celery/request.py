"""The request in the worker's main process: it carries the message along, and speaks for a killed child."""

from __future__ import annotations

import logging
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery.exceptions import Reject
from celery.worker.request import Request

from ..bridge import Refuse
from ..decision import RetryAt
from .execution import Execution
from .wire import KEY, delivered

logger = logging.getLogger("ojs_bridge")


class OJSRequest(Request):  # type: ignore[misc]
    """A request whose task runs under the bridge."""

    _ojs_settled = False

    def __init__(self, message: Any, **options: Any) -> None:
        super().__init__(message, **options)
        self._ojs_wire = delivered(message, self._body, options.get("headers"), self._app)
        self._request_dict[KEY] = self._ojs_wire

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """Handle a failure; what the child could not report, because it died, is judged here."""
        crash = None if return_ok or self._already_cancelled or self._already_revoked else _crash(exc_info)
        if crash is not None and not self._ojs_settled and self._ojs_retried(crash, exc_info):
            return None
        return super().on_failure(exc_info, send_failed_event=send_failed_event, return_ok=return_ok)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """Handle a time limit; the hard one is judged here, once."""
        if soft:
            return super().on_timeout(soft, timeout)
        if self._ojs_settled:
            return None
        exc = TimeLimitExceeded(timeout)
        if self._ojs_retried(exc, _info(exc)):
            return None
        return super().on_timeout(soft, timeout)

    def _ojs_retried(self, exc: Exception, exc_info: Any) -> bool:
        """Have a crash judged; True when the job was sent on and is done with here."""
        self._ojs_settled = True
        execution = Execution(self.task, self._context, self._ojs_wire)
        begun = execution.resume()
        decision = begun.decision if isinstance(begun, Refuse) else execution.bridge.judge(begun, exc)
        if isinstance(execution.conclude(begun, decision, exc), Reject):
            self.reject(requeue=True)
            return True
        if not isinstance(decision, RetryAt):
            return False
        self._ojs_report_retry(exc, exc_info)
        return True

    def _ojs_report_retry(self, exc: Exception, exc_info: Any) -> None:
        if self.store_errors:
            self.task.backend.mark_as_retry(self.id, exc, exc_info.traceback, request=self._context)
        if self.task.acks_late:
            self.acknowledge()
        self.send_event("task-retried", exception=repr(exc), traceback=str(exc_info.traceback))
        self.task.on_retry(exc, self.id, self.args, self.kwargs, exc_info)


def _crash(exc_info: Any) -> Exception | None:
    """Return what killed the process that ran the task, or None for what the task itself raised."""
    exc: BaseException = exc_info.exception
    if isinstance(exc, ExceptionWithTraceback):
        exc = exc.exc
    if isinstance(exc, Exception):
        return exc if isinstance(exc, (WorkerLostError, TimeLimitExceeded)) else None
    lost: Exception = WorkerLostError(f"the worker process ended: {exc!r}")
    return lost


def _info(exc: Exception) -> Any:
    try:
        raise exc
    except Exception:  # noqa: BLE001 - Celery reads the exception that is being handled
        return ExceptionInfo()
