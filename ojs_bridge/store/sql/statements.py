"""Statements and conditions that all parts of the SQL store share."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import Insert as PostgresInsert
from sqlalchemy.dialects.sqlite import Insert as SqliteInsert
from sqlalchemy.engine import Connection

from ...rules.notations import to_glob
from ..jobs import Parked
from ..records import index_id, index_text, to_json, to_ms

T = TypeVar("T")
_Column: TypeAlias = sa.ColumnElement[Any]
_Condition: TypeAlias = sa.ColumnElement[bool]
#: How each database writes an insert that may meet a row of the same key.
Insert: TypeAlias = PostgresInsert | SqliteInsert
INSERTS: Mapping[str, type[Insert]] = {"postgresql": PostgresInsert, "sqlite": SqliteInsert}
#: PostgreSQL answers before this statement is on its disk, unless its user has chosen how it commits.
_BEFORE_DISK: sa.ColumnClause[str] = sa.literal_column(
    "set_config('synchronous_commit', CASE current_setting('synchronous_commit')"
    " WHEN 'on' THEN 'off' ELSE current_setting('synchronous_commit') END, true)"
)
#: How many keys one statement names; SQLite may know no more than 999 parameters.
BATCH = 300
#: The columns of a parked job that nobody has claimed.
FREE: Mapping[str, str | int] = {"claim": "", "claimed_until_ms": 0}
LARGEST_INTEGER = 2**63 - 1


class New(Protocol):
    """The row to be written: its values by the names of their columns."""

    def __getitem__(self, name: str, /) -> Any: ...


class Upsert:
    """An insert that, on a condition, replaces columns of the row that has the same primary key.

    It is atomic. `changes` computes columns from the new row. Without columns to replace, the earlier row
    stays. With `may_be_lost` PostgreSQL does not wait until the transaction is on its disk: if the server
    crashes, all of the transaction may be lost. A module builds it once, because building it takes longer
    than a round trip.
    """

    def __init__(
        self,
        table: sa.Table,
        *replaced: str,
        changes: Callable[[New], Mapping[str, Any]] = lambda _new: {},
        where: Callable[[New], sa.ColumnElement[bool]] | None = None,
        may_be_lost: bool = False,
    ) -> None:
        self._table, self._replaced, self._changes, self._where = table, replaced, changes, where
        self._may_be_lost = may_be_lost
        #: The statement for each kind of database.
        self.statements = {name: self._on_conflict(insert(table)) for name, insert in INSERTS.items()}

    def __call__(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        """Write a row; return whether it was written."""
        return connection.execute(self.statements[connection.dialect.name], row).rowcount == 1

    def all(self, connection: Connection, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Write rows in one round trip; return whether all of them were written."""
        # A list makes the driver prepare a statement for many rows, which costs more for one.
        statement = self.statements[connection.dialect.name]
        return connection.execute(statement, rows if len(rows) > 1 else rows[0]).rowcount == len(rows)

    @property
    def from_json(self) -> sa.Insert:
        """PostgreSQL's statement for rows in one JSON text, which the client writes faster than arrays."""
        text = sa.cast(sa.bindparam("rows", type_=sa.Text), sa.JSON)
        read = sa.func.json_populate_recordset(sa.text(f"NULL::{self._table.name}"), text)
        names = self._table.c.keys()
        rows = sa.select(*read.table_valued(*names).c)
        return self._on_conflict(PostgresInsert(self._table).from_select(names, rows))

    def _on_conflict(self, inserting: Insert) -> sa.Insert:
        statement = inserting.execution_options(preserve_rowcount=True)
        keys = [column.name for column in self._table.primary_key]
        if not self._replaced:
            return statement.on_conflict_do_nothing(index_elements=keys)
        new = statement.excluded
        where = None if self._where is None else self._where(new)
        replacing = statement.on_conflict_do_update(
            index_elements=keys,
            set_={**{name: new[name] for name in self._replaced}, **self._changes(new)},
            where=where,
        )
        if self._may_be_lost and isinstance(replacing, PostgresInsert):
            return replacing.returning(_BEFORE_DISK)
        return replacing


