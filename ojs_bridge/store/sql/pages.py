"""What listings have in common: filters and cursors."""

from __future__ import annotations

from collections.abc import Iterator

import sqlalchemy as sa

from ..texts import index_text

LARGEST_INTEGER = 2**63 - 1


def equals(column: sa.Column[str], wanted: str | None) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the condition that a column has a value, none for None."""
    if wanted is not None:
        yield column == index_text(wanted)


def matches(column: sa.Column[str], pattern: str | None) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the condition that a column matches a value or `prefix.*`, none for None."""
    if pattern is None:
        return
    text = index_text(pattern)
    if text.endswith(".*"):
        # LIKE finds it in an index, but takes `auth` for `AUTH` on SQLite.
        yield column.startswith(text[:-1], autoescape=True)
        yield sa.func.substr(column, 1, len(text) - 1) == text[:-1]
    else:
        yield column == text


def write_cursor(ms: int, key: str) -> str:
    """Return the cursor after a row, which names it: what comes and goes does not shift the next page."""
    return f"{ms}:{key}"


def read_cursor(cursor: str) -> tuple[int, str]:
    """Return what a cursor names; raises ValueError for one that no page gave out."""
    at, separator, last_key = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal() and len(at) <= len(str(LARGEST_INTEGER)) - 1):
        raise ValueError(f"cursor: {cursor!r} was not given out by this store")
    return int(at), index_text(last_key)
