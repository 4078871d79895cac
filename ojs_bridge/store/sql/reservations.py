"""Reservations in SQL: one row per key, with the holder of a run and the end of the reservation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..records import from_ms, index_id, to_ms
from ..reservations import Grant, Reservation, ReserveAnswer, Settle
from .database import Database
from .statements import Upsert, batches, picked
from .tables import reservations as table

#: How long the store remembers a reservation that nobody settles or extends, after it has expired.
OUTLIVE_MS = timedelta(weeks=1) // timedelta(milliseconds=1)

_c = table.c
_RESERVE = Upsert(
    table,
    *("fence", "settled", "holder", "mark", "lost", "until_ms", "keep_until_ms"),
    where=lambda new: sa.and_(
        _c.fence < new["fence"],
        sa.or_(new["publication"] == "", _c.publication.in_(("", new["publication"]))),
    ),
)
_SETTLE = Upsert(
    table,
    *("settled", "keep_until_ms"),
    where=lambda new: sa.and_(_c.fence == new["fence"], _c.holder == new["holder"]),
)
# A worker that has settled its reservation itself was not dead.
_SETTLE_FOR_DEAD = Upsert(
    table,
    *("settled", "holder", "keep_until_ms"),
    where=lambda new: sa.and_(_c.fence == new["fence"], sa.or_(sa.not_(_c.settled), _c.holder == "")),
)
_LOOKED_AT = ("fence", "settled", "publication", "holder", "until_ms", "mark", "lost")
_LOOK = sa.select(*(_c[name] for name in _LOOKED_AT)).where(
    _c.namespace == sa.bindparam("namespace"), _c.key == sa.bindparam("key")
)


class SQLReservations:
    """The part of a store that holds reservations."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def reserve(
        self,
        reservation: Reservation,
        *,
        publication: str,
        holder: str,
        mark: str,
        now: datetime,
        until: datetime,
    ) -> ReserveAnswer:
        """Reserve a run until a time, atomically: one round trip when it is free, two when it is not."""
        until_ms = to_ms(until)
        row = {
            "namespace": self._db.namespace,
            "key": index_id(reservation.key),
            "fence": reservation.fence,
            "settled": False,
            "publication": index_id(publication),
            "holder": index_id(holder),
            "mark": index_id(mark),
            "lost": False,
            "until_ms": until_ms,
            "keep_until_ms": until_ms + OUTLIVE_MS,
        }
        with self._db.connection() as connection:
            # Another request has changed the record since the last round.
            while not _RESERVE(connection, row):
                found = connection.execute(_LOOK, row).one_or_none()
                grant = _judge(found, row, to_ms(now))
                repeated = found is not None and found.mark == row["mark"]
                if grant is Grant.LOST and not repeated and not _reserve_lost(connection, row, to_ms(now)):
                    continue
                if found and not repeated and grant in (Grant.HELD, Grant.LOST):
                    return ReserveAnswer(grant, from_ms(found.until_ms), found.holder, found.mark)
                if grant is not None:
                    return ReserveAnswer(grant)
        return ReserveAnswer(Grant.TAKEN)

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the unsettled reservations of `holder`; return those that `holder` has lost."""
        until_ms = to_ms(until)
        times = {"until_ms": until_ms, "keep_until_ms": until_ms + OUTLIVE_MS}
        lost: list[Reservation] = []
        for batch in batches(list(dict.fromkeys(reservations))):
            held = sa.and_(self._any_of(batch), _c.holder == index_id(holder), sa.not_(_c.settled))
            with self._db.connection() as connection:
                extended = connection.execute(sa.update(table).where(held).values(times)).rowcount
                if extended < len(batch):
                    lost += _without(batch, connection.execute(sa.select(_c.key, _c.fence).where(held)))
        return lost

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as settled; False when the record has another fence or holder."""
        with self._db.connection() as connection:
            return mark_settled(connection, self._db.namespace, settle)

    def release(self, settle: Settle) -> bool:
        """Release a reservation unused; False when the record has another fence or holder, or is settled."""
        where = [self._any_of([settle.reservation]), sa.not_(_c.settled)]
        if settle.holder is not None:
            where.append(_c.holder == index_id(settle.holder))
        if settle.mark:
            where.append(_c.mark == index_id(settle.mark))
        statement: sa.Update | sa.Delete = sa.delete(table)
        if settle.reservation.fence > 0:
            before = {"fence": settle.reservation.fence - 1, "settled": True}
            statement = sa.update(table).values(**before, keep_until_ms=to_ms(settle.keep_until))
        with self._db.connection() as connection:
            return connection.execute(statement.where(*where)).rowcount == 1

    def expire(self, reservations: Sequence[Reservation]) -> None:
        """Delete the records of settled reservations that have the same fence and were never lost."""
        over = sa.delete(table).where(_c.settled, sa.not_(_c.lost))
        self._db.change(over, map(self._any_of, batches(reservations)))

    def expire_before(self, now: datetime, *, limit: int) -> int:
        """Delete records whose `keep_until` has passed, settled ones and abandoned ones."""
        mine, over = _c.namespace == self._db.namespace, _c.keep_until_ms <= to_ms(now)
        query = sa.select(_c.key).where(mine, over).order_by(_c.keep_until_ms).limit(limit)
        with self._db.connection() as connection:
            keys = sa.select(picked(connection, query).c.key)
            return connection.execute(sa.delete(table).where(mine, _c.key.in_(keys))).rowcount

    def _any_of(self, reservations: Sequence[Reservation]) -> sa.ColumnElement[bool]:
        pairs = [(index_id(key), fence) for key, fence in reservations]
        # The databases search their indexes for the keys alone.
        known = _c.key.in_([key for key, _fence in pairs])
        return sa.and_(_c.namespace == self._db.namespace, known, sa.tuple_(_c.key, _c.fence).in_(pairs))


