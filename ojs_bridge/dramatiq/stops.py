"""The stop of a worker process of Dramatiq's program: it takes one stop for one, and uses no attempt.

If the process is killed before its jobs end, the store knows of the stop.

Most process managers send their signal to all processes of a worker, and Dramatiq's main process sends its
own to each: the process hears it twice, which means to Dramatiq that it must end at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import TypeAlias

from ..engine.reservations import Reservations

#: For how many seconds the same stop may be heard again.
ECHO_SECONDS = 2.0
#: How long a process that must end at once waits until its attempts are given back, in seconds.
GIVE_BACK_SECONDS = 3.0
#: What Python calls for a signal.
Handler: TypeAlias = "Callable[[int, FrameType | None], object]"


class Stops:
    """Hears the signals of a worker process in the place of Dramatiq's handlers, and calls them.

    A second stop, some seconds after the first, ends the process at once: what runs is given back before.
    """

    def __init__(self, reservations: Reservations) -> None:
        self._reservations = reservations
        self._told = -ECHO_SECONDS
        #: Whether the process ends at once, and whether what it ran was given back.
        self._ends = self._is_given_back = False

    def hear(self) -> None:
        """Begin; what this process does at a signal without a handler of Dramatiq's stays as it is."""
        for number in (signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            if callable(handler):
                signal.signal(number, partial(self._stop, handler))
        if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
            signal.signal(signal.SIGQUIT, self._quit)
        if heart := self._reservations.heart:
            heart.note_stop(lambda: self._told > 0)

    def _stop(self, handler: Handler, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._is_given_back:
            handler(number, frame)
        elif now - self._told > ECHO_SECONDS:
            self._told = now
            try:
                handler(number, frame)
            except SystemExit:
                self._end(number)

    def _quit(self, number: int, _: FrameType | None) -> None:
        if self._is_given_back:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            self._end(number)

    def _end(self, number: int) -> None:
        """Give back what runs, in a thread: this one may hold a lock that the store needs."""
        if not self._ends:
            self._ends = True
            for end in (partial(self._give_back, number), partial(self._wait, number)):
                threading.Thread(target=end, name="ojs-stops", daemon=True).start()

    def _give_back(self, number: int) -> None:
        self._reservations.give_back()
        self._go_on(number)

    def _wait(self, number: int) -> None:
        time.sleep(GIVE_BACK_SECONDS)
        self._go_on(number)

    def _go_on(self, number: int) -> None:
        """Send the signal once more, for the main thread, to the handler that ends the process."""
        if not self._is_given_back:
            self._is_given_back = True
            os.kill(os.getpid(), number)
