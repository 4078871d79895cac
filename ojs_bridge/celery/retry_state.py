"""Storing the state RETRY before the retry is published: afterwards, the next run may have ended already."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from celery import Task
from celery.app.trace import TraceInfo
from celery.exceptions import Retry
from celery.states import RETRY

logger = logging.getLogger("ojs_bridge")


def store_retry(task: Task, request: Any, signal: Retry) -> None:
    """Store that a job is retried, if Celery would; it then does not store it again. Never raises."""
    try:
        _EarlyRetry(RETRY, signal).handle_error_state(task, request)
    except Exception:
        logger.exception("job %s is sent on, though its state cannot be stored", request.id)


class _EarlyRetry(TraceInfo):  # type: ignore[misc]
    """Celery's own rule on which jobs' errors are stored, without what else it does about a retry."""

    __slots__ = ()

    def handle_retry(self, task: Task, req: Any, store_errors: bool = True, **_: Any) -> None:
        if store_errors:
            _of(task.backend).store(req, self.retval)


class _MarkOnce:
    """A backend's `mark_as_retry`, which passes over the requests whose retry is stored."""

    def __init__(self, mark: Callable[..., Any]) -> None:
        self._mark = mark
        self._stored: WeakSet[Any] = WeakSet()

    def store(self, request: Any, signal: Retry) -> None:
        self._stored.add(request)
        shown = "".join(traceback.format_exception(signal))
        self._mark(request.id, signal.exc, shown, request=request)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return None if options.get("request") in self._stored else self._mark(*args, **options)


def _of(backend: Any) -> _MarkOnce:
    if not isinstance(backend.mark_as_retry, _MarkOnce):
        backend.mark_as_retry = _MarkOnce(backend.mark_as_retry)
    mark: _MarkOnce = backend.mark_as_retry
    return mark
