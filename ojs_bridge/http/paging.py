"""Pages of entries, and the number of all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from ..operations.letters import Kind
from ..store import Page, ParkedPage, Stats, matches
from .answers import invalid
from .fields import CURSOR, Fields, whole
from .shapes import Pagination

AnyPage = TypeVar("AnyPage", Page, ParkedPage)
#: Reads so many entries after a cursor.
Read: TypeAlias = Callable[[int, str | None], AnyPage]

PAGE_SIZE = 50
#: The spec allows 100 entries at most (http 17.1); a page with an offset reads all entries before it.
PAGE: Fields = {
    "limit": whole(PAGE_SIZE, 1, 100, "The most entries of the page"),
    "offset": whole(0, 0, 10_000, "The entries to skip; not with a text"),
    "cursor": CURSOR,
}
#: The seconds for which counts are kept; a change by this door drops them at once.
FRESH = 5.0


def page_of(
    read: Read[AnyPage], query: Mapping[str, Any], count: Callable[[AnyPage, int], int | None]
) -> tuple[AnyPage, Pagination]:
    """Return the page that a query asks for, and its place; raises Refusal.

    The page begins after the cursor, and after as many entries more as the offset says. `count` is given the
    page and the offset, and returns the number of all entries.
    """
    limit, offset = query.get("limit", PAGE_SIZE), query.get("offset", 0)
    try:
        page = _after(read, offset, limit, query.get("cursor"))
    except ValueError as error:
        raise invalid(str(error)) from None
    more = page.next_cursor
    return page, {
        "total": count(page, offset),
        "limit": limit,
        "offset": offset,
        "has_more": more is not None,
        "next_cursor": more,
    }


def _after(read: Read[AnyPage], offset: int, limit: int, cursor: str | None) -> AnyPage:
    while offset:
        step = min(offset, 1000)
        skipped = read(step, cursor)
        cursor, offset = skipped.next_cursor, offset - step
        if cursor is None:
            return type(skipped)((), None)
    return read(limit, cursor)


@dataclass
class Counts:
    """The counts of a bridge's dead letters, kept for some seconds: a million letters take a while."""

    count: Callable[[], Stats]
    _stats: Stats | None = None
    _until: float = 0.0

    def get(self) -> Stats:
        """Return the counts; raises StoreError."""
        found = self._stats
        if found is None or time.monotonic() >= self._until:
            self._until = time.monotonic() + FRESH
            found = self._stats = self.count()
        return found

    def forget(self) -> None:
        """Drop the counts, because this door has changed something."""
        self._stats = None

    def of(self, kind: Kind) -> int | None:
        """Return the number of letters of a kind, None where these counts do not tell."""
        stats = self.get()
        match [*kind.items()]:
            case []:
                return stats.total
            case [("queue", str(queue))]:
                return stats.by_queue.get(queue, 0)
            case [("type", str(pattern))]:
                return _sum(stats.by_type, pattern)
            case [("error_type", str(pattern))]:
                return _sum(stats.by_error_type, pattern)
        return None


def _sum(counts: Mapping[str, int], pattern: str) -> int:
    return sum(count for text, count in counts.items() if matches(text, pattern))
