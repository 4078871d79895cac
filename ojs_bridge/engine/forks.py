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
    """A thread enters it while it holds locks of other code, so that no fork comes meanwhile.

    Such locks are those of a log handler's stream, or of a listener's connections. A forked child inherits
    them as they are, and would wait for a thread that it does not have. A fork waits for a while at most. A
    thread that enters two BetweenForks enters first the one that was made last.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _all[next(_made)] = self

    def __enter__(self) -> None:
        """Wait until no fork is under way."""
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Let forks go on."""
        self._lock.release()

    def await_until(self, deadline: float) -> bool:
        """Enter when the thread inside has left; False if it has not left by the deadline."""
        return self._lock.acquire(timeout=max(0.0, deadline - time.monotonic()))

    def renew(self) -> None:
        """Forget the thread inside: a child does not have it."""
        self._lock = threading.RLock()


#: Entered to start a thread.
starting = BetweenForks()


def _log_between_forks(logger: logging.Logger) -> None:
    handle, writing = logger.handle, BetweenForks()

    def handle_between_forks(record: logging.LogRecord) -> Any:
        with writing:
            return handle(record)

    logger.handle = handle_between_forks  # type: ignore[method-assign]


def _before_fork() -> None:
    deadline = time.monotonic() + _PATIENCE
    _forking.within = [each for each in reversed([*_all.values()]) if each.await_until(deadline)]


def _in_parent() -> None:
    for each in _forking.within:
        each.__exit__()


def _in_child() -> None:
    for each in [*_all.values()]:
        if each not in _forking.within:
            each.renew()
    _in_parent()


_log_between_forks(logging.getLogger("ojs_bridge"))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
