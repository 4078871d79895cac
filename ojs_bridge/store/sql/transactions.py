"""A user's own connection, in whose transaction a job is written: of psycopg, SQLAlchemy or Django."""

from __future__ import annotations

import functools
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from ...errors import NotInTransaction, StoreError
from ..jobs import Parked, Transaction
from . import tables
from .database import Database
from .statements import Upsert, row_of

#: Each send is a job of its own: it takes the place of none.
_PARK = Upsert(tables.parked)

_DIALECTS: Mapping[str, Callable[..., sa.Dialect]] = {
    "postgresql": postgresql.dialect,
    "sqlite": sqlite.dialect,
}
_KNOWN = "a connection or session of psycopg, SQLAlchemy or Django, or an alias of Django's such as 'default'"


class UsersConnection(ABC):
    """A connection that is not ours. Every method but `then` raises the errors of its driver."""

    #: The kind of its database, as SQLAlchemy calls it.
    database: str

    @abstractmethod
    def ask(self, query: str) -> Sequence[Any]:
        """Return the first row of a query without parameters."""

    @abstractmethod
    def is_open(self) -> bool:
        """Return whether a transaction is open: not before its first question, as most drivers begin it."""

    @abstractmethod
    def write(self, upsert: Upsert, row: Mapping[str, Any]) -> bool:
        """Write a row; return whether it was written."""

    def then(self, do: Callable[[], object]) -> bool:  # noqa: ARG002
        """Let something be done as soon as the transaction has committed; False if it cannot tell."""
        return False


def connection_of(given: Any) -> UsersConnection:
    """Return the connection that a user has given, or that a function returns; raises NotInTransaction."""
    if callable(given):
        # Celery copies the options of a chord, and no connection can be copied. A scoped session is callable.
        given = given()
    if isinstance(given, str) or hasattr(given, "in_atomic_block"):
        return _OfDjango(given)
    orm, psycopg = (sys.modules.get(name) for name in ("sqlalchemy.orm", "psycopg"))
    if orm is not None and isinstance(given, orm.Session):
        given = given.connection()
    if isinstance(given, sa.Connection):
        return _OfSQLAlchemy(given)
    if psycopg is not None and isinstance(given, psycopg.Connection):
        return _OfPsycopg(given)
    raise NotInTransaction(f"ojs_in: {type(given).__module__}.{type(given).__qualname__} is not {_KNOWN}")


def connections_in_transaction() -> Iterator[UsersConnection]:
    """Yield the connections of Django's that this thread has in a transaction; no other library knows."""
    if "django.db" in sys.modules:
        from django.db import connections

        yield from map(_OfDjango, (c for c in connections.all(initialized_only=True) if c.in_atomic_block))


class SQLTransaction:
    """The open transaction of a user's connection; raises NotInTransaction for one that cannot be used."""

    def __init__(self, database: Database, connection: UsersConnection) -> None:
        self._db, self._connection = database, connection
        database.prepare()
        kind = "postgresql" if database.is_postgres else "sqlite"
        try:
            #: Whether it is a transaction on the database of the store.
            self.is_ours = connection.database == kind and database.is_that_of(connection.ask)
            is_open = not self.is_ours or connection.is_open()
        except StoreError:
            raise
        except Exception as error:
            raise NotInTransaction(f"ojs_in: the transaction has failed: {in_words(error)}") from error
        if not is_open:
            raise NotInTransaction(
                "ojs_in: no transaction is open: its connection commits each statement by itself"
            )

    def park(self, parked: Parked) -> None:
        """Write a job by the user's connection."""
        try:
            is_written = self._connection.write(_PARK, row_of(self._db.namespace, parked))
        except Exception as error:
            raise StoreError(f"job {parked.id} is not in the transaction: {in_words(error)}") from error
        if not is_written:
            raise StoreError(f"job {parked.id} is not in the transaction: another one waits under its id")

    def then(self, do: Callable[[], object]) -> bool:
        """Let something be done after the commit."""
        return self._connection.then(do)


