"""The bin of deleted letters in SQL: a deletion moves letters into it, and an undo takes them out."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ..jobs import Reservation
from ..protocol import Bin
from ..records import index_id, to_ms
from .statements import INSERTS, Upsert
from .tables import bins, letters, reservations

_b, _l, _r = bins.c, letters.c, reservations.c
_RESTORE = Upsert(letters)
_LOCK = Upsert(reservations)


def put_in(connection: Connection, those: sa.ColumnElement[bool], into: Bin) -> int:
    """Move letters into a bin, in the transaction of a connection; return how many."""
    where, at = sa.literal(index_id(into.deletion)), sa.literal(to_ms(into.at))
    delete, dialect = sa.delete(letters).where(those), connection.dialect.name
    if dialect == "postgresql":
        # One statement: a letter that is buried anew meanwhile is neither deleted nor written.
        gone = delete.returning(_l.namespace, _l.id, _l.record).cte("gone")
        moved = sa.select(gone.c.namespace, where, gone.c.id, at, gone.c.record)
    else:
        moved = sa.select(_l.namespace, where, _l.id, at, _l.record).where(those)
    insert = INSERTS[dialect](bins).from_select([*bins.c], moved)
    new = {name: insert.excluded[name] for name in ("deleted_ms", "record")}
    put = insert.on_conflict_do_update(index_elements=["namespace", "deletion", "id"], set_=new)
    count = connection.execute(put.execution_options(preserve_rowcount=True)).rowcount
    if dialect != "postgresql":
        connection.execute(delete)
    return count


def take_out(
    connection: Connection, deletion: str, rows: Sequence[tuple[Mapping[str, Any], Reservation]]
) -> set[str]:
    """Move letters out of a bin, each with the last run of its job; return the ids that are there now.

    The transaction locks the records of these runs, also those that are not there: a run that begins
    meanwhile waits, and its end finds the letter.
    """
    namespace = rows[0][0]["namespace"]
    mark = secrets.token_hex(16)
    keys = sorted({index_id(run.key) for _, run in rows})
    records = _locked(connection, namespace, mark, keys)
    ids = [row["id"] for row, _ in rows]
    binned = _b.namespace == namespace, _b.deletion == deletion, _b.id.in_(ids)
    kept = {row.id: row.record for row in connection.execute(sa.select(_b.id, _b.record).where(*binned))}
    others = sa.select(_l.id, _l.discarded_ms).where(_l.namespace == namespace, _l.id.in_(ids))
    there = {row.id: row.discarded_ms for row in connection.execute(others)}
    back = [
        # A field of a newer version stands in the text alone.
        {**row, "record": kept[row["id"]]}
        for row, run in rows
        if row["id"] in kept and row["id"] not in there and _is_over(records[index_id(run.key)], run)
    ]
    if back:
        _RESTORE.all(connection, back)
        connection.execute(sa.delete(bins).where(*binned, _b.id.in_([row["id"] for row in back])))
    # Without the keys it would look at every reservation that there is.
    ours = _r.namespace == namespace, _r.key.in_(keys), _r.mark == mark
    connection.execute(sa.delete(reservations).where(*ours))
    # An undo that is repeated finds what it has done.
    done = {row["id"] for row, _ in rows if there.get(row["id"]) == row["discarded_ms"]}
    return done | {row["id"] for row in back}


def _locked(connection: Connection, namespace: str, mark: str, keys: Sequence[str]) -> dict[str, Any]:
    """Lock the records of some keys; one that is not there is made, with a mark."""
    blank: dict[str, Any] = {column.name: "" for column in reservations.c}
    blank |= {"namespace": namespace, "mark": mark, "fence": -1, "until_ms": 0}
    blank |= {"settled": True, "lost": False}
    _LOCK.all(connection, [{**blank, "key": key} for key in keys])
    look = sa.select(reservations).where(_r.namespace == namespace, _r.key.in_(keys)).order_by(_r.key)
    found: Sequence[Any] = connection.execute(look.with_for_update()).all()
    return {row.key: row for row in found}


def _is_over(record: Any, run: Reservation) -> bool:
    """Return whether nothing of a job has begun after its last run."""
    return bool(record.fence < run.fence or (record.fence == run.fence and record.settled))
