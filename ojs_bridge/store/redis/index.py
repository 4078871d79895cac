"""Listings in the order of time, of all records and of each kind; `lua/_index.lua` says their form."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import datetime
from operator import add
from typing import Any, TypeAlias, TypeVar

from ..records import from_ms, index_text, matches, to_ms
from .server import RedisServer, Word

#: Added to the milliseconds of a time, so that they are never negative: digits have the order of time.
_YEAR_ONE_MS = 62_135_596_800_000
_DIGITS = 15

#: How many kinds one script counts: the server answers nobody else meanwhile.
LOT = 500

T = TypeVar("T")
Rows: TypeAlias = list[tuple[bytes, bytes]]
#: Returns whether a filter wants the kind with these texts.
Wanted: TypeAlias = Callable[[Sequence[str]], bool]


class RedisIndex:
    """The pages of the records under the keys `records`, `by_time`, `by_kind` and `kinds`."""

    def __init__(self, server: RedisServer, keys: Sequence[bytes], *, newest_first: bool) -> None:
        self._server = server
        *self._keys, self._kinds = keys
        self._newest_first = newest_first

    def page(
        self,
        wanted: Wanted | None,
        limit: int,
        cursor: str | None,
        since: datetime | None = None,
        until: datetime | None = None,
        *,
        oldest_first: bool | None = None,
    ) -> tuple[Rows, str | None]:
        """Return a page of the wanted kinds, of a span of time, and the cursor of the next page."""
        kinds = None if wanted is None else self.kinds_of(wanted)
        if kinds == []:
            return [], None
        newest = self._newest_first if oldest_first is None else not oldest_first
        low, high = _low(since), _high(until)
        after = _read_cursor(cursor) if cursor is not None else high if newest else low
        after = min(after, high) if newest else max(after, low)
        order = "newest" if newest else "oldest"
        rows = rows_of(self._server.run("page", self._keys, (limit + 1, order, after, *(kinds or ()))))
        rows = [row for row in rows if low.encode() <= row[0] < high.encode()]
        more = rows[limit - 1][0].decode() if len(rows) > limit else None
        return rows[:limit], more

    def count(self, wanted: Wanted | None, since: datetime | None, until: datetime | None) -> int:
        """Count the records of the wanted kinds, of a span of time."""
        keys = self._keys[1:]
        span: list[Word] = [_low(since), _high(until)]
        if wanted is None:
            return int(self._server.run("count", keys, span))
        lots_of_kinds = lots(self.kinds_of(wanted), LOT)
        return sum(int(self._server.run("count", keys, [*span, *lot])) for lot in lots_of_kinds)

    def counts(
        self, wanted: Wanted | None, since: datetime | None, until: datetime | None
    ) -> Iterator[tuple[Sequence[str], int, bytes, bytes]]:
        """Yield each wanted kind that a span of time has: its texts, number, first and last place."""
        for lot in lots(self.kinds_of(wanted), LOT):
            words: list[Word] = [_low(since), _high(until), *lot]
            for kind, n, first, last in self._server.run("stats", self._keys[2:], words):
                yield texts_of(kind), n, first, last

    def between(self, kinds: Sequence[str], moments: Sequence[str]) -> list[int]:
        """Count the records of some kinds together, between each two moments."""
        head: list[Word] = [len(moments), *moments]
        counts = [0] * (len(moments) - 1)
        for lot in lots(kinds, max(1, LOT * 3 // len(moments))):
            counts = [*map(add, counts, self._server.run("between", self._keys[2:], [*head, *lot]))]
        return counts

    def kinds_of(self, wanted: Wanted | None) -> list[bytes]:
        """Return the wanted kinds, each once; None is all."""
        ours: dict[bytes, None] = {}
        cursor = b"0"
        while True:
            cursor, kinds = self._server.ask("SSCAN", self._kinds, cursor, "COUNT", LOT)
            ours.update((kind, None) for kind in kinds if wanted is None or wanted(texts_of(kind)))
            if cursor == b"0":
                return [*ours]


def lots(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Yield the items in lots of a size."""
    return (items[start : start + size] for start in range(0, len(items), size))


def rows_of(answer: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs of a flat answer."""
    return list(zip(answer[::2], answer[1::2], strict=True))


def entry_of(texts: Sequence[str], at: datetime, index_id: str) -> str:
    """Return the index entry of a record with these texts and a time."""
    return "\0".join((*map(index_text, texts), place_of(at, index_id)))


def place_of(at: datetime, index_id: str) -> str:
    """Return the place of a record."""
    return f"{moment(at)}:{index_id}"


def moment(at: datetime) -> str:
    """Return a time in digits that have the order of time."""
    return f"{to_ms(at) + _YEAR_ONE_MS:0{_DIGITS}}"


def time_of(place: bytes) -> datetime:
    """Return the time at the beginning of a place."""
    return from_ms(int(place[:_DIGITS]) - _YEAR_ONE_MS)


def texts_of(kind: bytes) -> list[str]:
    """Return the texts of a kind."""
    return kind.decode().split("\0")


def wanting(queue: str | None, *patterns: str | None, but_queues: Collection[str] = ()) -> Wanted | None:
    """Return which kinds a filter wants, with its whole queue and these patterns; None for all."""
    if queue is None and not but_queues and all(pattern is None for pattern in patterns):
        return None
    whole, left_out = queue and index_text(queue), {*map(index_text, but_queues)}
    return lambda texts: (
        whole in (None, texts[0]) and texts[0] not in left_out and all(map(matches, texts[1:], patterns))
    )


def _low(since: datetime | None) -> str:
    return "" if since is None else moment(since)


def _high(until: datetime | None) -> str:
    """Return the end of the places before a time; a colon comes after all digits."""
    return ":" if until is None else moment(until)


def _read_cursor(cursor: str) -> str:
    at, separator, last_id = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal() and len(at) <= _DIGITS):
        raise ValueError(f"cursor: {cursor!r:.100} was not given out by this store")
    return f"{at:0>{_DIGITS}}:{index_text(last_id)}"