def row_of(namespace: str, parked: Parked) -> dict[str, Any]:
    """Return the row of a parked job, which nobody has claimed."""
    return {
        "namespace": namespace,
        "key": index_id(parked.key),
        "job_id": index_id(parked.id),
        "fence": parked.fence,
        "kind": parked.kind,
        "framework": index_text(parked.framework),
        "type": index_text(parked.type),
        "queue": index_text(parked.queue),
        "due_ms": to_ms(parked.next_retry_at),
        "parked_ms": to_ms(parked.parked_at),
        "record": to_json(parked),
        **FREE,
    }


def picked(connection: Connection, query: sa.Select[Any]) -> sa.FromClause:
    """Return the rows of a limited query, without the rows that another process is changing.

    On SQLite there is only one writer at a time, so no row is left out.
    """
    if connection.dialect.name == "postgresql":
        # PostgreSQL might run a subquery again for every row, and pick other rows.
        return query.with_for_update(skip_locked=True).cte()
    return query.subquery()


def updated(
    connection: Connection,
    statement: sa.Update,
    columns: Sequence[sa.Column[Any]],
    ours: sa.ColumnElement[bool],
) -> Sequence[Any]:
    """Run an update and return columns of the changed rows. The condition `ours` finds these rows again."""
    if connection.dialect.name == "postgresql":
        return connection.execute(statement.returning(*columns)).all()
    # The limit ends the search at the last changed row. SQLite before 3.35 has no RETURNING.
    count = connection.execute(statement).rowcount
    return connection.execute(sa.select(*columns).where(ours).limit(count)).all()


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items in lots that one statement may name, so that no statement locks many rows for long."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def equals(column: sa.Column[str], wanted: str | None) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the condition that a column has a value; for None, yield nothing."""
    if wanted is not None:
        yield column == index_text(wanted)


def matching(
    column: sa.Column[str], pattern: str | None, *, on_postgres: bool
) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the condition that a column matches a pattern; for None, yield nothing."""
    if pattern is None:
        return
    text = index_text(pattern)
    if "*" not in text:
        yield column == text
    elif on_postgres:
        escaped = re.sub("[/%_]", r"/\g<0>", text)
        yield column.like(escaped.replace("*", "%"), escape="/")
    else:
        # SQLite's LIKE takes `auth` for `AUTH`.
        yield column.op("GLOB")(to_glob(text))


def beginning(column: sa.Column[str], text: str, *, on_postgres: bool) -> sa.ColumnElement[bool]:
    """Return the condition that a column begins with a text."""
    if on_postgres:
        return column.startswith(index_text(text), autoescape=True)
    return column.op("GLOB", return_type=sa.Boolean())(f"{glob.escape(index_text(text))}*")


def page(
    connection: Connection, query: sa.Select[Any], limit: int, cursor: str | None, *, newest: bool
) -> tuple[Sequence[Any], str | None]:
    """Return the rows of a page, and the cursor of the next page if there is one.

    The query selects a time and a key last, in this order. A cursor names a row, so that new rows do not
    shift the next page. Raises ValueError for a cursor that no page gave out.
    """
    rows = connection.execute(_rest(query, cursor, newest=newest).limit(limit + 1)).all()
    more = write_cursor(*rows[limit - 1][-2:]) if len(rows) > limit else None
    return rows[:limit], more


def _rest(query: sa.Select[Any], cursor: str | None, *, newest: bool) -> sa.Select[Any]:
    *_, at, key = query.selected_columns
    order = (at.desc(), key.desc()) if newest else (at, key)
    return query.where(*beyond(at, key, cursor, newest=newest)).order_by(*order)


# The database searches its index for the first of the two conditions.
def beyond(at: _Column, key: _Column, cursor: str | None, *, newest: bool) -> Iterator[_Condition]:
    """Yield the conditions that a row comes after a cursor's; raises ValueError."""
    if cursor is not None:
        last_at, last_key = _read_cursor(cursor)
        yield at <= last_at if newest else at >= last_at
        yield sa.or_(at < last_at, key < last_key) if newest else sa.or_(at > last_at, key > last_key)


def write_cursor(ms: int, key: str) -> str:
    """Return the cursor that names a row."""
    return f"{ms}:{key}"


def _read_cursor(cursor: str) -> tuple[int, str]:
    at, separator, last_key = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal() and len(at) <= len(str(LARGEST_INTEGER)) - 1):
        raise ValueError(f"cursor: {cursor!r:.100} was not given out by this store")
    return int(at), index_text(last_key)
