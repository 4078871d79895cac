"""The outages that a worker's threads wait out: each thread keeps its job, and tries again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("ojs_bridge")

#: The shortest and the longest pause between two tries, in seconds; it grows with the outage.
LEAST, MOST = 0.25, 3.0
#: For how many seconds after an outage the log does not tell of another outage.
CALM = 5.0
#: How long a pause is between two looks at whether the worker stops, in seconds.
_SLICE = 0.05


class Outage:
    """An outage, from the first thread that meets it to the first thread that finds it over.

    The log gets the line `begins` with the first error, and the line `ends` with the length, once each.
    """

    def __init__(self, begins: str, ends: str) -> None:
        self._begins = begins
        self._ends = ends
        self._lock = threading.Lock()
        self._since: float | None = None
        self._said = False
        self._calm_from = 0.0

    def wait(self, error: Exception, stops: Callable[[], bool]) -> bool:
        """Pause before the next try; return False at once if the worker stops."""
        seconds = min(LEAST + self._meet(error) / 4, MOST) * random.uniform(0.8, 1.2)
        until = time.monotonic() + seconds
        while not stops():
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, _SLICE))
        return False

    def over(self) -> None:
        """Take note that a try has succeeded."""
        with self._lock:
            since, said = self._since, self._said
            self._since, self._said = None, False
            self._calm_from = time.monotonic() + CALM
        if said and since is not None:
            logger.warning("%s, after %.1f s", self._ends, time.monotonic() - since)

    def _meet(self, error: Exception) -> float:
        """Return for how many seconds the outage has lasted; the first thread tells the log."""
        now = time.monotonic()
        with self._lock:
            since = self._since = now if self._since is None else self._since
            # A thread may meet the last error of an outage after another thread has found it over.
            first = not self._said and now >= self._calm_from
            self._said = self._said or first
        if first:
            logger.error("%s (%s: %s)", self._begins, type(error).__name__, error)
        return now - since
