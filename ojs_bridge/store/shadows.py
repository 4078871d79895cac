"""The tallies of shadow mode: how often framework and policy compared in the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ..spec.job import format_time


@dataclass(frozen=True, slots=True)
class Tally:
    """The number of a task's failed runs with one kind of result; `explanation` is that of the last run.

    Each of the `examples` is a JSON object without any argument of a job.
    """

    framework: str
    task: str
    kind: str
    count: int
    last_seen: datetime
    explanation: str = ""
    examples: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the tally as commands show it."""
        return {
            "kind": self.kind,
            "count": self.count,
            "explanation": self.explanation,
            "examples": [*map(dict, self.examples)],
            "last_seen": format_time(self.last_seen),
        }


class Shadowing(Protocol):
    """The store's methods for tallies, one tally per framework, task and kind. All raise StoreError."""

    def record_shadows(self, tallies: Sequence[Tally]) -> None:
        """Add to the counts, in one step. Examples replace the earlier ones, unless those are more."""

    def shadows(self) -> list[Tally]:
        """Return all tallies, in the order of framework, task and kind."""

    def clear_shadows(self) -> int:
        """Delete all tallies; return how many there were."""
