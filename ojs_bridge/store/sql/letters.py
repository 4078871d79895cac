"""Dead letters in SQL, and the error entries for which a message has no room."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...rules.job import PlacedEntry
from ..filter import EVERYTHING, Filter
from ..jobs import Settle
from ..protocol import Bin, Claim, Claimed, Group, GroupPage, Letter, Page, Stats, counts_of
from ..records import (
    from_json,
    from_ms,
    group_number,
    group_of_number,
    index_id,
    index_text,
    to_json,
    to_ms,
)
from .bin import put_in, take_out
from .database import Database
from .groups import GroupsQuery, chosen
from .reservations import settling
from .statements import (
    BATCH,
    INSERTS,
    Insert,
    Upsert,
    batches,
    beginning,
    page,
    updated,
    write_cursor,
)
from .tables import bins, errors, groups, letters

logger = logging.getLogger("ojs_bridge")

_REPLACED = ("type", "queue", "error_type", "discarded_ms", "claimed_until", "record", "fault")
_b = bins.c
_BURY = Upsert(letters, *_REPLACED)
_KEEP = Upsert(errors)

#: A claim is the moment when it ends, and then random bits, so that no two claims are alike.
_BITS = 20
_LISTED = sa.select(letters.c.record, letters.c.discarded_ms, letters.c.id)


class SQLLetters:
    """The dead letters of a store, and the error entries of jobs that are not dead yet."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def bury(self, letter: Letter, settle: Settle | None = None) -> bool:
        """Settle the job's reservation; write its letter in place of an earlier one and of kept entries."""
        with self._db.connection(durable=True) as connection:
            if settle is not None:
                write, settled = settling(self._db.namespace, settle)
                if not write(connection, settled):
                    return False
            self._bury(connection, [letter])
        return True

    def bury_all(self, letters_: Sequence[Letter]) -> None:
        """Write letters in one transaction, each as `bury` does."""
        with self._db.connection(durable=True) as connection:
            # All writers go by the order of the ids, so that no two block each other.
            self._bury(connection, sorted(letters_, key=lambda letter: index_id(letter.id)))

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

    def keep_errors(self, letter_id: str, entries: Sequence[PlacedEntry]) -> None:
        """Keep error entries; an entry that is there already stays as it is."""
        key = {"namespace": self._db.namespace, "job_id": index_id(letter_id)}
        with self._db.connection(durable=True) as connection:
            for place, entry in entries:
                _KEEP(connection, {**key, "place": place, "record": json.dumps(entry)})

    def kept_errors(self, letter_id: str) -> list[PlacedEntry]:
        """Return the kept entries with their places, oldest first."""
        query = sa.select(errors.c.place, errors.c.record).where(self._of(letter_id)).order_by(errors.c.place)
        with self._db.connection() as connection:
            return [(place, json.loads(record)) for place, record in connection.execute(query)]

    def forget_errors(self, letter_id: str) -> None:
        """Delete the kept entries of a job."""
        self._db.change(sa.delete(errors).where(self._of(letter_id)))

    def list(self, where: Filter, *, limit: int, cursor: str | None, oldest_first: bool = False) -> Page:
        """Return a page of letters."""
        query = _LISTED.where(*chosen(self._db, where))
        with self._db.connection() as connection:
            rows, more = page(connection, query, limit, cursor, newest=not oldest_first)
        return Page(tuple(from_json(Letter, row.record) for row in rows), more)

    def cursor_after(self, letter: Letter) -> str:
        """Return the cursor that names a letter."""
        return write_cursor(to_ms(letter.discarded_at), index_id(letter.id))

    def count(self, where: Filter) -> int:
        """Return how many letters there are of some kind."""
        query = sa.select(sa.func.count()).select_from(letters).where(*chosen(self._db, where))
        with self._db.connection() as connection:
            return int(connection.execute(query).scalar_one())

    def prune(self, letters_: Sequence[Letter], *, now: datetime, into: Bin | None = None) -> int:
        """Delete letters that nobody replays and whose jobs have not died again."""
        return sum(self._remove(sa.and_(_free(now), self._same(lot)), into) for lot in batches(letters_))

    def get(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None."""
        with self._db.connection() as connection:
            record = connection.execute(sa.select(letters.c.record).where(self._are([letter_id]))).scalar()
        return None if record is None else from_json(Letter, record)

    def ids_beginning(self, text: str, limit: int) -> Sequence[str]:
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

    def delete(self, letter_ids: Sequence[str], claim: Claim, into: Bin | None = None) -> int:
        """Delete the letters whose claim is still ours. A letter that is buried anew has no claim."""
        ours = letters.c.claimed_until == claim
        if into is None:
            return self._db.change_each(
                sa.delete(letters).where(ours), letters.c.id, [*map(index_id, letter_ids)]
            )
        return sum(self._remove(sa.and_(ours, self._are(lot)), into) for lot in batches(letter_ids))

    def _remove(self, those: sa.ColumnElement[bool], into: Bin | None) -> int:
        """Delete letters, in one step with their writing into a bin, if there is one."""
        if into is None:
            return self._db.change(sa.delete(letters).where(those))
        with self._db.connection(durable=True) as connection:
            return put_in(connection, those, into)

    def binned(self, deletion: str, *, since: datetime) -> Iterator[Sequence[Letter]]:
        """Yield the letters of a bin, in the order of their ids."""
        last = ""
        while rows := self._bin_page(deletion, since, last):
            yield [from_json(Letter, row.record) for row in rows]
            last = rows[-1].id

    def _bin_page(self, deletion: str, since: datetime, last: str) -> Sequence[Any]:
        ours = _b.namespace == self._db.namespace, _b.deletion == index_id(deletion)
        new = _b.deleted_ms >= to_ms(since), _b.id > last
        query = sa.select(_b.id, _b.record).where(*ours, *new).order_by(_b.id).limit(BATCH)
        with self._db.connection() as connection:
            return connection.execute(query).all()

    def restore(self, deletion: str, letters_: Sequence[Letter]) -> Collection[str]:
        """Take letters out of a bin; each lot in one transaction."""
        # All writers of reservations go by the order of the keys.
        ordered = sorted(letters_, key=lambda letter: index_id(letter.last_run.key))
        there = set[str]()
        for lot in batches(ordered):
            rows = [(self._letter_row(letter), letter.last_run) for letter in lot]
            with self._db.connection(durable=True) as connection:
                there |= take_out(connection, index_id(deletion), rows)
        return {letter.id for letter in letters_ if index_id(letter.id) in there}

    def forget_bin(self, *, before: datetime) -> int:
        """Delete old letters of the bins."""
        return self._db.change(sa.delete(bins).where(_b.deleted_ms < to_ms(before)))

    def stats(self, where: Filter = EVERYTHING) -> Stats:
        """Count the letters of some kind, in all and by queue, type and last error type."""
        kind, at = (letters.c.queue, letters.c.type, letters.c.error_type), letters.c.discarded_ms
        query = sa.select(*kind, sa.func.count(), sa.func.min(at), sa.func.max(at)).group_by(*kind)
        with self._db.connection() as connection:
            rows = connection.execute(query.where(*chosen(self._db, where))).all()
        return counts_of([(row[:3], row[3], from_ms(row[4]), from_ms(row[5])) for row in rows])

    def groups(self, where: Filter, page: GroupPage) -> Sequence[Group]:
        """Return a page of groups."""
        with self._db.connection() as connection:
            return GroupsQuery(self._db, where, page).groups(connection)

    def group_sizes(self, where: Filter) -> Mapping[str, tuple[int, datetime]]:
        """Count the letters of each group."""
        fault = letters.c.fault
        query = sa.select(fault, sa.func.count(), sa.func.max(letters.c.discarded_ms)).group_by(fault)
        with self._db.connection() as connection:
            rows = connection.execute(query.where(*chosen(self._db, where))).all()
        return {group_of_number(number): (count, from_ms(last)) for number, count, last in rows}

    def forget_groups(self, *, before: datetime) -> int:
        """Forget the first deaths of groups that are gone."""
        same = letters.c.namespace == groups.c.namespace, letters.c.fault == groups.c.fault
        has_letters = sa.exists().where(*same)
        return self._db.change(sa.delete(groups).where(groups.c.first_ms < to_ms(before), ~has_letters))

    def _are(self, letter_ids: Sequence[str]) -> sa.ColumnElement[bool]:
        ids = letters.c.id.in_([*map(index_id, letter_ids)])
        return sa.and_(letters.c.namespace == self._db.namespace, ids)

    def _same(self, batch: Sequence[Letter]) -> sa.ColumnElement[bool]:
        pairs = [(index_id(letter.id), to_ms(letter.discarded_at)) for letter in batch]
        same = sa.tuple_(letters.c.id, letters.c.discarded_ms).in_(pairs)
        return sa.and_(self._are([letter.id for letter in batch]), same)

    def _of(self, letter_id: str) -> sa.ColumnElement[bool]:
        return sa.and_(errors.c.namespace == self._db.namespace, errors.c.job_id == index_id(letter_id))


def _keep_first(insert: type[Insert]) -> sa.Insert:
    """Return the statement that keeps a group's first death; it locks no row that it does not change."""
    new = [sa.bindparam(column.name, type_=column.type) for column in groups.c]
    key = groups.c.namespace == new[0], groups.c.fault == new[1]
    known = sa.exists().where(*key, groups.c.first_ms <= new[2])
    statement = insert(groups).from_select([*groups.c], sa.select(*new).where(~known))
    return statement.on_conflict_do_update(
        index_elements=["namespace", "fault"],
        set_={"first_ms": statement.excluded.first_ms},
        where=groups.c.first_ms > statement.excluded.first_ms,
    )


_KEEP_FIRST = {name: _keep_first(insert) for name, insert in INSERTS.items()}


def _free(now: datetime) -> sa.ColumnElement[bool]:
    """Return the condition that no claim holds a letter."""
    return letters.c.claimed_until < (to_ms(now) + 1) << _BITS
