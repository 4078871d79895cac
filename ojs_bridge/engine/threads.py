"""The threads of the bridge: no error ends one, no line of the log raises, and no fork breaks a lock."""

from __future__ import annotations

import functools
import itertools
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias, TypeVar
from weakref import WeakValueDictionary

T = TypeVar("T")

logger = logging.getLogger("ojs_bridge")

#: After how many seconds a thread goes on that an error has thrown out of its round.
AGAIN = 1.0

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


class cached(functools.cached_property[T]):  # noqa: N801 - a decorator, as Python's own
    """A `cached_property` as it is from Python 3.12 on, without a lock: two threads may both make the value.

    Before, all objects of a class share the lock. A child that was forked meanwhile would wait for ever.
    """

    def __init__(self, make: Callable[[Any], T]) -> None:
        super().__init__(make)
        self.lock = nullcontext()


#: Its lock is held to start a thread.
starting = BetweenForks()


#: Says whether an exception comes from outside, to end what the thread does: a time limit, or a shutdown.
Aimed: TypeAlias = Callable[[BaseException], bool]

_aimed: list[Aimed] = []


def let_through(aimed: Aimed) -> None:
    """Let exceptions through by which a framework interrupts a thread; the adapter calls this once."""
    _aimed.append(aimed)


def is_aimed(error: BaseException) -> bool:
    """Return whether an exception is aimed at the thread, and not an error of the code that runs there."""
    # Python interrupts no other thread: what raises it there is code of a user's.
    stops = isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()
    return stops or any(aimed(error) for aimed in _aimed)


def never_raises(logger: logging.Logger, stacklevel: int = 1 + (sys.version_info >= (3, 11))) -> None:
    """Let no call of a logger raise, whatever its filters and handlers do, and no fork come meanwhile.

    Python's own handlers write their errors to `sys.stderr`, which may be broken, too.
    """
    log, writing = logger._log, BetweenForks()

    def log_or_not(*args: Any, **options: Any) -> None:
        try:
            with writing.lock:
                log(*args, **{"stacklevel": stacklevel, **options})
        except Exception as error:
            if is_aimed(error):
                raise
            with suppress(Exception):
                sys.stderr.write(f"ojs-bridge: a line is not in the log: {error!r}\n")

    logger._log = log_or_not  # type: ignore[method-assign]


def keep_going(name: str, round_: Callable[[], bool]) -> threading.Thread:
    """Start a thread that does rounds until one returns False; raises RuntimeError where none can start.

    A round waits by itself. Whatever a round raises, the next one follows after a second: an error of a
    store, of a user's code, or an interrupt for a thread that had the same number and is dead.
    """

    def go() -> None:
        is_said = False
        while True:
            try:
                while round_():
                    is_said = False
                return
            except BaseException as error:
                if not is_said:
                    is_said = True
                    logger.error("%s: its work goes on after an error", name, exc_info=error)
                _pause_after(error)

    def outlive() -> None:
        while True:
            try:
                go()
                return
            except BaseException as error:  # noqa: BLE001 - it struck where another one was handled
                _pause_after(error)

    thread = threading.Thread(target=outlive, name=name, daemon=True)
    thread.start()
    return thread


def _pause_after(error: BaseException) -> None:
    if type(error).__name__ == "GreenletExit":
        # A green thread that does not end of it can never be ended.
        raise error
    time.sleep(AGAIN)


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


never_raises(logger)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_in_parent, after_in_child=_in_child)
