"""The one pattern language: `*` stands for any characters, everything else for itself, in its own case."""

from __future__ import annotations

import fnmatch

#: The most characters of a pattern: the time to compare grows with them.
MAX_PATTERN = 1_000


def matches(text: str, pattern: str) -> bool:
    """Return whether a text such as `billing.charge` matches a pattern such as `billing.*`."""
    return fnmatch.fnmatchcase(text, to_glob(pattern)) if "*" in pattern else text == pattern


def to_glob(pattern: str) -> str:
    """Return a pattern as a glob, with `?` and `[` escaped."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def check_pattern(name: str, pattern: object) -> None:
    """Raise ValueError for an argument that is no pattern; None is no pattern at all, and valid."""
    if pattern is not None and not (pattern and isinstance(pattern, str)):
        raise ValueError(f"{name}: {pattern!r:.100} must be a name, or a pattern such as 'billing.*'")
    if isinstance(pattern, str) and "*" in pattern and len(pattern) > MAX_PATTERN:
        raise ValueError(f"{name}: {pattern!r:.100} must have at most {MAX_PATTERN:,} characters")
