"""The table of a night: a row for each fault."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tests.night.faults import Fault
from tests.night.watching import GONE, Story

HEAD = (
    *("fault", "alerts, after s", "false pages", "the desk's verdict, after s"),
    *("clicks to the cause", "clicks to the mend"),
)
TIME = re.compile(r"\d{4}-\d\d-\d\dT(\d\d:\d\d):\d\d(\.\d+)?Z")


@dataclass(frozen=True)
class Lived:
    """A fault that was lived through: what was told, and the clicks, None where the page has no way."""

    fault: Fault
    story: Story
    to_cause: int | None
    to_mend: int | None

    @property
    def missing(self) -> list[tuple[str, ...]]:
        """The alerts that the fault calls for, and that did not fire."""
        fired = self.story.first()
        return [names for names in self.fault.needs if not {*names} & {*fired}]

    @property
    def is_well(self) -> bool:
        """Whether all was told that should be, and nothing else."""
        return not self.missing and not self.story.false_pages(self.fault.expected)

    def cells(self) -> Iterator[str]:
        """Yield the cells of its row."""
        yield self.fault.title
        fired = [
            f"{name}{'' if self._is_page(name) else ' (ticket)'} {seconds:.0f}"
            for name, seconds in self.story.first().items()
        ]
        yield ", ".join(fired) or "none"
        yield f"{len(self.story.false_pages(self.fault.expected))}"
        said = self._sentence()
        yield f"*{said[0]}* {said[1]:.0f}" if said and said[0] != GONE else "none"
        yield f"{self.to_cause}" if self.to_cause is not None else self._without_page()
        yield f"{self.to_mend}" if self.to_mend is not None else self.fault.elsewhere

    def _without_page(self) -> str:
        return "not found" if self.fault.cause else "the alert says it"

    def _is_page(self, name: str) -> bool:
        return any(fired.is_page for fired in self.story.fired if fired.name == name)

    def _sentence(self) -> tuple[str, float] | None:
        """Return the first sentence of the level that the fault calls for, and after how many seconds."""
        for level in self.fault.level:
            for said in self.story.said:
                if said.level == level:
                    return TIME.sub(r"\1", said.sentence).replace("|", "/"), said.at - self.story.begun
        return None
