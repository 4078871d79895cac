"""Statements and conditions that the parts of the SQL store share."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import Connection

from ...spec.patterns import to_glob
from ..records import index_text

T = TypeVar("T")
#: How each database writes an insert that may meet a row of the same key.
INSERTS: Mapping[str, Callable[[sa.Table], Any]] = {
    "postgresql": postgresql_insert,
    "sqlite": sqlite_insert,
}
#: How many keys one statement names; SQLite may know no more than 999 parameters.
BATCH = 300
LARGEST_INTEGER = 2**63 - 1


class New(Protocol):
    """The row to be written: its values by the names of their columns."""

    def __getitem__(self, name: str, /) -> Any: ...


class Upsert:
    """An insert that replaces columns of the row that has its primary key, on a condition, atomically.

    Without columns to replace, the row that is there stays. Built once: that takes longer than a round trip.
    """

    def __init__(
        self, table: sa.Table, *replaced: str, where: Callable[[New], sa.ColumnElement[bool]] | None = None
    ) -> None:
        self._table, self._replaced, self._where = table, replaced, where
        self._statements = {
            name: self._on_conflict(insert(table)).execution_options(preserve_rowcount=True)
            for name, insert in INSERTS.items()
        }

    def __call__(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        """Write a row; return whether it was written."""
        return connection.execute(self._statements[connection.dialect.name], row).rowcount == 1

    def _on_conflict(self, statement: Any) -> sa.Insert:
        keys = [column.name for column in self._table.primary_key]
        if not self._replaced:
            ignoring: sa.Insert = statement.on_conflict_do_nothing(index_elements=keys)
            return ignoring
        new = statement.excluded
        where = None if self._where is None else self._where(new)
        replacing: sa.Insert = statement.on_conflict_do_update(
            index_elements=keys, set_={name: new[name] for name in self._replaced}, where=where
        )
        return replacing


def picked(connection: Connection, query: sa.Select[Any]) -> sa.FromClause:
    """Return the rows of a limited query, picked once, without those that another process is changing.

    On SQLite the statement around it is the only writer, or waits.
    """
    if connection.dialect.name == "postgresql":
        # A subquery might be run again for every row, and pick other ones.
        return query.with_for_update(skip_locked=True).cte()
    return query.subquery()


def updated(
    connection: Connection,
    statement: sa.Update,
    columns: Sequence[sa.Column[Any]],
    ours: sa.ColumnElement[bool],
) -> Sequence[Any]:
    """Carry out an update and return columns of the rows it changed, which `ours` finds afterwards."""
    if connection.dialect.name == "postgresql":
        return connection.execute(statement.returning(*columns)).all()
    # The limit keeps the search from going on behind the last of them.
    count = connection.execute(statement).rowcount
    return connection.execute(sa.select(*columns).where(ours).limit(count)).all()


def batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield items in as many lots as one statement may name, so that none locks many rows for long."""
    for start in range(0, len(items), BATCH):
        yield items[start : start + BATCH]


def equals(column: sa.Column[str], wanted: str | None) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the condition that a column has a value, none for None."""
    if wanted is not None:
        yield column == index_text(wanted)


def matching(
    column: sa.Column[str], pattern: str | None, *, on_postgres: bool
) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the condition that a column is of a pattern, none for None."""
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


def write_cursor(ms: int, key: str) -> str:
    """Return the cursor after a row, which names it: what comes and goes does not shift the next page."""
    return f"{ms}:{key}"


def read_cursor(cursor: str) -> tuple[int, str]:
    """Return what a cursor names; raises ValueError for one that no page gave out."""
    at, separator, last_key = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal() and len(at) <= len(str(LARGEST_INTEGER)) - 1):
        raise ValueError(f"cursor: {cursor!r} was not given out by this store")
    return int(at), index_text(last_key)
