"""Parked jobs in SQL, with one row per key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from ..filter import EVERYTHING, Filter, Kind
from ..jobs import (
    LOOKED,
    Due,
    DueCounts,
    Parked,
    ParkedPage,
    Reservation,
    Settle,
)
from ..records import from_json, from_ms, index_id, index_text, to_ms
from . import tables
from .database import Database
from .reservations import EMPTY, LOOK, settling
from .statements import FREE, Upsert, batches, beginning, equals, matching, page, picked, row_of, updated

_r, _p = tables.reservations.c, tables.parked.c
_CANCEL = Upsert(
    tables.reservations,
    *("fence", "settled", "holder", "mark", "until_ms"),
    where=lambda new: sa.and_(
        _r.fence < new["fence"],
        sa.or_(new["publication"] == EMPTY, _r.publication.in_((EMPTY, new["publication"]))),
    ),
)
_PARK = Upsert(
    tables.parked,
    *(column.name for column in tables.parked.c if not column.primary_key),
    where=lambda new: _p.fence <= new["fence"],
)
_SHOWN = (_p.record, _p.due_ms, _p.key)


class SQLParkedJobs:
    """The parked retries of a store."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def park(self, parked: Parked, settle: Settle | None = None) -> bool:
        """Settle the job's reservation and write its retry, unless one of its key has a higher fence."""
        row = row_of(self._db.namespace, parked)
        with self._db.connection(durable=True) as connection:
            if settle is not None:
                write, settled = settling(self._db.namespace, settle)
                if not write(connection, settled):
                    return False
            _PARK(connection, row)
        return True

    def claim_due(self, framework: str, *, now: datetime, until: datetime, limit: int) -> Due:
        """Claim a framework's due retries, the longest due first, atomically.

        A retry that another worker claims at this moment is left out.
        """
        claim, mine = uuid4().hex, _p.namespace == self._db.namespace
        due = sa.and_(mine, _p.framework == index_text(framework), _p.due_ms <= to_ms(now))
        return Due(claim, self._claim(claim, due, now=now, until=until, limit=limit))

    def claim(self, keys: Sequence[str], *, now: datetime, until: datetime) -> Due:
        """Claim the retries of these keys, atomically; one that another worker is claiming is left out."""
        claim, mine = uuid4().hex, _p.namespace == self._db.namespace
        lots = (
            self._claim(claim, wanted, now=now, until=until, limit=len(keys))
            for lot in batches([index_id(key) for key in keys])
            if self._are_any(wanted := sa.and_(mine, _p.key.in_(lot)))
        )
        return Due(claim, tuple(retry for lot in lots for retry in lot))

    def _are_any(self, wanted: sa.ColumnElement[bool]) -> bool:
        """Return whether SQLite has such rows: an update that finds none, too, waits for who writes now."""
        if self._db.is_postgres:
            return True
        with self._db.connection() as connection:
            return connection.execute(sa.select(_p.key).where(wanted).limit(1)).first() is not None

    def unpark(self, retries: Sequence[Parked], claim: str) -> int:
        """Delete published retries that this claim still holds; return how many."""
        delete = sa.delete(tables.parked).where(_p.claim == claim)
        return self._db.change_each(delete, _p.key, [index_id(retry.key) for retry in retries])

    def unclaim(self, retries: Sequence[Parked], claim: str) -> None:
        """End the claim of retries that could not be published: they are due as before."""
        free = sa.update(tables.parked).values(FREE).where(_p.claim == claim)
        self._db.change_each(free, _p.key, [index_id(retry.key) for retry in retries])

    def list(self, where: Filter, *, limit: int, cursor: str | None) -> ParkedPage:
        """Return a page, the next one due first; raises ValueError for a cursor that no page gave out."""
        query = sa.select(*_SHOWN).where(*self._wanted(where))
        with self._db.connection() as connection:
            rows, more = page(connection, query, limit, cursor, newest=False)
        return ParkedPage(tuple(map(_parked, rows)), more)

    def get(self, job_id: str, kind: Kind | None = None) -> Parked | None:
        """Return a parked job, or None; of several chains of one id, the next one due."""
        mine = _p.namespace == self._db.namespace, _p.job_id == index_id(job_id), *equals(_p.kind, kind)
        with self._db.connection() as connection:
            row = connection.execute(sa.select(*_SHOWN).where(*mine).order_by(_p.due_ms).limit(1)).first()
        return None if row is None else _parked(row)

    def ids_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids of jobs that begin with a text, from the index of jobs."""
        begins = beginning(_p.job_id, text, on_postgres=self._db.is_postgres)
        query = sa.select(_p.job_id).where(_p.namespace == self._db.namespace, begins).distinct().limit(limit)
        with self._db.connection() as connection:
            return connection.execute(query).scalars().all()

    def reschedule(self, parked: Parked, at: datetime) -> bool:
        """Make a retry due at another time; False when it is claimed, was replaced or is gone."""
        later = sa.update(tables.parked).values(due_ms=to_ms(at)).where(*self._same(parked))
        with self._db.connection(durable=True) as connection:
            return connection.execute(later).rowcount == 1

    def cancel(self, parked: Parked, *, drop_until: datetime | None = None) -> bool:
        """Delete a retry, and settle its reservation; False when it is claimed, has begun or is gone."""
        with self._db.connection(durable=True) as connection:
            if connection.execute(sa.delete(tables.parked).where(*self._same(parked))).rowcount != 1:
                return False
            if drop_until is None:
                return True
            settle = Settle(Reservation(parked.key, parked.fence), None, drop_until)
            row = settling(self._db.namespace, settle)[1] | {"publication": index_id(parked.publication)}
            if _CANCEL(connection, row):
                return True
            known = connection.execute(LOOK, row).one_or_none()
            if known and parked.publication and known.publication not in ("", row["publication"]):
                return True
            connection.rollback()
        return False

    def count(self, where: Filter = EVERYTHING) -> int:
        """Count the parked jobs of some queue, type and kind."""
        query = sa.select(sa.func.count()).where(*self._wanted(where))
        with self._db.connection() as connection:
            return connection.execute(query).scalar_one()

    def due(self, where: Filter, since: datetime, step: timedelta, steps: int) -> DueCounts:
        """Count what is due, from the index of the times: its rows are not read."""
        first, length = to_ms(since), step // timedelta(milliseconds=1)
        looked = (
            sa.select(_p.kind, _p.queue, _p.type, _p.due_ms)
            .where(_p.namespace == self._db.namespace, _p.due_ms < first + steps * length)
            .order_by(_p.due_ms)
            .limit(LOOKED + 1)
            .subquery()
        )
        after = (looked.c.due_ms - first) // sa.literal(length, sa.BigInteger)
        place = sa.case((looked.c.due_ms < first, 0), else_=after + 1)
        wanted = sa.and_(sa.true(), *self._choice(looked.c, where))
        query = sa.select(
            *(looked.c.kind, place.label("place"), sa.func.count().label("looked")),
            sa.func.sum(sa.case((wanted, 1), else_=0)).label("wanted"),
        ).group_by(looked.c.kind, sa.text("place"))
        with self._db.connection() as connection:
            rows = connection.execute(query).all()
        is_whole = sum(row.looked for row in rows) <= LOOKED
        known = steps + 1 if is_whole else max(row.place for row in rows)
        by_kind = defaultdict[str, list[int]](lambda: [0] * known)
        for row in rows:
            if row.wanted and row.place < known:
                by_kind[row.kind][row.place] = int(row.wanted)
        return DueCounts(known, by_kind)

    def _claim(
        self, claim: str, wanted: sa.ColumnElement[bool], *, now: datetime, until: datetime, limit: int
    ) -> tuple[Parked, ...]:
        """Claim wanted retries that nobody has claimed, the longest due first, as many as `limit` at most."""
        free = sa.and_(wanted, _p.claimed_until_ms <= to_ms(now))
        query = sa.select(_p.key).where(free).order_by(_p.due_ms, _p.key).limit(limit)
        with self._db.connection() as connection:
            keys = sa.select(picked(connection, query).c.key)
            statement = sa.update(tables.parked).where(_p.namespace == self._db.namespace, _p.key.in_(keys))
            statement = statement.values(claim=claim, claimed_until_ms=to_ms(until))
            rows = updated(connection, statement, _SHOWN, sa.and_(wanted, _p.claim == claim))
        return tuple(map(_parked, sorted(rows, key=attrgetter("due_ms", "key"))))

    def _same(self, parked: Parked) -> Sequence[sa.ColumnElement[bool]]:
        return (
            _p.namespace == self._db.namespace,
            _p.key == index_id(parked.key),
            _p.fence == parked.fence,
            _p.parked_ms == to_ms(parked.parked_at),
            _p.claim == "",
        )

    def _wanted(self, where: Filter) -> Iterator[sa.ColumnElement[bool]]:
        yield _p.namespace == self._db.namespace
        yield from self._choice(_p, where)

    def _choice(self, of: Any, where: Filter) -> Iterator[sa.ColumnElement[bool]]:
        yield from equals(of.queue, where.queue)
        yield from equals(of.kind, where.kind)
        yield from matching(of.type, where.type, on_postgres=self._db.is_postgres)


def _parked(row: Any) -> Parked:
    return from_json(Parked, row.record, next_retry_at=from_ms(row.due_ms))
