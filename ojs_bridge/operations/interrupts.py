"""A Ctrl-C waits for the end of a step, so that no job is sent twice and each one is counted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Hold:
    """A handler of SIGINT that keeps the first signal for later."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self._held: tuple[int, FrameType | None] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self._held is None:
            self._held = number, frame
        else:
            self._held = None
            self.before(number, frame)

    def release(self) -> None:
        if self._held is not None:
            self.before(*self._held)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back a Ctrl-C until the end of the block, which may be a function; a second one strikes at once.

    Only the main thread is interrupted by one. A process that has given SIGINT no handler of Python is not
    held back.
    """
    before = signal.getsignal(signal.SIGINT)
    is_held = isinstance(before, _Hold) or not callable(before)
    if is_held or threading.current_thread() is not threading.main_thread():
        yield
        return
    hold = _Hold(before)
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        # What the block calls may have set a handler of its own.
        if signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, before)
        hold.release()