def join(database: Database, connection: Any) -> Transaction:
    """Return the open transaction of a user's connection."""
    transaction = SQLTransaction(database, connection_of(connection))
    if not transaction.is_ours:
        raise NotInTransaction(
            f"ojs_in: the connection does not see the tables of the store {database.shown!r}: it belongs to "
            "another database, or to another schema"
        )
    return transaction


def joined(database: Database) -> Transaction | None:
    """Return the transaction of Django's on this database that this thread is in, or None."""
    found = (SQLTransaction(database, each) for each in connections_in_transaction())
    return next((each for each in found if each.is_ours), None)


def in_words(error: Exception) -> str:
    """Return the error of a driver, without the parameters, which belong in no log."""
    cause = getattr(error, "orig", None) or error
    return f"{type(cause).__name__}: {' '.join(str(cause).split())}"


class _OfPsycopg(UsersConnection):
    database = "postgresql"

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def _run(self, query: str, values: Sequence[Any] | None = None) -> Any:
        from psycopg import Cursor
        from psycopg.rows import tuple_row

        # The user's own cursors may write parameters and rows in another way.
        return Cursor(self._connection, row_factory=tuple_row).execute(query.encode(), values)

    def ask(self, query: str) -> Sequence[Any]:
        return tuple(self._run(query).fetchone())

    def is_open(self) -> bool:
        from psycopg.pq import TransactionStatus

        return bool(self._connection.info.transaction_status == TransactionStatus.INTRANS)

    def write(self, upsert: Upsert, row: Mapping[str, Any]) -> bool:
        # A pipeline does not count before its end.
        return bool(self._run(*_in_text(upsert, self.database, row)).rowcount != 0)


class _OfSQLAlchemy(UsersConnection):
    def __init__(self, connection: sa.Connection) -> None:
        self._connection, self.database = connection, connection.dialect.name

    def ask(self, query: str) -> Sequence[Any]:
        return tuple(self._connection.exec_driver_sql(query).one())

    def is_open(self) -> bool:
        driver: Any = self._connection.connection.dbapi_connection
        commits_each = getattr(driver, "autocommit", False) is True
        if hasattr(driver, "in_transaction"):  # SQLite's begins one before it writes
            commits_each = commits_each or driver.isolation_level is None
            return not commits_each or bool(driver.in_transaction)
        return not commits_each

    def write(self, upsert: Upsert, row: Mapping[str, Any]) -> bool:
        return upsert(self._connection, row)


class _OfDjango(UsersConnection):
    def __init__(self, given: Any) -> None:
        try:
            from django.db import connections, transaction

            self._connection = connections[given] if isinstance(given, str) else given
        except Exception as error:
            # Django is not installed or not set up, or does not know the alias.
            raise NotInTransaction(f"ojs_in: {given!r} is no connection of Django's: {error}") from error
        self._transaction, self.database = transaction, self._connection.vendor

    def ask(self, query: str) -> Sequence[Any]:
        with self._connection.cursor() as cursor:
            cursor.execute(query)
            return tuple(cursor.fetchone())

    def is_open(self) -> bool:
        return bool(self._connection.in_atomic_block)

    def write(self, upsert: Upsert, row: Mapping[str, Any]) -> bool:
        with self._connection.cursor() as cursor:
            cursor.execute(*_in_text(upsert, self.database, row))
            return bool(cursor.rowcount == 1)

    def then(self, do: Callable[[], object]) -> bool:
        self._transaction.on_commit(do, using=self._connection.alias)
        return True


def _in_text(upsert: Upsert, database: str, row: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    """Return a statement in the text that both drivers know, and its values in their order."""
    text, names = _compiled(upsert, database)
    return text, [row[name] for name in names]


@functools.lru_cache
def _compiled(upsert: Upsert, database: str) -> tuple[str, Sequence[str]]:
    compiled: Any = upsert.statements[database].compile(dialect=_DIALECTS[database](paramstyle="format"))
    return str(compiled), compiled.positiontup
