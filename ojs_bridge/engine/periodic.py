"""A thread of each process that writes what the process has counted."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeAlias

from .forks import starting

#: The seconds between two writes.
PERIOD = 5.0
#: A process waits at its end so many seconds for the last write.
LAST_SECONDS = 5.0

Step: TypeAlias = Callable[[], None]


class Periodic:
    """Takes a step in each period, and once more at the end. A forked child has a thread of its own.

    `begin` makes what a process counts in, and returns the step that writes it. The step never raises.
    """

    def __init__(self, name: str, begin: Callable[[], Step], period: float = PERIOD) -> None:
        self._name, self._begin, self._period = name, begin, period
        #: The process whose thread runs.
        self.pid = 0
        self._over = threading.Event()

    def start(self) -> None:
        """Start the thread of this process, unless it runs; raises RuntimeError where none can start."""
        if self.pid == os.getpid():
            return
        with starting.lock:
            if self.pid != os.getpid():
                self._over = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._begin(), self._over), name=self._name, daemon=True
                )
                self._thread.start()
                self.pid = os.getpid()

    def close(self, seconds: float = LAST_SECONDS) -> None:
        """Have the last step taken, and wait for it for some seconds at most. A later start begins anew."""
        if self.pid == os.getpid():
            self.pid = 0
            self._over.set()
            self._thread.join(seconds)

    def _run(self, step: Step, over: threading.Event) -> None:
        while not over.wait(self._period):
            step()
        step()
