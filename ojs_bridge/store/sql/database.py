"""One SQL database: its engines, connections, errors and schema."""

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
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from ...errors import ConfigurationError, StoreError
from ..protocol import without_password
from . import postgres, sqlite
from .statements import Upsert
from .tables import SCHEMA_VERSION, metadata, versions

logger = logging.getLogger("ojs_bridge")

_POSTGRES_CLOCK = sa.text("SELECT extract(epoch FROM clock_timestamp())")
_SAY_VERSION = Upsert(versions)


class Database:
    """The connections of this process to a store, whose tables appear on first use and carry a version."""

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        self._namespace = namespace
        self._shown = without_password(url)
        self._quick = _quick_engine(url, patience)
        self._durable = _durable_engine(self._quick, patience)
        self._is_postgres = self._durable.dialect.name == "postgresql"
        self._bounds = {"seconds": f"{math.ceil(patience * 1000)}ms"}
        self._in_use: AbstractContextManager[Any] = nullcontext() if self._is_postgres else sqlite.in_use
        self._file = None if self._is_postgres else sqlite.File(self._durable)
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
        if not self._is_postgres:
            return datetime.now(timezone.utc)
        with self._statement() as connection:
            seconds = float(connection.execute(_POSTGRES_CLOCK).scalar_one())
        return datetime.fromtimestamp(seconds, timezone.utc)

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
                if self._is_postgres:
                    connection.execute(postgres.BOUND, self._bounds)
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


def _quick_engine(url: str, patience: float) -> sa.Engine:
    """Make the engine of single statements, without the round trips of a transaction where they are any.

    `patience` is how many seconds a question waits for its answer. Raises ConfigurationError.
    """
    shown = without_password(url)
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"store: {shown!r} is not a database URL") from None
    engine = _engine(parsed, shown, patience)
    if engine.dialect.name == "postgresql":
        postgres.share(engine, patience)
        return engine
    if not parsed.database or ":memory:" in parsed.database:
        raise ConfigurationError(
            f"store: {shown!r} would be gone with the process: name a file, as in sqlite:///ojs.db"
        )
    sqlite.share(engine, synchronous="NORMAL", patience=patience)
    return engine


def _durable_engine(quick: sa.Engine, patience: float) -> sa.Engine:
    """Make the engine of transactions, on the same connections except on SQLite."""
    if quick.dialect.name == "postgresql":
        return quick.execution_options(isolation_level="READ COMMITTED")
    durable = sa.create_engine(quick.url, hide_parameters=True)
    sqlite.share(durable, synchronous="FULL", patience=patience)
    return durable


def _engine(url: sa.URL, shown: str, patience: float) -> sa.Engine:
    options = postgres.options(url, patience) if url.get_backend_name() == "postgresql" else {}
    try:
        # Parameters are the arguments of jobs, which belong in no log.
        return sa.create_engine(url, hide_parameters=True, **options)
    except ImportError as error:
        raise ConfigurationError(f"store: the driver of {shown!r} is not installed: {error}") from None
    except (ArgumentError, NoSuchModuleError, TypeError, ValueError) as error:
        why = f"no driver has the name {url.drivername!r}" if isinstance(error, NoSuchModuleError) else error
        raise ConfigurationError(f"store: {shown!r} is not a store that ojs-bridge knows: {why}") from None
