"""Pages of entries, and the number of all of them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..bridge import Bridge
from ..operations.letters import AnyPage, Kind
from ..store import Stats, matches
from .answers import invalid
from .requests import Paging
from .shapes import Pagination

#: Reads a page: so many entries, after a cursor.
Read: TypeAlias = Callable[[int, str | None], AnyPage]

#: The seconds for which counts are kept. A change through this API drops them at once.
FRESH = 5.0


def page_of(
    read: Read[AnyPage], query: Paging, count: Callable[[AnyPage], int | None]
) -> tuple[AnyPage, Pagination]:
    """Return the page that a query asks for, and its place among all entries; raises Refusal.

    The page begins after the cursor, and the offset skips entries from there. `count` is given the page, and
    returns the number of all entries.
    """
    try:
        page = _after(read, query.offset, query.limit, query.cursor)
    except ValueError as error:
        raise invalid(str(error)) from None
    more = page.next_cursor
    return page, {
        "total": count(page),
        "limit": query.limit,
        "offset": query.offset,
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
    """The counts of a bridge's dead letters, kept for some seconds, because counting a million takes long."""

    bridge: Bridge
    #: The counts of each kind that was asked for, and the moment until which they hold.
    _kept: dict[frozenset[Any], tuple[Stats, float]] = field(default_factory=dict)

    def get(self, kind: Kind) -> Stats:
        """Return the counts of a kind without a text; raises StoreError."""
        key = frozenset(kind.items())
        kept, now = self._kept, time.monotonic()
        found, until = kept.get(key, (None, 0.0))
        if found is not None:
            if now < until:
                return found
            # Until these counts are taken anew, other requests get the last ones.
            kept[key] = found, now + FRESH
        for old in [old for old, (_, until) in [*kept.items()] if now >= until]:
            kept.pop(old, None)
        found = self.bridge.dead_letters.stats(**kind)
        # Where all counts were dropped meanwhile, these are too old: they go into the dictionary of before.
        kept[key] = found, time.monotonic() + FRESH
        return found

    def forget(self) -> None:
        """Drop the counts, because a request has changed the letters."""
        self._kept = {}

    def of(self, kind: Kind) -> int | None:
        """Return the number of letters of a kind, or None if these counts do not have it."""
        stats = self.get({})
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


#: The most characters of arguments and meta that a list has; a single letter or retry has all.
LISTED = 2_000


def listed(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as lists have it: without its arguments and its meta, if they are long."""
    size = len(json.dumps([job["args"], job["kwargs"], job["meta"]], default=repr))
    if size <= LISTED:
        return {**job}
    note = f"left out of the list: {size:,} characters"
    return {**job, "args": None, "kwargs": None, "meta": {}, "note": note}