def mark_settled(connection: Connection, namespace: str, settle: Settle) -> bool:
    """Settle a reservation; return whether that was for this holder to do."""
    write = _SETTLE_FOR_DEAD if settle.holder is None else _SETTLE
    row = {
        "namespace": namespace,
        "key": index_id(settle.reservation.key),
        "fence": settle.reservation.fence,
        "settled": True,
        "publication": "",
        "holder": index_id(settle.holder or ""),
        "mark": "",
        "lost": False,
        "until_ms": 0,
        "keep_until_ms": to_ms(settle.keep_until),
    }
    return write(connection, row)


def _without(reservations: Sequence[Reservation], rows: Iterable[Any]) -> Iterator[Reservation]:
    found = {(row.key, row.fence) for row in rows}
    return (each for each in reservations if (index_id(each.key), each.fence) not in found)


def _judge(found: Any, asked: dict[str, Any], now_ms: int) -> Grant | None:
    """Return the answer to a request that finds a record; None when the run has become free."""
    if found is None:
        return None
    if found.mark == asked["mark"]:
        return Grant.LOST if found.lost else Grant.TAKEN
    if asked["publication"] and found.publication not in ("", asked["publication"]):
        return Grant.RESENT
    if found.fence < asked["fence"]:
        return None
    if found.fence > asked["fence"] or found.settled:
        return Grant.SETTLED
    return Grant.HELD if found.until_ms > now_ms else Grant.LOST


def _reserve_lost(connection: Connection, row: dict[str, Any], now_ms: int) -> bool:
    same = [_c[name] == row[name] for name in ("namespace", "key", "fence")]
    expired = sa.and_(sa.not_(_c.settled), _c.until_ms <= now_ms)
    changes = {name: row[name] for name in ("holder", "mark", "until_ms", "keep_until_ms")} | {"lost": True}
    statement = sa.update(table).where(*same, expired).values(changes)
    return connection.execute(statement).rowcount == 1
