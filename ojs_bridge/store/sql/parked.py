"""Parked retries in SQL."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any
from uuid import uuid4

import sqlalchemy as sa

from ..parked import ALL_PARKED, Due, Parked, ParkedFilter, ParkedPage
from ..records import index_id, index_text, parked_from_json, parked_to_json, to_ms
from ..reservations import Settle
from .database import Database
from .reservations import mark_settled
from .statements import Upsert, batches, beginning, equals, matching, page, picked, updated
from .tables import parked as table

_c = table.c
_PARK = Upsert(
    table,
    *(column.name for column in table.c if not column.primary_key),
    where=lambda new: _c.fence <= new["fence"],
)
_FREE = {"claim": "", "claimed_until_ms": 0}
_SHOWN = (_c.record, _c.due_ms, _c.key)


class SQLParked:
    """The part of a store that holds parked retries."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def park(self, parked: Parked, settle: Settle | None = None) -> bool:
        """Settle the job's reservation and write its retry, unless one of its key has a higher fence."""
        row = {
            "namespace": self._db.namespace,
            "key": index_id(parked.key),
            "job_id": index_id(parked.id),
            "fence": parked.fence,
            "framework": index_text(parked.framework),
            "type": index_text(parked.type),
            "queue": index_text(parked.queue),
            "due_ms": to_ms(parked.next_retry_at),
            "parked_ms": to_ms(parked.parked_at),
            "record": parked_to_json(parked),
            **_FREE,
        }
        with self._db.connection(durable=True) as connection:
            if settle is not None and not mark_settled(connection, self._db.namespace, settle):
                return False
            _PARK(connection, row)
        return True

    def claim_due(self, framework: str, *, now: datetime, until: datetime, limit: int) -> Due:
        """Claim a framework's due retries, the longest due first, atomically.

        A retry that another worker claims at this moment is left out.
        """
        mine = _c.namespace == self._db.namespace
        due = sa.and_(mine, _c.framework == index_text(framework), _c.due_ms <= to_ms(now))
        claim = uuid4().hex
        return Due(claim, self._claim(claim, due, now=now, until=until, limit=limit))

    def claim_parked(self, keys: Sequence[str], *, now: datetime, until: datetime) -> Due:
        """Claim the retries of these keys, atomically; one that another worker is claiming is left out."""
        claim, mine = uuid4().hex, _c.namespace == self._db.namespace
        lots = (
            self._claim(claim, sa.and_(mine, _c.key.in_(lot)), now=now, until=until, limit=len(lot))
            for lot in batches([index_id(key) for key in keys])
        )
        return Due(claim, tuple(retry for lot in lots for retry in lot))

    def unpark(self, retries: Sequence[Parked], claim: str) -> int:
        """Delete published retries that this claim still holds; return how many."""
        return self._db.change(sa.delete(table), self._claimed_by(retries, claim))

    def unclaim_parked(self, retries: Sequence[Parked], claim: str) -> None:
        """End the claim of retries that could not be published: they are due as before."""
        self._db.change(sa.update(table).values(_FREE), self._claimed_by(retries, claim))

    def list_parked(self, where: ParkedFilter, *, limit: int, cursor: str | None) -> ParkedPage:
        """Return a page, the next one due first; raises ValueError for a cursor that no page gave out."""
        query = sa.select(*_SHOWN).where(*self._wanted(where))
        with self._db.connection() as connection:
            rows, more = page(connection, query, limit, cursor, newest=False)
        return ParkedPage(tuple(map(_parked, rows)), more)

    def get_parked(self, job_id: str) -> Parked | None:
        """Return a job's parked retry, or None; of several chains of one id, the next retry due."""
        mine = sa.and_(_c.namespace == self._db.namespace, _c.job_id == index_id(job_id))
        with self._db.connection() as connection:
            row = connection.execute(sa.select(*_SHOWN).where(mine).order_by(_c.due_ms).limit(1)).first()
        return None if row is None else _parked(row)

    def parked_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids of jobs that begin with a text, from the index of jobs."""
        begins = beginning(_c.job_id, text, on_postgres=self._db.is_postgres)
        query = sa.select(_c.job_id).where(_c.namespace == self._db.namespace, begins).distinct().limit(limit)
        with self._db.connection() as connection:
            return connection.execute(query).scalars().all()

    def reschedule(self, parked: Parked, at: datetime) -> bool:
        """Make a retry due at another time; False when it is claimed, was replaced or is gone."""
        return self._changed(sa.update(table).values(due_ms=to_ms(at)), parked)

    def cancel_parked(self, parked: Parked) -> bool:
        """Delete a retry; False when it is claimed, was replaced or is gone."""
        return self._changed(sa.delete(table), parked)

    def count_parked(self, where: ParkedFilter = ALL_PARKED) -> int:
        """Count the parked retries of some kind."""
        query = sa.select(sa.func.count()).where(*self._wanted(where))
        with self._db.connection() as connection:
            return connection.execute(query).scalar_one()

    def _claim(
        self, claim: str, wanted: sa.ColumnElement[bool], *, now: datetime, until: datetime, limit: int
    ) -> tuple[Parked, ...]:
        """Claim wanted retries that nobody has claimed, the longest due first, as many as `limit` at most."""
        free = sa.and_(wanted, _c.claimed_until_ms <= to_ms(now))
        query = sa.select(_c.key).where(free).order_by(_c.due_ms, _c.key).limit(limit)
        with self._db.connection() as connection:
            keys = sa.select(picked(connection, query).c.key)
            statement = sa.update(table).where(_c.namespace == self._db.namespace, _c.key.in_(keys))
            statement = statement.values(claim=claim, claimed_until_ms=to_ms(until))
            rows = updated(connection, statement, _SHOWN, sa.and_(wanted, _c.claim == claim))
        return tuple(_parked(row) for row in sorted(rows, key=lambda row: (row.due_ms, row.key)))

    def _changed(self, statement: sa.Update | sa.Delete, found: Parked) -> bool:
        same = (
            _c.namespace == self._db.namespace,
            _c.key == index_id(found.key),
            _c.fence == found.fence,
            _c.parked_ms == to_ms(found.parked_at),
            _c.claim == "",
        )
        with self._db.connection(durable=True) as connection:
            return connection.execute(statement.where(*same)).rowcount == 1

    def _claimed_by(self, retries: Sequence[Parked], claim: str) -> Iterator[sa.ColumnElement[bool]]:
        mine = sa.and_(_c.namespace == self._db.namespace, _c.claim == claim)
        for batch in batches(retries):
            yield sa.and_(mine, _c.key.in_([index_id(retry.key) for retry in batch]))

    def _wanted(self, where: ParkedFilter) -> Iterator[sa.ColumnElement[bool]]:
        yield _c.namespace == self._db.namespace
        yield from equals(_c.queue, where.queue)
        yield from matching(_c.type, where.type, on_postgres=self._db.is_postgres)


def _parked(row: Any) -> Parked:
    return parked_from_json(row.record, due_ms=row.due_ms)
