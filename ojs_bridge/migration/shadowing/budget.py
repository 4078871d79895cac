"""How many failed runs a process compares in full; what exceeds it is only counted."""

from __future__ import annotations

#: So many on average for each second of CPU time that the process uses, and so many at once.
COMPARED_PER_SECOND, COMPARED_AT_ONCE = 25, 100


class Budget:
    """A token bucket, with at least one run of each task a second, so that rare tasks are always seen.

    It fills with the CPU time that the process uses: what comparing takes of that is bounded then, on a busy
    machine too, and for failed runs that take hardly any time themselves.
    """

    def __init__(self, per_second: int = COMPARED_PER_SECOND, at_once: int = COMPARED_AT_ONCE) -> None:
        self._per_second, self._at_once = per_second, at_once
        self._left = float(at_once)
        self._used = 0.0
        self._taken: dict[str, float] = {}

    def take(self, task: str, now: float, used: float) -> bool:
        """Return whether a failed run is compared, at a monotonic time and after so many CPU seconds."""
        self._left = min(self._left + (used - self._used) * self._per_second, self._at_once)
        self._used = used
        if self._left >= 1:
            self._left -= 1
        elif now - self._taken.get(task, float("-inf")) < 1:
            return False
        self._taken[task] = now
        return True
