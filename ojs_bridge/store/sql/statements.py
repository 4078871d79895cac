"""Statements that each kind of database writes in its own way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert as postgresql_insert
from sqlalchemy.dialects.sqlite import insert as sqlite_insert
from sqlalchemy.engine import Connection

T = TypeVar("T")
#: How many keys one statement names; SQLite may know no more than 999 parameters.
BATCH = 300


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
        self._in_one = {
            name: self._on_conflict(insert(table)).execution_options(preserve_rowcount=True)
            for name, insert in (("postgresql", postgresql_insert), ("sqlite", sqlite_insert))
        }

    def __call__(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        """Write a row; return whether it was written."""
        statement = self._in_one.get(connection.dialect.name)
        if statement is not None:
            return connection.execute(statement, row).rowcount == 1
        return self._ignored(connection, row) or self._updated(connection, row)

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

    def _ignored(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        statement = sa.insert(self._table).prefix_with("IGNORE").execution_options(preserve_rowcount=True)
        return connection.execute(statement, row).rowcount == 1

    def _updated(self, connection: Connection, row: Mapping[str, Any]) -> bool:
        if not self._replaced:
            return False
        same = [column == row[column.name] for column in self._table.primary_key]
        also = [] if self._where is None else [self._where(row)]
        statement = sa.update(self._table).where(*same, *also)
        changes = {name: row[name] for name in self._replaced}
        return connection.execute(statement.values(changes)).rowcount == 1


def picked(connection: Connection, query: sa.Select[Any]) -> sa.FromClause:
    """Return the rows of a limited query, picked once, those that somebody else is changing left out.

    Elsewhere than on PostgreSQL the statement around it has to be the only writer, or waits.
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
