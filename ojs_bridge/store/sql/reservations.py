"""Reservations in SQL, with one row per key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from operator import attrgetter
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...rules.job import Job
from ..jobs import (
    KEEP,
    OUTLIVE_MS,
    SUSPECTED,
    Grant,
    Reservation,
    ReserveAnswer,
    Settle,
)
from ..protocol import Letter
from ..records import from_json, from_ms, index_id, to_ms
from . import tables
from .database import Database
from .statements import New, Upsert, batches, picked

_TAKEN = ReserveAnswer(Grant.TAKEN)
#: A parameter would be a value that no row has.
EMPTY: sa.ColumnClause[str] = sa.literal_column("''")
_r = tables.reservations.c
_RESERVE = Upsert(
    tables.reservations,
    *("fence", "settled", "holder", "mark", "lost", "until_ms"),
    where=lambda new: sa.and_(
        _r.fence < new["fence"],
        sa.or_(new["publication"] == EMPTY, _r.publication.in_((EMPTY, new["publication"]))),
    ),
)


def _held(new: New) -> sa.ColumnElement[bool]:
    return sa.and_(_r.fence == new["fence"], _r.holder == new["holder"])


_SETTLE = Upsert(tables.reservations, "settled", "until_ms", where=_held)
#: It protects against a late copy of the message, and against nothing else.
_SETTLE_ALONE = Upsert(tables.reservations, "settled", "until_ms", where=_held, may_be_lost=True)
# A worker that has settled its reservation itself was not dead.
_SETTLE_FOR_DEAD = Upsert(
    tables.reservations,
    *("settled", "holder", "until_ms"),
    where=lambda new: sa.and_(_r.fence == new["fence"], sa.or_(sa.not_(_r.settled), _r.holder == EMPTY)),
)
_p, _l, _s = tables.parked.c, tables.letters.c, tables.suspects.c
_SUSPECT = Upsert(tables.suspects)
#: The record of a key.
LOOK = sa.select(tables.reservations).where(
    _r.namespace == sa.bindparam("namespace"), _r.key == sa.bindparam("key")
)


class SQLReservedRuns:
    """The reservations of a store."""

    def __init__(self, database: Database) -> None:
        self._db = database
        #: What `expire_before` has yet to look at: beyond which key, from below and from above. Each process
        #: begins elsewhere.
        self._unswept = {True: _r.key > str(uuid4())}
        self._from_below = True

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
        """Reserve a run until a time, atomically: one round trip when it is free, three when it is not."""
        row = {
            "namespace": self._db.namespace,
            "key": index_id(reservation.key),
            "fence": reservation.fence,
            "settled": False,
            "publication": index_id(publication),
            "holder": index_id(holder),
            "mark": index_id(mark),
            "lost": False,
            "until_ms": to_ms(until),
        }
        if self._db.write(_RESERVE, row):
            return _TAKEN
        with self._db.connection() as connection:
            # Another request has changed the record since the last round.
            while not _RESERVE(connection, row):
                record = connection.execute(LOOK, row).one_or_none()
                grant = _judge(record, row, to_ms(now))
                repeated = _is_repeated(record, row)
                if grant is Grant.LOST and not repeated and not _reserve_lost(connection, row, to_ms(now)):
                    continue
                if record and not repeated and grant in (Grant.HELD, Grant.LOST):
                    return ReserveAnswer(grant, from_ms(record.until_ms), record.holder, record.mark)
                if grant is not None:
                    return ReserveAnswer(grant)
        return _TAKEN

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the unsettled reservations of `holder`; return those that `holder` has lost."""
        extend = sa.update(tables.reservations).values(until_ms=to_ms(until))
        lost: list[Reservation] = []
        for batch in batches(list(dict.fromkeys(reservations))):
            held = sa.and_(self._any_of(batch), _r.holder == index_id(holder), sa.not_(_r.settled))
            with self._db.connection() as connection:
                if connection.execute(extend.where(held)).rowcount < len(batch):
                    lost += _without(batch, connection.execute(sa.select(_r.key, _r.fence).where(held)))
        return lost

    def under_way(self, reservations: Sequence[Reservation], *, now: datetime) -> Mapping[Reservation, str]:
        """Return those that are neither settled nor expired, with their holders."""
        live = dict[tuple[str, int], str]()
        for batch in batches(list(dict.fromkeys(reservations))):
            is_live = sa.and_(self._any_of(batch), sa.not_(_r.settled), _r.until_ms > to_ms(now))
            with self._db.connection() as connection:
                rows = connection.execute(sa.select(_r.key, _r.fence, _r.holder).where(is_live))
                live.update(((row.key, row.fence), row.holder) for row in rows)
        found = {each: live.get((index_id(each.key), each.fence)) for each in reservations}
        return {each: holder for each, holder in found.items() if holder is not None}

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as settled; False when the record has another fence or holder."""
        write, row = settling(self._db.namespace, settle)
        write = _SETTLE_ALONE if write is _SETTLE else write
        left = self._left_by(settle.job, settle.keep_until - KEEP) if settle.job else ()
        if not left:
            return self._db.write(write, row)
        with self._db.connection(durable=True) as connection:
            if not (_SETTLE if write is _SETTLE_ALONE else write)(connection, row):
                return False
            for delete in left:
                connection.execute(delete)
        return True

    def _left_by(self, job: Job, at: datetime) -> Sequence[sa.Delete]:
        """Return what deletes the parked retry and the letters that earlier messages of a job have left.

        While its run is reserved, no other worker can write more of them.
        """
        ours, key = _p.namespace == self._db.namespace, index_id(job.key)
        retry = sa.and_(ours, _p.key == key, _p.fence <= job.fence)
        ids = [index_id(name) for name in (job.letter_id, job.own_letter_id)]
        mine = sa.and_(_l.namespace == self._db.namespace, _l.id.in_(ids))
        with self._db.connection() as connection:
            retries = connection.execute(sa.select(_p.key).where(retry)).all()
            letters = connection.execute(sa.select(_l.id, _l.discarded_ms, _l.record).where(mine)).all()
        left = [sa.delete(tables.parked).where(retry)] if retries else []
        for row in letters:
            if from_json(Letter, row.record).is_left_by(job, at):
                same = sa.and_(mine, _l.id == row.id, _l.discarded_ms == row.discarded_ms)
                left.append(sa.delete(tables.letters).where(same))
        return left

    def settle_all(self, settles: Sequence[Settle]) -> Sequence[Reservation]:
        """Settle reservations of holders that live, one a key; return those that are another's now."""
        lost = tuple(each.reservation for each in settles if each.job and not self.settle(each))
        settles = [each for each in settles if each.job is None]
        if not settles:
            return lost
        # In the order of the index, as an extension locks them: two orders end in a deadlock now and then.
        ordered = sorted(settles, key=attrgetter("reservation"))
        rows = [settling(self._db.namespace, each)[1] for each in ordered]
        holders = {index_id(each.holder or "") for each in settles}
        if self._db.write(_SETTLE_ALONE, *rows):
            return lost
        with self._db.connection() as connection:
            for batch in batches([each.reservation for each in settles]):
                ours = sa.and_(self._any_of(batch), _r.settled, _r.holder.in_(holders))
                lost += tuple(_without(batch, connection.execute(sa.select(_r.key, _r.fence).where(ours))))
        return lost

    def release(self, settle: Settle) -> bool:
        """Release a reservation unused; False when the record has another fence or holder, or is settled."""
        where = [self._any_of([settle.reservation]), sa.not_(_r.settled)]
        if settle.holder is not None:
            where.append(_r.holder == index_id(settle.holder))
        if settle.mark:
            # What was answered with a lost attempt has begun before: it is not unused.
            where += [_r.mark == index_id(settle.mark), sa.not_(_r.lost)]
        statement: sa.Update | sa.Delete = sa.delete(tables.reservations)
        if settle.reservation.fence > 0:
            before = {"fence": settle.reservation.fence - 1, "settled": True}
            statement = sa.update(tables.reservations).values(**before, until_ms=to_ms(settle.keep_until))
        return self._db.change(statement.where(*where)) == 1

    def expire(self, reservations: Sequence[Reservation]) -> None:
        """Delete the records of settled reservations that have the same fence and were never lost."""
        over = sa.delete(tables.reservations).where(_r.settled, sa.not_(_r.lost))
        for batch in batches(reservations):
            self._db.change(over.where(self._any_of(batch)))

    def expire_before(self, now: datetime, *, limit: int) -> int:
        """Look at records in the order of their keys, since no index tells which may go, and delete those.

        What is not looked at yet shrinks from both sides: where newer records have greater keys, a look
        upwards would never come to an end. It goes on at the side where it finds many.
        """
        mine, now_ms = _r.namespace == self._db.namespace, to_ms(now)
        over = sa.or_(_r.until_ms <= now_ms - OUTLIVE_MS, sa.and_(_r.settled, _r.until_ms <= now_ms))
        left = sa.select(_r.key).where(mine, *self._unswept.values())
        lot = left.order_by(_r.key if self._from_below else _r.key.desc()).limit(limit).subquery()
        ends = sa.select(sa.func.count(), sa.func.min(lot.c.key), sa.func.max(lot.c.key))
        with self._db.connection() as connection:
            count, first, last = connection.execute(ends).one()
            ended = sa.select(_r.key).where(mine, over, _r.key.between(first or "", last or ""))
            keys = sa.select(picked(connection, ended).c.key)
            delete = sa.delete(tables.reservations).where(mine, _r.key.in_(keys))
            expired = connection.execute(delete).rowcount
        if count < limit:
            self._unswept = {}
        else:
            self._unswept[self._from_below] = _r.key > last if self._from_below else _r.key < first
        self._from_below ^= expired <= limit // 10
        self._db.change(sa.delete(tables.suspects).where(_s.since_ms < to_ms(now - SUSPECTED)))
        return expired

    def suspect(self, family: str, *, gone: bool) -> timedelta | None:
        """Return for how long a family has been suspected."""
        now_ms = to_ms(self._db.clock())
        row = {"namespace": self._db.namespace, "family": index_id(family), "since_ms": now_ms}
        since = sa.select(_s.since_ms).where(_s.namespace == row["namespace"], _s.family == row["family"])
        with self._db.connection() as connection:
            if gone:
                _SUSPECT(connection, row)
            since_ms = connection.execute(since).scalar()
        return None if since_ms is None else timedelta(milliseconds=now_ms - since_ms)

    def clear(self, family: str) -> None:
        """End the suspicion against a family."""
        self._db.change(sa.delete(tables.suspects).where(_s.family == index_id(family)))

    def _any_of(self, reservations: Sequence[Reservation]) -> sa.ColumnElement[bool]:
        pairs = [(index_id(key), fence) for key, fence in reservations]
        # The databases search their indexes for the keys alone.
        known = _r.key.in_([key for key, _fence in pairs])
        return sa.and_(_r.namespace == self._db.namespace, known, sa.tuple_(_r.key, _r.fence).in_(pairs))


