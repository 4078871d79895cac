"""What shadow mode has found, task by task."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from typing import Any

from ...spec.job import format_time
from ...store import Tally
from .comparing import MATCHING, MEANINGS
from .tallying import BRIDGED, UNCOMPARED


@dataclass(frozen=True, slots=True)
class TaskReport:
    """How often a task's failed runs were decided alike, and the kinds of differences, most frequent first.

    `failed` are those that the framework itself decided, `bridged` those that were under the bridge already.
    """

    framework: str
    task: str
    failed: int
    compared: int
    matched: int
    bridged: int
    last_seen: datetime
    differences: tuple[Tally, ...]

    @property
    def shadow_match_rate(self) -> float | None:
        """The part of the compared runs that were decided alike; None when nothing was compared."""
        return self.matched / self.compared if self.compared else None

    def to_json(self) -> dict[str, Any]:
        """Return it as the command line answers with it."""
        rate = self.shadow_match_rate
        return {
            "framework": self.framework,
            "task": self.task,
            "failed": self.failed,
            "compared": self.compared,
            "matched": self.matched,
            "shadow_match_rate": None if rate is None else round(rate, 4),
            "bridged": self.bridged,
            "last_seen": format_time(self.last_seen),
            "differences": [{**t.to_json(), "meaning": meaning(t)} for t in self.differences],
        }


def meaning(tally: Tally) -> str:
    """Return what a kind means; a newer version may have written one that this one does not know."""
    return MEANINGS.get(tally.kind, "")


def reports(tallies: Iterable[Tally]) -> list[TaskReport]:
    """Return the report of each task, from tallies in the order that stores return them in."""
    return [
        _report(framework, task, [*found])
        for (framework, task), found in groupby(tallies, key=lambda t: (t.framework, t.task))
    ]


def _report(framework: str, task: str, tallies: list[Tally]) -> TaskReport:
    counts = {tally.kind: tally.count for tally in tallies}
    bridged, uncompared = counts.pop(BRIDGED, 0), counts.pop(UNCOMPARED, 0)
    compared = sum(counts.values())
    kinds = (tally for tally in tallies if tally.kind in counts and tally.kind != "same")
    return TaskReport(
        framework,
        task,
        failed=compared + uncompared,
        compared=compared,
        matched=sum(count for kind, count in counts.items() if kind in MATCHING),
        bridged=bridged,
        last_seen=max(tally.last_seen for tally in tallies),
        differences=tuple(sorted(kinds, key=lambda tally: -tally.count)),
    )
