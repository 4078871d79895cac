"""What Celery's pools raise in a task to end it, and how it is kept away from what becomes of an outcome."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from billiard.pool import SIG_SOFT_TIMEOUT
from celery import Task
from celery.exceptions import WorkerShutdown, WorkerTerminate

#: Green pools end a task with exceptions of these modules.
_GREEN = ("gevent", "greenlet", "eventlet")


def is_the_tasks_own(exc: BaseException, task: Task, request: Any) -> bool:
    """Tell a failure of the task from what Celery's pools raise in it to end it."""
    if isinstance(exc, (WorkerShutdown, WorkerTerminate)):
        return False
    if isinstance(exc, SystemExit):
        return not _pool_ends_the_process()
    if isinstance(exc, Exception) or not type(exc).__module__.startswith(_GREEN):
        return True
    # A task may have timeouts of its own; the pool's is there only with a hard time limit.
    limited = bool((request.timelimit or (None,))[0] or task.time_limit)
    return "Timeout" in type(exc).__name__ and not limited


@contextmanager
def undisturbed() -> Iterator[None]:
    """Let no soft time limit strike while an outcome is carried out; the hard one still may."""
    if SIG_SOFT_TIMEOUT is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(SIG_SOFT_TIMEOUT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(SIG_SOFT_TIMEOUT, before or signal.SIG_DFL)


def _pool_ends_the_process() -> bool:
    """Return whether SystemExit may be billiard's own way of unwinding a terminated child."""
    from billiard import common, current_process

    fired = getattr(common, "terminate_handler_fired", None)
    # Older billiard does not say; only its children end this way.
    return bool(fired()) if fired else current_process().name != "MainProcess"
