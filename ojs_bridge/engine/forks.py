"""The locks that keep a fork away while a thread holds locks that its child could never release."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from typing import Any
from weakref import WeakValueDictionary

#: For how many seconds a fork waits for other threads.
_PATIENCE = 2.0

#: Those that there are, in the order in which they were made.
_all: WeakValueDictionary[int, BetweenForks] = WeakValueDictionary()
_made = itertools.count()
#: The locks that a forking thread holds.
_forking = threading.local()


class BetweenForks:
    """A thread has its lock while it holds locks of other code, so that no fork comes meanwhile.

    Such locks are those of a log handler's stream, or of a listener's connections. A forked child inherits
    them as they are, and would wait for a thread that it does not have. A fork waits for a while at most. A
    thread that needs two of these locks takes first the one that was made last.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        _all[next(_made)] = self


#: Its lock is held to start a thread.
starting = BetweenForks()


def _log_between_forks(logger: logging.Logger) -> None:
    handle, writing = logger.handle, BetweenForks()

    def handle_between_forks(record: logging.LogRecord) -> Any:
        with writing.lock:
            return handle(record)

    logger.handle = handle_between_forks  # type: ignore[method-assign]


def _before_fork() -> None:
    deadline = time.monotonic() + _PATIENCE
    _forking.within = []
    for each in reversed([*_all.values()]):
        if each.lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            _forking.within.append(each)


def _in_parent() -> None:
    for each in _forking.within:
        each.lock.release()


def _in_child() -> None:
    for each in [*_all.values()]:
        if each not in _forking.within:
            # The child does not have the thread that holds it.
            each.lock = threading.RLock()
    _in_parent()


_log_between_forks(logging.getLogger("ojs_bridge"))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
