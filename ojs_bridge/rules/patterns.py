"""The one pattern language: `*` stands for any characters, everything else for itself, in its own case."""

from __future__ import annotations

import fnmatch


def matches(text: str, pattern: str) -> bool:
    """Return whether a text such as `billing.charge` matches a pattern such as `billing.*`."""
    return fnmatch.fnmatchcase(text, to_glob(pattern))


def to_glob(pattern: str) -> str:
    """Return a pattern as a glob, with `?` and `[` escaped."""
    return pattern.replace("[", "[[]").replace("?", "[?]")


def check_pattern(name: str, pattern: object) -> None:
    """Raise ValueError for an argument that is no pattern; None is no pattern at all, and valid."""
    if pattern is not None and not (pattern and isinstance(pattern, str)):
        raise ValueError(f"{name}: {pattern!r} must be a name, or a pattern such as 'billing.*'")
