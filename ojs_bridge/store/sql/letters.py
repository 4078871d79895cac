"""Dead letters in SQL, the error entries for which a message has no room, and an index of texts.

With the index, a search reads no letter that lacks the text.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...errors import StoreError
from ...rules.job import PlacedEntry
from ..filter import EVERYTHING, Filter
from ..jobs import Settle
from ..protocol import Claim, Claimed, Letter, Page, Stats, counts_of
from ..records import from_json, from_ms, group_number, index_id, index_text, to_json, to_ms
from .database import Database
from .jobs import settling
from .statements import (
    INSERTS,
    Upsert,
    batches,
    beginning,
    equals,
    matching,
    page,
    page_end,
    up_to,
    updated,
    write_cursor,
)
from .tables import errors, groups, letters, texts

logger = logging.getLogger("ojs_bridge")

#: How many letters one statement searches.
SEARCHED = 20_000
#: A longer text would make the searches of all others slow.
LONGEST = 10_000
_WRITE_TEXT = Upsert(texts, "discarded_ms", "text")
_c, _t = letters.c, texts.c
PLACES = sa.select(_c.discarded_ms, _c.id)
_RECORDS = sa.select(_c.id, _c.discarded_ms, _c.record)


class SQLTexts:
    """The part of a store that finds the dead letters which may have a text."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def index_texts(self, text_of: Callable[[Letter], str | None], /) -> Iterator[int]:
        """Delete the texts of letters that are gone; write those that are missing, the newest first."""
        yield from self._forget_strays()
        ours, cursor = PLACES.where(_c.namespace == self._db.namespace), None
        while True:
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
        """Delete texts without a letter: their deletion may have failed when the letter went."""
        ours, after = sa.select(_t.id).where(_t.namespace == self._db.namespace).order_by(_t.id), ""
        its_letter = sa.select(_c.id).where(_c.namespace == _t.namespace, _c.id == _t.id).scalar_subquery()
        while True:
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
                _WRITE_TEXT.all(connection, sorted(rows, key=lambda row: str(row["id"])))
        return len(rows)

    def letters(self, letter_ids: Sequence[str]) -> Sequence[Any]:
        """Return the ids, times and records of those of these dead letters that are there."""
        rows = list[Any]()
        for batch in batches(letter_ids):
            ours = sa.and_(_c.namespace == self._db.namespace, _c.id.in_(batch))
            with self._db.connection() as connection:
                rows += connection.execute(_RECORDS.where(ours))
        return rows

    def _row(self, row: Any, text_of: Callable[[Letter], str | None]) -> Mapping[str, Any]:
        try:
            text = text_of(from_json(Letter, row.record))
        except (ValueError, KeyError, TypeError, AttributeError):
            text = None
        text = None if text is None or len(text) > LONGEST else index_text(text, LONGEST)
        return {"namespace": self._db.namespace, "id": row.id, "discarded_ms": row.discarded_ms, "text": text}

    def forget(self, letter_ids: Sequence[str]) -> None:
        """Delete texts, which can be written anew; the letters are safe whether this succeeds or not."""
        try:
            self._db.change_each(sa.delete(texts), _t.id, [*map(index_id, letter_ids)])
        except StoreError as error:
            logger.warning("the texts of %d dead letters are still in the index: %s", len(letter_ids), error)

    def may_say(self, text: str) -> sa.ColumnElement[bool]:
        """Return the condition that the index has the text of a letter, or lacks the letter."""
        place = sa.func.strpos if self._db.is_postgres else sa.func.instr
        return sa.func.coalesce(place(_indexed(_t.text), index_text(text, LONGEST)), 1) > 0


def _indexed(column: sa.Column[str]) -> sa.ScalarSelect[str]:
    """Return what the index has of a letter, None for nothing.

    It is looked up for each letter. A join depends on statistics, which a table lacks that was filled a
    moment ago: PostgreSQL has then compared each letter with each text.
    """
    same = (_t.namespace == _c.namespace, _t.id == _c.id, _t.discarded_ms == _c.discarded_ms)
    return sa.select(column).where(*same).correlate(letters).scalar_subquery()


_REPLACED = ("type", "queue", "error_type", "discarded_ms", "claimed_until", "record", "fault")
_BURY = Upsert(letters, *_REPLACED)
_KEEP = Upsert(errors)

#: A claim is the moment when it ends, and then random bits, so that no two claims are alike.
_BITS = 20
_LISTED = sa.select(letters.c.record, letters.c.discarded_ms, letters.c.id)


