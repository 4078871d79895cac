"""A Ctrl-C waits for the end of a step: the step sends no job twice, and its record says what it did."""

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
    """Hold a Ctrl-C back until the end of the block or the decorated function; a second one strikes at once.

    Python handles Ctrl-C in the main thread alone, so other threads need no hold. A process whose SIGINT has
    no handler in Python ends at once, or ignores it, as before.
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
