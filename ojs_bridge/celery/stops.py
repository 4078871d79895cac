"""The stop of a worker: a process of its pool that dies of it has used no attempt of its job.

Most process managers send their signal to all processes of a worker, and the processes of a pool die of it.
"""

from __future__ import annotations

import re
import signal
from typing import Any

from billiard.common import EX_SOFTWARE
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Task, current_app, signals
from celery.worker import state

from ..bridge import Bridge
from ..engine.heartbeat import Heartbeat
from . import compat
from .attach import BRIDGE

#: The signals that stop a worker, and the status of a process that one strikes while it ends of another.
_STOPPED: set[int] = {signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, EX_SOFTWARE}
#: How billiard says of what a process died: the process may have handled the signal, and said its number.
_STATUS = re.compile(r"(?:signal|exitcode) (\d+)")
#: For how many seconds a pool's process may know of a stop before the worker's main process does.
AHEAD = 3.0
#: Green pools end a task with exceptions of these modules.
GREEN = ("gevent", "greenlet", "eventlet")


def is_stopping() -> bool:
    """Return whether this worker was told to stop."""
    return is_cold() or _is_set(compat.should_stop(state))


def is_cold() -> bool:
    """Return whether this worker was told to stop without waiting for its jobs."""
    return _is_set(compat.should_terminate(state))


def _is_set(flag: int | bool | None) -> bool:
    """Return whether a flag of Celery's is set; it may be the exit status 0."""
    return flag is not None and flag is not False


def note_stop(worker: Any, heart: Heartbeat) -> None:
    """Let the store know when a worker is told to stop: it may be killed before its jobs end."""
    soft: list[bool] = []
    heart.note_stop(lambda: bool(soft) or is_stopping())
    softly = getattr(worker, "wait_for_soft_shutdown", None)
    if softly:  # Celery 5.5; it says that it stops when this wait is over

        def wait() -> None:
            soft.append(True)
            softly()

        worker.wait_for_soft_shutdown = wait


def may_be_of_a_stop(died: BaseException) -> bool:
    """Return whether a process may have died of its worker's stop, by the error that tells of its death.

    A cold shutdown ends the processes in several ways.
    """
    status = _STATUS.search(str(died)) if isinstance(died, WorkerLostError) else None
    return is_cold() or (status is not None and int(status[1]) in _STOPPED)


def requeues(task: Task, crash: Exception) -> bool:
    """Return whether Celery puts a message back whose hard time limit has struck (5.7 and newer)."""
    return isinstance(crash, TimeLimitExceeded) and not getattr(task, "acks_on_timeout", True)


def _let_listeners_finish(**_: Any) -> None:
    bridge: Bridge | None = vars(compat.get_current_object(current_app)()).get(BRIDGE)
    if bridge is not None:
        bridge.flush()


signals.worker_process_shutdown.connect(_let_listeners_finish, weak=False)
signals.worker_shutdown.connect(_let_listeners_finish, weak=False)
