"""Locks for starting threads and for logging, which every forked child has anew."""

from __future__ import annotations

import logging
import os
import threading
from typing import Any

#: How many seconds a fork waits for a line that a handler is still writing.
_PATIENCE = 2.0

_starting = threading.Lock()
#: Held while a line of ours is written: a child that another thread forks meanwhile inherits the stream's
#: lock as it is, and waits at its own first line for a thread that it does not have.
_writing = threading.RLock()
_held = False


def starting() -> threading.Lock:
    """Return the lock to start threads under; a child does not inherit it from a thread it does not have."""
    return _starting


def _log_between_forks(logger: logging.Logger) -> None:
    handle = logger.handle

    def handle_between_forks(record: logging.LogRecord) -> Any:
        with _writing:
            return handle(record)

    logger.handle = handle_between_forks  # type: ignore[method-assign]


def _before_fork() -> None:
    global _held  # noqa: PLW0603 - of the one fork that is under way
    _held = _writing.acquire(timeout=_PATIENCE)


def _after_fork() -> None:
    if _held:
        _writing.release()


def _in_child() -> None:
    global _starting, _writing
    _starting, _writing = threading.Lock(), threading.RLock()


_log_between_forks(logging.getLogger("ojs_bridge"))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
