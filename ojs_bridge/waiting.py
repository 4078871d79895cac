"""Outages that a worker's threads wait out: each keeps what it has and tries again."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

logger = logging.getLogger("ojs_bridge")

#: The shortest and the longest pause between two tries, in seconds; it grows with the outage.
LEAST, MOST = 0.25, 3.0
#: How long a pause is between two looks at whether the worker stops, in seconds.
_SLICE = 0.05


class Outage:
    """What is away, from the first thread that meets it to the first that finds it back.

    The log gets `begins` with its first error, and `ends` with how long it took, once each.
    """

    def __init__(self, begins: str, ends: str) -> None:
        self._begins = begins
        self._ends = ends
        self._lock = threading.Lock()
        self._since: float | None = None

    def wait(self, error: Exception, stops: Callable[[], bool]) -> bool:
        """Pause before the next try; return False, at once, when the worker stops."""
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
            since, self._since = self._since, None
        if since is not None:
            logger.warning("%s, after %.1f s", self._ends, time.monotonic() - since)

    def _meet(self, error: Exception) -> float:
        """Return for how many seconds the outage has lasted; its first thread says that it has begun."""
        with self._lock:
            first = self._since is None
            now = time.monotonic()
            if self._since is None:
                self._since = now
            since = self._since
        if first:
            logger.error("%s (%s: %s)", self._begins, type(error).__name__, error)
        return now - since