class SQLLetters:
    """The part of a store that holds dead letters. A text that is of no letter any more leaves the index."""

    def __init__(self, database: Database) -> None:
        self._db, self._texts = database, SQLTexts(database)
        self.index_texts = self._texts.index_texts

    def bury(self, letter: Letter, settle: Settle | None = None) -> bool:
        """Settle the job's reservation; write its letter in place of an earlier one and of kept entries."""
        with self._db.connection(durable=True) as connection:
            if settle is not None:
                write, settled = settling(self._db.namespace, settle)
                if not write(connection, settled):
                    return False
            self._bury(connection, [letter])
        if settle is None:
            # An imported letter may have the time of the one that it replaces.
            self._texts.forget([letter.id])
        return True

    def bury_all(self, letters_: Sequence[Letter]) -> None:
        """Write letters in one transaction, each as `bury` does."""
        with self._db.connection(durable=True) as connection:
            # All writers go by the order of the ids, so that no two block each other.
            self._bury(connection, sorted(letters_, key=lambda letter: index_id(letter.id)))
        self._texts.forget([letter.id for letter in letters_])

    def _bury(self, connection: Connection, letters_: Sequence[Letter]) -> None:
        rows = [self._letter_row(letter) for letter in letters_]
        _BURY.all(connection, rows)
        first = dict[int, int]()
        for row in rows:
            first[row["fault"]] = min(first.get(row["fault"], row["discarded_ms"]), row["discarded_ms"])
        # In one order, so that no two processes wait for each other.
        for fault, ms in sorted(first.items()):
            key = {"namespace": self._db.namespace, "fault": fault, "first_ms": ms}
            connection.execute(_KEEP_FIRST[connection.dialect.name], key)
        for batch in batches([row["id"] for row in rows]):
            ours = errors.c.namespace == self._db.namespace, errors.c.job_id.in_(batch)
            connection.execute(sa.delete(errors).where(*ours))

    def _letter_row(self, letter: Letter) -> dict[str, Any]:
        return {
            "namespace": self._db.namespace,
            "id": index_id(letter.id),
            "type": index_text(letter.type),
            "queue": index_text(letter.queue),
            "error_type": index_text(letter.error_type),
            "discarded_ms": to_ms(letter.discarded_at),
            "claimed_until": 0,
            "record": to_json(letter),
            "fault": group_number(letter.group),
        }

    def keep_errors(self, job_id: str, entries: Sequence[PlacedEntry]) -> None:
        """Keep error entries; an entry that is there already stays as it is."""
        key = {"namespace": self._db.namespace, "job_id": index_id(job_id)}
        with self._db.connection(durable=True) as connection:
            for place, entry in entries:
                _KEEP(connection, {**key, "place": place, "record": json.dumps(entry)})

    def kept_errors(self, job_id: str) -> list[PlacedEntry]:
        """Return the kept entries with their places, oldest first."""
        query = sa.select(errors.c.place, errors.c.record).where(self._of(job_id)).order_by(errors.c.place)
        with self._db.connection() as connection:
            return [(place, json.loads(record)) for place, record in connection.execute(query)]

    def forget_errors(self, job_id: str) -> None:
        """Delete the kept entries of a job."""
        self._db.change(sa.delete(errors).where(self._of(job_id)))

    def list(self, where: Filter, *, limit: int, cursor: str | None, oldest_first: bool = False) -> Page:
        """Return a page of letters that may have the text. One page searches at most 20,000 letters."""
        newest = not oldest_first
        if where.text is not None:
            return self._search(where, where.text.casefold(), limit, cursor, newest=newest)
        query = _LISTED.where(*self.chosen(where))
        with self._db.connection() as connection:
            rows, more = page(connection, query, limit, cursor, newest=newest)
        return Page(tuple(from_json(Letter, row.record) for row in rows), more)

    def _search(self, where: Filter, text: str, limit: int, cursor: str | None, *, newest: bool) -> Page:
        # Letters of all kinds are searched, whose index tells their end: those of a kind may be far apart.
        searched = PLACES.where(*self.chosen(Filter(since=where.since, until=where.until)))
        at, key = letters.c.discarded_ms, letters.c.id
        with self._db.connection() as connection:
            end = page_end(connection, searched, SEARCHED, cursor, newest=newest)
            kind = PLACES.where(*self.chosen(where), *up_to(at, key, end, newest=newest))
            rows, more = page(connection, kind.where(self._texts.may_say(text)), limit, cursor, newest=newest)
        records = {row.id: row.record for row in self._texts.letters([row.id for row in rows])}
        listed = (from_json(Letter, records[row.id]) for row in rows if row.id in records)
        return Page(tuple(each for each in listed if where.group in (None, each.group)), more or end)

    def cursor_after(self, letter: Letter) -> str:
        """Return the cursor that names a letter."""
        return write_cursor(to_ms(letter.discarded_at), index_id(letter.id))

    def count(self, where: Filter) -> int:
        """Return how many letters there are of some kind."""
        query = sa.select(sa.func.count()).select_from(letters).where(*self.chosen(where))
        with self._db.connection() as connection:
            return int(connection.execute(query).scalar_one())

    def prune(self, letters_: Sequence[Letter], *, now: datetime) -> int:
        """Delete letters that nobody replays and whose jobs have not died again."""
        free = sa.delete(letters).where(_free(now))
        pruned = sum(self._db.change(free.where(self._same(batch))) for batch in batches(letters_))
        self._texts.forget([letter.id for letter in letters_])
        return pruned

    def get(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None."""
        with self._db.connection() as connection:
            record = connection.execute(sa.select(letters.c.record).where(self._are([letter_id]))).scalar()
        return None if record is None else from_json(Letter, record)

    def letters_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids that begin with a text, from the primary key's index."""
        begins = beginning(letters.c.id, text, on_postgres=self._db.is_postgres)
        query = sa.select(letters.c.id).where(letters.c.namespace == self._db.namespace, begins).limit(limit)
        with self._db.connection() as connection:
            return connection.execute(query).scalars().all()

    def claim(self, letter_ids: Sequence[str], *, now: datetime, seconds: float) -> Claimed:
        """Claim letters, each atomically."""
        claim = to_ms(now + timedelta(seconds=seconds)) << _BITS | secrets.randbits(_BITS)
        records: dict[str, str] = {}
        for batch in batches(letter_ids):
            these = self._are(batch)
            statement = sa.update(letters).where(these, _free(now)).values(claimed_until=claim)
            ours = sa.and_(these, letters.c.claimed_until == claim)
            with self._db.connection() as connection:
                rows = updated(connection, statement, (letters.c.id, letters.c.record), ours)
            records.update({row.id: row.record for row in rows})
        claimed = [from_json(Letter, records[i]) for i in map(index_id, letter_ids) if i in records]
        return Claimed(claim, tuple(claimed))

    def unclaim(self, letter_ids: Sequence[str], claim: Claim) -> None:
        """End the claims that are still ours."""
        end = sa.update(letters).values(claimed_until=0).where(letters.c.claimed_until == claim)
        self._db.change_each(end, letters.c.id, [*map(index_id, letter_ids)])

    def delete(self, letter_ids: Sequence[str], claim: Claim) -> int:
        """Delete the letters whose claim is still ours. A letter that is buried anew has no claim."""
        delete = sa.delete(letters).where(letters.c.claimed_until == claim)
        deleted = self._db.change_each(delete, letters.c.id, [*map(index_id, letter_ids)])
        self._texts.forget(letter_ids)
        return deleted

    def stats(self, where: Filter = EVERYTHING) -> Stats:
        """Count the letters of some kind, in all and by queue, type and last error type."""
        kind, at = (letters.c.queue, letters.c.type, letters.c.error_type), letters.c.discarded_ms
        query = sa.select(*kind, sa.func.count(), sa.func.min(at), sa.func.max(at)).group_by(*kind)
        with self._db.connection() as connection:
            rows = connection.execute(query.where(*self.chosen(where))).all()
        return counts_of([(row[:3], row[3], from_ms(row[4]), from_ms(row[5])) for row in rows])

    def _are(self, letter_ids: Sequence[str]) -> sa.ColumnElement[bool]:
        ids = letters.c.id.in_([*map(index_id, letter_ids)])
        return sa.and_(letters.c.namespace == self._db.namespace, ids)

    def _same(self, batch: Sequence[Letter]) -> sa.ColumnElement[bool]:
        pairs = [(index_id(letter.id), to_ms(letter.discarded_at)) for letter in batch]
        same = sa.tuple_(letters.c.id, letters.c.discarded_ms).in_(pairs)
        return sa.and_(self._are([letter.id for letter in batch]), same)

    def _of(self, job_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(errors.c.namespace == self._db.namespace, errors.c.job_id == index_id(job_id))

    def chosen(self, where: Filter) -> Iterator[sa.ColumnElement[bool]]:
        """Yield the conditions of the letters that a filter chooses."""
        yield letters.c.namespace == self._db.namespace
        yield from equals(letters.c.queue, where.queue)
        yield from matching(letters.c.type, where.type, on_postgres=self._db.is_postgres)
        yield from matching(letters.c.error_type, where.error_type, on_postgres=self._db.is_postgres)
        if where.since is not None:
            yield letters.c.discarded_ms >= to_ms(where.since)
        if where.until is not None:
            yield letters.c.discarded_ms < to_ms(where.until)
        if where.but_queues:
            yield letters.c.queue.not_in([*map(index_text, where.but_queues)])
        if where.group is not None:
            yield letters.c.fault == group_number(where.group)


def _keep_first(insert: Callable[[sa.Table], Any]) -> sa.Insert:
    """Return the statement that keeps a group's first death; it locks no row that it does not change."""
    new = [sa.bindparam(column.name, type_=column.type) for column in groups.c]
    key = groups.c.namespace == new[0], groups.c.fault == new[1]
    known = sa.exists().where(*key, groups.c.first_ms <= new[2])
    statement = insert(groups).from_select([*groups.c], sa.select(*new).where(~known))
    earlier: sa.Insert = statement.on_conflict_do_update(
        index_elements=["namespace", "fault"],
        set_={"first_ms": statement.excluded.first_ms},
        where=groups.c.first_ms > statement.excluded.first_ms,
    )
    return earlier


_KEEP_FIRST = {name: _keep_first(insert) for name, insert in INSERTS.items()}


def _free(now: datetime) -> sa.ColumnElement[bool]:
    """Return the condition that no claim holds a letter."""
    return letters.c.claimed_until < (to_ms(now) + 1) << _BITS
