"""An index of the texts of dead letters. With it, a search reads no letter that lacks the text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import sqlalchemy as sa

from ...errors import StoreError
from ..protocol import Claim, Letter, LetterFilter, Page
from ..records import index_id, letter_from_json, plain
from ..reservations import Settle
from .groups import SQLGroups
from .statements import Upsert, batches, page, page_end, up_to
from .tables import letters, texts

logger = logging.getLogger("ojs_bridge")

#: How many letters one statement searches.
SEARCHED = 20_000
#: A longer text would make the searches of all others slow.
LONGEST = 10_000
_WRITE = Upsert(texts, "discarded_ms", "text")
_c, _t = letters.c, texts.c
_LISTED = sa.select(_c.discarded_ms, _c.id)
_RECORDS = sa.select(_c.id, _c.discarded_ms, _c.record)


class SQLTexts(SQLGroups):
    """The part of a store that searches dead letters for a text."""

    def list(
        self,
        where: LetterFilter,
        *,
        limit: int,
        cursor: str | None,
        oldest_first: bool = False,
        text: str | None = None,
    ) -> Page:
        """Return a page of letters that may have the text. One page searches at most 20,000 letters."""
        self._get_ready()
        if text is None or not self._has(texts.name):
            return super().list(where, limit=limit, cursor=cursor, oldest_first=oldest_first)
        newest = not oldest_first
        # Letters of all kinds are searched, whose index tells their end: those of a kind may be far apart.
        searched = _LISTED.where(*self._matching(LetterFilter(since=where.since, until=where.until)))
        with self._statement() as connection:
            end = page_end(connection, searched, SEARCHED, cursor, newest=newest)
            kind = _LISTED.where(*self._matching(where), *up_to(_c.discarded_ms, _c.id, end, newest=newest))
            rows, more = page(connection, kind.where(self._may_say(text)), limit, cursor, newest=newest)
        records = {row.id: row.record for row in self._records([row.id for row in rows])}
        found = (letter_from_json(records[row.id]) for row in rows if row.id in records)
        return Page(tuple(each for each in found if where.group in (None, each.group)), more or end)

    def index_texts(self, text_of: Callable[[Letter], str | None], /) -> Iterator[int]:
        """Delete the texts of letters that are gone; write those that are missing, the newest first."""
        self._get_ready()
        yield from self._forget_strays()
        ours, cursor = _LISTED.where(_c.namespace == self._namespace), None
        while self._has(texts.name):
            with self._statement() as connection:
                end = page_end(connection, ours, SEARCHED, cursor, newest=True)
                here = ours.where(*up_to(_c.discarded_ms, _c.id, end, newest=True), _indexed(_t.id).is_(None))
                rows, _ = page(connection, here, SEARCHED, cursor, newest=True)
            for batch in batches([row.id for row in rows]):
                yield self._index(batch, text_of)
            if end is None:
                return
            yield 0
            cursor = end

    def _forget_strays(self) -> Iterator[int]:
        """Delete texts without a letter, as a worker of an earlier release leaves them."""
        ours, after = sa.select(_t.id).where(_t.namespace == self._namespace).order_by(_t.id), ""
        its_letter = sa.select(_c.id).where(_c.namespace == _t.namespace, _c.id == _t.id).scalar_subquery()
        while self._has(texts.name):
            with self._statement() as connection:
                end = connection.execute(ours.where(_t.id > after).offset(SEARCHED - 1).limit(1)).scalar()
                here = (_t.id > after, *(() if end is None else (_t.id <= end,)))
                strays = connection.scalars(ours.where(*here, its_letter.is_(None))).all()
            self._forget_texts(strays)
            if end is None:
                return
            yield 0
            after = end

    def _index(self, letter_ids: Sequence[str], text_of: Callable[[Letter], str | None]) -> int:
        told = [self._told(row, text_of) for row in self._records(letter_ids)]
        if told:
            # All writers go by the order of the ids, so that no two block each other.
            with self._transaction() as connection:
                _WRITE.all(connection, sorted(told, key=lambda row: str(row["id"])))
        return len(told)

    def _records(self, letter_ids: Sequence[str]) -> Sequence[Any]:
        found = list[Any]()
        for batch in batches(letter_ids):
            ours = sa.and_(_c.namespace == self._namespace, _c.id.in_(batch))
            with self._statement() as connection:
                found += connection.execute(_RECORDS.where(ours))
        return found

    def _told(self, row: Any, text_of: Callable[[Letter], str | None]) -> Mapping[str, Any]:
        try:
            told = text_of(letter_from_json(row.record))
        except (ValueError, KeyError, TypeError, AttributeError):
            told = None
        text = None if told is None or len(told) > LONGEST else plain(told)
        return {"namespace": self._namespace, "id": row.id, "discarded_ms": row.discarded_ms, "text": text}

    def bury(self, letter: Letter, settle: Settle | None = None) -> bool:
        """Write a letter; an imported one may have the time of the letter that it replaces."""
        buried = super().bury(letter, settle)
        if settle is None:
            self._forget_texts([letter.id])
        return buried

    def bury_all(self, letters_: Sequence[Letter]) -> None:
        """Write letters as `bury` does."""
        super().bury_all(letters_)
        self._forget_texts([letter.id for letter in letters_])

    def delete(self, letter_ids: Sequence[str], claim: Claim) -> int:
        """Delete letters as `SQLLetters` does, and their texts."""
        deleted = super().delete(letter_ids, claim)
        self._forget_texts(letter_ids)
        return deleted

    def prune(self, letters_: Sequence[Letter], *, now: datetime) -> int:
        """Delete letters as `SQLLetters` does, and their texts."""
        pruned = super().prune(letters_, now=now)
        self._forget_texts([letter.id for letter in letters_])
        return pruned

    def _forget_texts(self, letter_ids: Sequence[str]) -> None:
        """Delete texts, which can be written anew; the letters are safe whether this succeeds or not."""
        if not self._has(texts.name):
            return
        forget = sa.delete(texts).where(_t.namespace == self._namespace)
        try:
            self._change(forget, map(_t.id.in_, batches([*map(index_id, letter_ids)])))
        except StoreError as error:
            logger.warning("the texts of %d dead letters are still in the index: %s", len(letter_ids), error)

    def _may_say(self, text: str) -> sa.ColumnElement[bool]:
        """Return the condition that the index has the text of a letter, or lacks the letter."""
        place = sa.func.strpos if self._is_postgres else sa.func.instr
        return sa.func.coalesce(place(_indexed(_t.text), plain(text)), 1) > 0


def _indexed(column: sa.Column[str]) -> sa.ScalarSelect[str]:
    """Return what the index has of a letter, None for nothing.

    It is looked up for each letter. A join depends on statistics, which a table lacks that was filled a
    moment ago: PostgreSQL has then compared each letter with each text.
    """
    same = (_t.namespace == _c.namespace, _t.id == _c.id, _t.discarded_ms == _c.discarded_ms)
    return sa.select(column).where(*same).correlate(letters).scalar_subquery()
