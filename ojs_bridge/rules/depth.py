"""The nesting of a value. A value that one function can read may be too deep for another one to write."""

from __future__ import annotations

from collections.abc import Iterable


def nests_deeper(value: object, levels: int) -> bool:
    """Return whether lists and dictionaries nest deeper than some levels."""
    nested = [value]
    for _ in range(levels):
        nested = [
            inner for outer in nested for inner in _inside(outer) if isinstance(inner, (dict, list, tuple))
        ]
        if not nested:
            return False
    return True


def _inside(value: object) -> Iterable[object]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, (list, tuple)) else ()
