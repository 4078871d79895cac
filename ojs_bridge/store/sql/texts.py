"""What dead letters say, beside them: a search then reads no record that surely lacks its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ..protocol import Claim, Letter, LetterFilter, Page
from ..records import index_id, letter_from_json, plain
from .groups import SQLGroups
from .statements import Upsert, batches, page, window
from .tables import letters, texts

#: How many letters one statement searches, and of how many the texts are written at once.
SEARCHED, _BATCH = 20_000, 200
#: A longer text would make the searches of all others slow.
LONGEST = 10_000
_WRITE = Upsert(texts, "discarded_ms", "text")
_c = letters.c
_TOLD = letters.outerjoin(
    texts,
    sa.and_(texts.c.namespace == _c.namespace, texts.c.id == _c.id, texts.c.discarded_ms == _c.discarded_ms),
)
_LISTED: sa.Select[Any] = sa.select(_c.record, _c.discarded_ms, _c.id).select_from(_TOLD)


class SQLTexts(SQLGroups):
    """The part of a store that searches dead letters for a text."""

    def search(
        self,
        where: LetterFilter,
        text: str,
        /,
        *,
        limit: int,
        cursor: str | None,
        oldest_first: bool = False,
    ) -> Page:
        """Return a page without letters that lack the text; it ends after 20,000 letters at the latest."""
        self._get_ready()
        if not self._has(texts.name):
            return self.list(where, limit=limit, cursor=cursor, oldest_first=oldest_first)
        newest = not oldest_first
        query = _LISTED.where(*self._matching(where))
        with self._statement() as connection:
            query, end = window(connection, query, SEARCHED, cursor, newest=newest)
            rows, more = page(connection, query.where(self._may_say(text)), limit, cursor, newest=newest)
        found = (letter_from_json(row.record) for row in rows)
        return Page(tuple(each for each in found if where.group in (None, each.group)), more or end)

    def index_texts(self, text_of: Callable[[Letter], str | None], /) -> Iterator[int]:
        """Write the texts of letters that have none, the newest first."""
        self._get_ready()
        cursor = None
        while self._has(texts.name):
            query = _LISTED.where(_c.namespace == self._namespace)
            with self._statement() as connection:
                query, end = window(connection, query, SEARCHED, cursor, newest=True)
            query = query.where(texts.c.id.is_(None))
            done = _BATCH
            while done == _BATCH:
                done = self._index_some(query, cursor, text_of)
                yield done
            if end is None:
                return
            cursor = end

    def _index_some(
        self, query: sa.Select[Any], cursor: str | None, text_of: Callable[[Letter], str | None]
    ) -> int:
        with self._statement() as connection:
            rows, _ = page(connection, query, _BATCH, cursor, newest=True)
        told = [self._told(row, text_of) for row in rows]
        if told:
            # In the order of their ids no two writers wait for each other.
            with self._transaction() as connection:
                _WRITE.all(connection, sorted(told, key=lambda row: str(row["id"])))
        return len(told)

    def _told(self, row: Any, text_of: Callable[[Letter], str | None]) -> Mapping[str, Any]:
        try:
            told = text_of(letter_from_json(row.record))
        except (ValueError, KeyError, TypeError, AttributeError):
            told = None
        text = None if told is None or len(told) > LONGEST else plain(told)
        return {"namespace": self._namespace, "id": row.id, "discarded_ms": row.discarded_ms, "text": text}

    def delete(self, letter_ids: Sequence[str], claim: Claim) -> int:
        """Delete the letters whose claim is still ours, and the texts, which can be written anew."""
        self._forget_texts(letter_ids)
        return super().delete(letter_ids, claim)

    def prune(self, letters_: Sequence[Letter], *, now: datetime) -> int:
        """Delete letters that nobody replays and whose jobs have not died again."""
        self._forget_texts([letter.id for letter in letters_])
        return super().prune(letters_, now=now)

    def _forget_texts(self, letter_ids: Sequence[str]) -> None:
        self._get_ready()
        if self._has(texts.name):
            forget = sa.delete(texts).where(texts.c.namespace == self._namespace)
            self._change(forget, map(texts.c.id.in_, batches([*map(index_id, letter_ids)])))

    def _may_say(self, text: str) -> sa.ColumnElement[bool]:
        place = sa.func.strpos if self._is_postgres else sa.func.instr
        return sa.or_(texts.c.text.is_(None), place(texts.c.text, plain(text)) > 0)
