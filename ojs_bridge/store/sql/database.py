"""A SQL database: its connections, its errors, its schema."""

from __future__ import annotations

import logging
import math
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import datetime, timezone
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from ...errors import StoreError
from ..protocol import without_password
from . import sqlite
from .engines import durable_engine, quick_engine
from .statements import Upsert
from .tables import SCHEMA_VERSION, metadata, versions

logger = logging.getLogger("ojs_bridge")

#: The time in seconds since 1970, by dialect.
_CLOCKS = {
    "postgresql": sa.text("SELECT extract(epoch FROM clock_timestamp())"),
    "mysql": sa.text("SELECT unix_timestamp(now(6))"),
    "mariadb": sa.text("SELECT unix_timestamp(now(6))"),
}
_SAY_VERSION = Upsert(versions)
#: What keeps PostgreSQL from holding locks for a client that it cannot reach any more, and from waiting for
#: others that do; for one transaction, because a pool such as PgBouncer gives a session to many clients.
_BOUND = sa.text(
    "SELECT set_config('idle_in_transaction_session_timeout', :seconds, true),"
    " set_config('lock_timeout', :seconds, true)"
)


class Database:
    """The connections of this process to a store, whose tables appear on first use and carry a version."""

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        self._namespace = namespace
        self._shown = without_password(url)
        self._quick = quick_engine(url, patience)
        self._durable = durable_engine(self._quick, patience)
        is_postgres = self._durable.dialect.name == "postgresql"
        self._bounds = {"seconds": f"{math.ceil(patience * 1000)}ms"} if is_postgres else {}
        is_sqlite = self._durable.dialect.name == "sqlite"
        self._in_use: AbstractContextManager[Any] = sqlite.in_use if is_sqlite else nullcontext()
        self._file = sqlite.File(self._durable) if is_sqlite else None
        self._pid = os.getpid()
        self._prepared = False
        self._preparing = threading.Lock()

    def prepare(self) -> None:
        """Create the tables, or what an earlier version lacks; raises StoreError for a newer version."""
        self._be_ours()
        with self._preparing:
            if not self._prepared:
                if self._found_version() != SCHEMA_VERSION:
                    self._create_tables()
                    self._say_version()
                if self._file:
                    self._file.opened()
                self._prepared = True

    def clock(self) -> datetime:
        """Return the server's time; SQLite has none but this machine's."""
        seconds = _CLOCKS.get(self._durable.dialect.name)
        if seconds is None:
            return datetime.now(timezone.utc)
        with self._statement() as connection:
            return datetime.fromtimestamp(float(connection.execute(seconds).scalar_one()), timezone.utc)

    def close(self) -> None:
        """Close the connections of this process."""
        self._dispose(close=self._pid == os.getpid())

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        """Connect for statements that take effect together, and then outlast a loss of power."""
        self._get_ready()
        with self._errors(), self._in_use:
            self._check_file()
            with self._durable.begin() as connection:
                if self._bounds:
                    connection.execute(_BOUND, self._bounds)
                yield connection
            self._check_file()

    @contextmanager
    def _statement(self) -> Iterator[Connection]:
        """Connect for statements that take effect each on its own, in one round trip each.

        On SQLite a loss of power, which ends all its workers too, may take the last of them back.
        """
        self._get_ready()
        with self._errors(), self._in_use:
            self._check_file()
            with self._quick.begin() as connection:
                yield connection

    def _get_ready(self) -> None:
        self._be_ours()
        if not self._prepared:
            self.prepare()

    def _check_file(self) -> None:
        """Raise StoreError when SQLite's file was deleted or replaced; the next use opens what is there."""
        if self._file is None or not self._file.is_another():
            return
        self._prepared = False
        self._dispose(close=True)
        what = f"the store {self._shown!r} failed: its file was deleted or replaced, with all it held"
        logger.error("%s; it is opened anew", what)
        raise StoreError(what)

    def _be_ours(self) -> None:
        if self._pid != os.getpid():
            # A forked child must not talk over its parent's connections, nor close them.
            self._dispose(close=False)
            self._pid = os.getpid()
            self._preparing = threading.Lock()

    def _dispose(self, *, close: bool) -> None:
        self._quick.dispose(close=close)
        self._durable.dispose(close=close)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (SQLAlchemyError, UnicodeError, OverflowError) as error:
            # Its tables may be gone.
            self._prepared = False
            why = " ".join(str(getattr(error, "orig", None) or error).split())
            raise StoreError(f"the store {self._shown!r} failed: {why}") from error

    @contextmanager
    def _unprepared(self) -> Iterator[Connection]:
        with self._errors(), self._in_use, self._durable.begin() as connection:
            yield connection

    def _found_version(self) -> int | None:
        """Return the version, None where there is none; a newer store is left as it is."""
        with self._unprepared() as connection:
            if not sa.inspect(connection).has_table(versions.name):
                return None
            found: int | None = connection.execute(sa.select(sa.func.max(versions.c.version))).scalar()
        if found is not None and found > SCHEMA_VERSION:
            raise StoreError(
                f"the store has schema {found}, this ojs-bridge reads {SCHEMA_VERSION}: update it"
            )
        return found

    def _create_tables(self) -> None:
        for tries_left in reversed(range(len(metadata.tables) + 1)):
            try:
                with self._unprepared() as connection:
                    metadata.create_all(connection)
                    _create_indexes(connection)
            except StoreError:
                # Another process may have created a table between the check and the creation.
                if not tries_left:
                    raise
            else:
                return

    def _say_version(self) -> None:
        with self._unprepared() as connection:
            _SAY_VERSION(connection, {"version": SCHEMA_VERSION})
            connection.execute(sa.delete(versions).where(versions.c.version < SCHEMA_VERSION))


def _create_indexes(connection: Connection) -> None:
    """Create those that the tables of an earlier version lack."""
    for table in metadata.sorted_tables:
        for index in table.indexes:
            index.create(connection, checkfirst=True)
