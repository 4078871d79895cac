"""Numbers and errors in a few words, for people."""

from __future__ import annotations

import re

#: The most characters of an error.
CUT = 120


def cut(text: str) -> str:
    """Return the first line of a text, and no more than some characters of it."""
    line = re.sub(r"\s+", " ", text.strip().partition("\n")[0]).rstrip(" .")
    return line if len(line) <= CUT else f"{line[: CUT - 1].rstrip()}…"


def number_of(number: float) -> str:
    """Return a number for people: whole from 10 on, else with one digit more, and no more digits."""
    if number >= 10:  # noqa: PLR2004 - two digits say enough
        return f"{number:,.0f}"
    return f"{number:.1f}".removesuffix(".0")


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


def jobs_wait(number: int) -> str:
    """Return how many jobs wait, as a sentence."""
    return counted(number, "job waits", "jobs wait")