def settling(namespace: str, settle: Settle) -> tuple[Upsert, dict[str, Any]]:
    """Return the statement and the row that settle a reservation; written if this holder may settle it."""
    write = _SETTLE_FOR_DEAD if settle.holder is None else _SETTLE
    return write, {
        "namespace": namespace,
        "key": index_id(settle.reservation.key),
        "fence": settle.reservation.fence,
        "settled": True,
        "publication": "",
        "holder": index_id(settle.holder or ""),
        "mark": "",
        "lost": False,
        "until_ms": to_ms(settle.keep_until),
    }


def _without(reservations: Sequence[Reservation], rows: Iterable[Any]) -> Iterator[Reservation]:
    extended = {(row.key, row.fence) for row in rows}
    return (each for each in reservations if (index_id(each.key), each.fence) not in extended)


def _is_repeated(record: Any, asked: dict[str, Any]) -> bool:
    return record is not None and (record.holder, record.mark) == (asked["holder"], asked["mark"])


def _judge(record: Any, asked: dict[str, Any], now_ms: int) -> Grant | None:
    """Return the answer to a request that finds a record; None when the run has become free."""
    if record is None:
        return None
    if _is_repeated(record, asked):
        return Grant.LOST if record.lost else Grant.TAKEN
    if asked["publication"] and record.publication not in ("", asked["publication"]):
        return Grant.RESENT
    if record.fence < asked["fence"]:
        return None
    if record.fence > asked["fence"] or record.settled:
        return Grant.SETTLED
    return Grant.HELD if record.until_ms > now_ms else Grant.LOST


def _reserve_lost(connection: Connection, row: dict[str, Any], now_ms: int) -> bool:
    same = [_r[name] == row[name] for name in ("namespace", "key", "fence")]
    expired = sa.and_(sa.not_(_r.settled), _r.until_ms <= now_ms)
    changes = {name: row[name] for name in ("holder", "mark", "until_ms")} | {"lost": True}
    statement = sa.update(tables.reservations).where(*same, expired).values(changes)
    return connection.execute(statement).rowcount == 1
