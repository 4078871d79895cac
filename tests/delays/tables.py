"""Tables of a page, known by their heads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join([_head(head), *map(_line, rows)])


def rows_into(page: Path, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows in the place of those of the same names, or at the end of the page's table."""
    text, top = page.read_text("utf-8"), f"{_head(head)}\n"
    at = text.index(top) + len(top)
    old = list(takewhile(lambda line: line.startswith("|"), text[at:].splitlines()))
    lines = {line.split(" | ")[0]: line for line in [*old, *map(_line, rows)]}
    rest = text[at + len("".join(f"{line}\n" for line in old)) :]
    page.write_text(text[:at] + "".join(f"{line}\n" for line in lines.values()) + rest, "utf-8")


def _head(head: Sequence[str]) -> str:
    return f"{_line(head)}\n|---|{'---:|' * (len(head) - 1)}"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
