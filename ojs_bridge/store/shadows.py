"""The tallies of shadow mode: the comparisons of framework and policy that came to the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from ..spec.job import format_time


@dataclass(frozen=True, slots=True)
class Tally:
    """How often failed runs of a task came to one kind of comparison, explained by the last of them.

    Each of the `examples` is an object of JSON; they hold no arguments of jobs.
    """

    framework: str
    task: str
    kind: str
    count: int
    last_seen: datetime
    explanation: str = ""
    examples: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return it as commands answer with it."""
        return {
            "kind": self.kind,
            "count": self.count,
            "explanation": self.explanation,
            "examples": [*map(dict, self.examples)],
            "last_seen": format_time(self.last_seen),
        }


class Shadowing(Protocol):
    """The tallies of shadow mode, one for each framework, task and kind. All raise StoreError."""

    def record_shadows(self, tallies: Sequence[Tally]) -> None:
        """Add to the counts, in one step; examples take the place of as many as there are, or fewer."""

    def shadows(self) -> list[Tally]:
        """Return all tallies, in the order of framework, task and kind."""

    def clear_shadows(self) -> int:
        """Forget all tallies; return how many there were."""
