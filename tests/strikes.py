"""Strikes: an exception at the nth line that a thread or greenlet runs of some code."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

#: Lines at whose beginning CPython lets no exception in.
UNTOUCHED = ("with ", "try:", "finally:", "return", "break", "continue", "pass")


def _greenlet() -> object:
    greenlet = sys.modules.get("greenlet")
    return greenlet and greenlet.getcurrent()


class Strike:
    """Raises an exception at the nth line that its thread runs from now on; counts the lines.

    Only the lines of the files count whose paths have one of the `parts`. It is over when the outermost
    function returns: the thread's next job is not struck.
    """

    def __init__(
        self, nth: int, error: Callable[[str], BaseException], parts: tuple[str, ...], outermost: str
    ) -> None:
        self.lines, self._nth, self._error, self._parts = 0, nth, error, parts
        self._outermost, self._greenlet = outermost, _greenlet()
        self._last: FrameType | None = None
        self.at = ""

    def __str__(self) -> str:
        return self.at

    def arm(self) -> None:
        """Begin, in this thread and in the frames that it is in, up to the outermost function."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame.f_code.co_name != self._outermost:
            frame = frame.f_back
            if frame is not None:
                frame.f_trace = self._trace
        self._last = frame
        sys.settrace(self._trace)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if event == "return" and frame is self._last:
            sys.settrace(None)
            return None
        # A comparison of messages is none of ours: in its queue Dramatiq before 2.2 loses a message by it.
        if code.co_name in ("__eq__", "__lt__") or not any(part in code.co_filename for part in self._parts):
            return None
        if _greenlet() is not self._greenlet:
            return None
        line = linecache.getline(code.co_filename, frame.f_lineno).strip()
        # CPython 3.12 does not end a `with` where a comprehension within it is struck so.
        if event == "line" and not (line.startswith(UNTOUCHED) or " for " in line):
            self.lines += 1
            if self.lines == self._nth:
                sys.settrace(None)
                self.at = f"{code.co_filename.rpartition('/')[2]}:{code.co_name}:{frame.f_lineno} {line}"
                raise self._error(self.at)
        return self._trace
