"""An index of the texts of dead letters. With it, a search reads no letter that lacks the text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from ...errors import StoreError
from ..protocol import Letter
from ..records import index_id, letter_from_json, plain
from .database import Database
from .statements import Upsert, batches, page, page_end, up_to
from .tables import letters, texts

logger = logging.getLogger("ojs_bridge")

#: How many letters one statement searches.
SEARCHED = 20_000
#: A longer text would make the searches of all others slow.
LONGEST = 10_000
_WRITE = Upsert(texts, "discarded_ms", "text")
_c, _t = letters.c, texts.c
PLACES = sa.select(_c.discarded_ms, _c.id)
_RECORDS = sa.select(_c.id, _c.discarded_ms, _c.record)


class SQLTexts:
    """The part of a store that finds the dead letters which may have a text."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def are_kept(self) -> bool:
        """Return whether the store has the index."""
        self._db.get_ready()
        return self._db.has(texts.name)

    def index_texts(self, text_of: Callable[[Letter], str | None], /) -> Iterator[int]:
        """Delete the texts of letters that are gone; write those that are missing, the newest first."""
        self._db.get_ready()
        yield from self._forget_strays()
        ours, cursor = PLACES.where(_c.namespace == self._db.namespace), None
        while self._db.has(texts.name):
            with self._db.connection() as connection:
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
        ours, after = sa.select(_t.id).where(_t.namespace == self._db.namespace).order_by(_t.id), ""
        its_letter = sa.select(_c.id).where(_c.namespace == _t.namespace, _c.id == _t.id).scalar_subquery()
        while self._db.has(texts.name):
            with self._db.connection() as connection:
                end = connection.execute(ours.where(_t.id > after).offset(SEARCHED - 1).limit(1)).scalar()
                here = (_t.id > after, *(() if end is None else (_t.id <= end,)))
                strays = connection.scalars(ours.where(*here, its_letter.is_(None))).all()
            self.forget(strays)
            if end is None:
                return
            yield 0
            after = end

    def _index(self, letter_ids: Sequence[str], text_of: Callable[[Letter], str | None]) -> int:
        rows = [self._row(row, text_of) for row in self.letters(letter_ids)]
        if rows:
            # All writers go by the order of the ids, so that no two block each other.
            with self._db.connection(durable=True) as connection:
                _WRITE.all(connection, sorted(rows, key=lambda row: str(row["id"])))
        return len(rows)

    def letters(self, letter_ids: Sequence[str]) -> Sequence[Any]:
        """Return the ids, times and records of those of these dead letters that are there."""
        found = list[Any]()
        for batch in batches(letter_ids):
            ours = sa.and_(_c.namespace == self._db.namespace, _c.id.in_(batch))
            with self._db.connection() as connection:
                found += connection.execute(_RECORDS.where(ours))
        return found

    def _row(self, row: Any, text_of: Callable[[Letter], str | None]) -> Mapping[str, Any]:
        try:
            text = text_of(letter_from_json(row.record))
        except (ValueError, KeyError, TypeError, AttributeError):
            text = None
        text = None if text is None or len(text) > LONGEST else plain(text)
        return {"namespace": self._db.namespace, "id": row.id, "discarded_ms": row.discarded_ms, "text": text}

    def forget(self, letter_ids: Sequence[str]) -> None:
        """Delete texts, which can be written anew; the letters are safe whether this succeeds or not."""
        if not self._db.has(texts.name):
            return
        forget = sa.delete(texts).where(_t.namespace == self._db.namespace)
        try:
            self._db.change(forget, map(_t.id.in_, batches([*map(index_id, letter_ids)])))
        except StoreError as error:
            logger.warning("the texts of %d dead letters are still in the index: %s", len(letter_ids), error)

    def may_say(self, text: str) -> sa.ColumnElement[bool]:
        """Return the condition that the index has the text of a letter, or lacks the letter."""
        place = sa.func.strpos if self._db.is_postgres else sa.func.instr
        return sa.func.coalesce(place(_indexed(_t.text), plain(text)), 1) > 0


def _indexed(column: sa.Column[str]) -> sa.ScalarSelect[str]:
    """Return what the index has of a letter, None for nothing.

    It is looked up for each letter. A join depends on statistics, which a table lacks that was filled a
    moment ago: PostgreSQL has then compared each letter with each text.
    """
    same = (_t.namespace == _c.namespace, _t.id == _c.id, _t.discarded_ms == _c.discarded_ms)
    return sa.select(column).where(*same).correlate(letters).scalar_subquery()
