"""How many failed runs a process compares in full; what exceeds it is only counted."""

from __future__ import annotations

#: So many on average for each second of CPU time that the process uses, and so many at once.
COMPARED_PER_SECOND = 50


class Budget:
    """A token bucket, with at least one run of each task a second, so that rare tasks are always seen.

    It fills with the CPU time that the process uses: what comparing takes of that is bounded then, on a busy
    machine too, and for failed runs that take hardly any time themselves.
    """

    def __init__(self, per_second: int = COMPARED_PER_SECOND) -> None:
        self._per_second = per_second
        self._left = float(per_second)
        self._used = 0.0
        self._taken: dict[str, float] = {}

    def take(self, task: str, now: float, used: float) -> bool:
        """Return whether a failed run is compared, at a monotonic time and after so many CPU seconds."""
        self._left = min(self._left + (used - self._used) * self._per_second, self._per_second)
        self._used = used
        if self._left >= 1:
            self._left -= 1
        elif now - self._taken.get(task, float("-inf")) < 1:
            return False
        self._taken[task] = now
        return True
