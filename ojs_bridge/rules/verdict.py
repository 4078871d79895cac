"""The verdict: whether it is bad now, in one sentence, from what is known at a moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal, TypeAlias

from .facts import Facts
from .job import format_time

Level: TypeAlias = Literal["well", "slow", "bad", "away"]
LineKind: TypeAlias = Literal["bleeds", "contained", "on_its_way", "slow", "away"]


@dataclass(frozen=True, slots=True)
class Line:
    """A fact under the sentence, with its number; what it is about is named where that is known."""

    kind: LineKind
    text: str
    count: float | None = None
    type: str | None = None
    fingerprint: str | None = None
    queue: str | None = None
    dependency: str | None = None

    def to_ojs(self) -> dict[str, Any]:
        """Return the line in JSON."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it is bad now, in one sentence; `why` is a second one, `since` when the worst began."""

    level: Level
    sentence: str
    why: str = ""
    since: datetime | None = None
    lines: tuple[Line, ...] = ()

    def to_ojs(self) -> dict[str, Any]:
        """Return the verdict in JSON."""
        return {
            "level": self.level,
            "sentence": self.sentence,
            "why": self.why,
            "since": self.since and format_time(self.since),
            "lines": [line.to_ojs() for line in self.lines],
        }


def verdict_of(facts: Facts) -> Verdict:
    """Return the verdict about what is known."""
    if facts.store.status == "away":
        return Verdict("away", "The store is away.", facts.store.message, facts.store.since)
    if facts.broker.status == "away":
        return Verdict("bad", "The broker is away.", facts.broker.message, facts.broker.since)
    died = sum(facts.deaths)
    if died:
        return Verdict("bad", f"{died:,} jobs died in the last hour.")
    return Verdict("well", "No job died in the last hour.")
