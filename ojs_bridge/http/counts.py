"""How many dead letters there are, counted once for all who ask within a few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..operations.letters import Kind
from ..store import Stats
from ..store.records import matches

#: How old counts may be, in seconds; what this door changes itself it sees at once.
FRESH = 5.0


@dataclass
class Counts:
    """The counts of a bridge's dead letters; `count` takes a while where there are a million."""

    count: Callable[[], Stats]
    _stats: Stats | None = None
    _until: float = 0.0

    def get(self) -> Stats:
        """Return the counts; raises StoreError."""
        found = self._stats
        if found is None or time.monotonic() >= self._until:
            self._until = time.monotonic() + FRESH
            found = self._stats = self.count()
        return found

    def forget(self) -> None:
        """Have them counted anew, because this door has changed something."""
        self._stats = None

    def of(self, kind: Kind) -> int | None:
        """Return how many there are of a kind, None where these counts do not tell."""
        stats = self.get()
        match [*kind.items()]:
            case []:
                return stats.total
            case [("queue", str(queue))]:
                return stats.by_queue.get(queue, 0)
            case [("type", str(pattern))]:
                return _sum(stats.by_type, pattern)
            case [("error_type", str(pattern))]:
                return _sum(stats.by_error_type, pattern)
        return None


def _sum(counts: Mapping[str, int], pattern: str) -> int:
    return sum(count for text, count in counts.items() if matches(text, pattern))
