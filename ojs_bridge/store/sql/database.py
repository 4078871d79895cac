"""One SQL database: its engines, connections, errors and schema."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import datetime, timezone
from typing import Any, NoReturn

import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import SQLAlchemyError

from ...errors import StoreError, Unstorable
from ..protocol import without_password
from . import engines, tables
from .statements import Upsert, batches
from .tables import SCHEMA_VERSION, metadata, versions

logger = logging.getLogger("ojs_bridge")

_POSTGRES_CLOCK = sa.text("SELECT extract(epoch FROM clock_timestamp())")
#: Which table of parked jobs a connection sees, by its number and by the name that it got when it was made.
_IDENTITY = (
    "SELECT CAST(to_regclass('ojs_parked') AS oid), obj_description(to_regclass('ojs_parked'), 'pg_class')"
)
_ENCODING = sa.text("SELECT current_setting('server_encoding')")
#: The encoding that has every letter.
_WHOLE = "UTF8"
_FAILURES = (SQLAlchemyError, OSError, MemoryError, UnicodeError, OverflowError)
_SAY_VERSION = Upsert(versions)


class _Lock:
    """An RLock of this process. No thread waits for it longer than `seconds`; then it raises StoreError.

    An interrupt that strikes meanwhile, such as a time limit, leaves it free.
    """

    def __init__(self, lock: Any, seconds: float, shown: str) -> None:
        self._lock, self._seconds, self._shown = lock, seconds, shown

    def __enter__(self) -> None:
        try:
            if not self._lock.acquire(timeout=self._seconds):
                why = f"other threads of this process have kept it busy for {self._seconds:g} s"
                raise StoreError(f"the store {self._shown!r} failed: {why}")
        except BaseException:
            with suppress(RuntimeError):  # it is not this thread's
                self._lock.release()
            raise

    @property
    def __exit__(self) -> Callable[..., None]:  # noqa: PLE0302
        # Not a method of Python's own: an interrupt could strike as it begins.
        exit_: Callable[..., None] = self._lock.__exit__
        return exit_


class _File:
    """The file of two engines, and its write-ahead log.

    Either may be deleted or replaced while connections to the old one still work.
    """

    def __init__(self, *engines: sa.Engine) -> None:
        # The driver finds the file in the working directory of this moment.
        path: str = engines[0].dialect.create_connect_args(engines[0].url)[0][0]
        self._path = "" if path.startswith("file:") else path
        self._log_path = f"{self._path}-wal"
        self.identity: tuple[int, int] | None = None
        #: The log that the open connections write to. The last connection to a file deletes its log.
        self._log: tuple[int, int] | None = None
        self._open = 0
        for engine in engines:
            # An event of the engine itself, such as its disposal, would slow each statement by a tenth.
            sa.event.listen(engine, "connect", self._connected)
            sa.event.listen(engine, "close", self._closed)

    def opened(self) -> None:
        """Remember the file that is there now."""
        self.identity = _identity_of(self._path) if self._path else None

    def missing(self) -> str:
        """Return which of the opened files is gone, or has another in its place; "" for none of them."""
        if self.identity is not None and _identity_of(self._path) != self.identity:
            return "file"
        if self._log is not None and _identity_of(self._log_path) != self._log:
            return "write-ahead log (-wal)"
        return ""

    def forget(self) -> None:
        """Forget the connections: they are closed, or another process's."""
        self._open, self._log = 0, None

    def _connected(self, connection: Any, _record: object) -> None:
        if self._path and self._log is None:
            # SQLite makes the log when a connection first reads.
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
            log = _identity_of(self._log_path)
            self._log = None if log == _GONE else log
        self._open += 1

    def _closed(self, _connection: object, _record: object) -> None:
        self._open -= 1
        if self._open <= 0:
            self.forget()


_GONE = (0, 0)


def _identity_of(path: str) -> tuple[int, int]:
    try:
        # Every use of the store calls this, and a Path takes longer.
        status = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return _GONE
    return status.st_dev, status.st_ino


class Database:
    """The connections of this process to a store. The first use creates the tables and says their version.

    The parts of a store share one, and keep their rows under its `namespace`.
    """

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        self.namespace = namespace
        self.shown, self._url = without_password(url), url
        self._quick = engines.quick(url, patience)
        self._durable = engines.durable(self._quick, patience)
        self.is_postgres = self._durable.dialect.name == "postgresql"
        self._by_libpq = self._quick.dialect.driver == "psycopg"
        self._busy_seconds = engines.busy_seconds(patience)
        self._bounds = {"seconds": f"{math.ceil(patience * 1000)}ms"}
        self._driver = self._quick.dialect.loaded_dbapi
        self._failures = (*_FAILURES, self._driver.Error)
        #: The statements that the driver runs by itself, and the order of their values.
        self._written: dict[tuple[Upsert, bool], tuple[str, Sequence[str]]] = {}
        self._in_use: AbstractContextManager[None] = nullcontext()
        if not self.is_postgres:
            self._in_use = _Lock(engines.in_use, self._busy_seconds, self.shown)
        self._file = None if self.is_postgres else _File(self._durable, self._quick)
        self._pid = os.getpid()
        self._prepared = False
        self._encoding = ""
        self._identity: Sequence[Any] = ()
        self._preparing = _Lock(threading.RLock(), self._busy_seconds, self.shown)

    def prepare(self) -> None:
        """Create the tables that are not there, once; raises StoreError for a store of a newer version."""
        self._be_ours()
        if self._prepared:
            return
        with self._preparing:
            if not self._prepared:
                if self._version() != SCHEMA_VERSION:
                    self._create_tables()
                self._say_encoding()
                if self._file:
                    with self._errors():
                        self._file.opened()
                self._prepared = True

    def schema(self) -> int | None:
        """Return the version of the tables."""
        self._be_ours()
        return self._version()

    def clock(self) -> datetime:
        """Return the server's time; for SQLite this machine's."""
        if not self.is_postgres:
            return datetime.now(timezone.utc)
        with self.connection() as connection:
            seconds = float(connection.execute(_POSTGRES_CLOCK).scalar_one())
        return datetime.fromtimestamp(seconds, timezone.utc)

    def is_that_of(self, ask: Callable[[str], Sequence[Any]]) -> bool:
        """Return whether another connection, which asks a question, sees the tables of this store."""
        if self._file is not None:
            path = ask("PRAGMA database_list")[2]
            return bool(path) and _identity_of(path) == self._file.identity
        seen = tuple(ask(_IDENTITY))
        if seen != self._identity:
            with self.connection() as connection:
                self._identity = tuple(connection.exec_driver_sql(_IDENTITY).one())
        return seen == self._identity

    def close(self) -> None:
        """Close the connections of this process."""
        self._dispose(close=self._pid == os.getpid())

    @contextmanager
    def connection(self, *, durable: bool = False) -> Iterator[Connection]:
        """Connect for statements that take effect one by one, in one round trip each; raises StoreError.

        On SQLite a loss of power may undo the last of them. It ends all workers of that file, too. `durable`
        statements take effect together, and their effect outlasts a loss of power.
        """
        with self._opened(), (self._durable if durable else self._quick).begin() as connection:
            if durable and self.is_postgres:
                connection.execute(engines.BOUND, self._bounds)
            yield connection

    def write(self, upsert: Upsert, *rows: Mapping[str, Any]) -> bool:
        """Write rows of different keys, which take effect at once; return whether all of them were written.

        The driver does it alone: with SQLAlchemy a statement takes several times as long. Raises StoreError.
        """
        in_one = self.is_postgres and len(rows) > 1
        known = self._written.get((upsert, in_one))
        if known is None:
            dialect = self._quick.dialect
            insert = upsert.from_json if in_one else upsert.statements[dialect.name]
            compiled: Any = insert.compile(dialect=dialect)
            known = self._written[upsert, in_one] = str(compiled), compiled.positiontup or ()
        statement, order = known
        # An escaped letter would need a database in UTF-8.
        given = ({"rows": json.dumps(rows, ensure_ascii=False)},) if in_one else rows
        with self._opened():
            # SQLAlchemy is not told what happens to the connection.
            pooled = self._quick.raw_connection()
            try:
                connection: Any = pooled.driver_connection
                written: int | None = connection.write(statement, given[0]) if self._by_libpq else None
                if written is None:
                    cursor, written = pooled.cursor(), 0
                    for row in given:
                        cursor.execute(statement, [row[name] for name in order] if order else row)
                        written += cursor.rowcount
                    if not self.is_postgres:
                        pooled.commit()
                return written == len(rows)
            except BaseException as error:
                if not isinstance(error, self._driver.Error):
                    pooled.invalidate(error)
                elif self._quick.dialect.is_disconnect(error, pooled, None):
                    pooled.invalidate(error)
                    # The others are as old.
                    self._quick.dispose()
                raise
            finally:
                pooled.close()

    def change(self, statement: sa.Update | sa.Delete) -> int:
        """Run a statement on the rows of the namespace; return how many it has changed."""
        ours = statement.table.c.namespace == self.namespace
        with self.connection() as connection:
            return connection.execute(statement.where(ours)).rowcount

    def change_each(
        self, statement: sa.Update | sa.Delete, column: sa.Column[Any], values: Sequence[object]
    ) -> int:
        """Run a statement on the rows with these values, some of them at a time."""
        ours, changed = statement.table.c.namespace == self.namespace, 0
        for batch in batches(values):
            with self.connection() as connection:
                changed += connection.execute(statement.where(ours, column.in_(batch))).rowcount
        return changed

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Use the store; raises StoreError."""
        if not self._prepared or self._pid != os.getpid():
            self.prepare()
        try:
            with self._in_use:
                try:
                    yield
                finally:
                    # What was read from a deleted file, or written to it, does not count.
                    missing = self._file.missing() if self._file else ""
                    if missing:
                        self._open_anew(missing)
        except self._failures as error:
            raise self._failed(error) from error

    def _open_anew(self, missing: str) -> NoReturn:
        self._prepared = False
        self._dispose(close=True)
        what = f"the store {self.shown!r} failed: its {missing} was deleted or replaced, with all it held"
        logger.error("%s; it is opened anew", what)
        raise StoreError(what)

    def _be_ours(self) -> None:
        if self._pid != os.getpid():
            # A forked child must neither use nor close its parent's connections.
            self._dispose(close=False)
            self._pid = os.getpid()
            self._preparing = _Lock(threading.RLock(), self._busy_seconds, self.shown)

    def _dispose(self, *, close: bool) -> None:
        self._quick.dispose(close=close)
        self._durable.dispose(close=close)
        if self._file:
            self._file.forget()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except self._failures as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> StoreError:
        cause = getattr(error, "orig", None) or error
        why = without_password(self._url, " ".join(str(cause).split())) or type(cause).__name__
        # The codes of class 54 say that a limit of PostgreSQL is exceeded, as by a row of an index.
        too_much = str(getattr(cause, "sqlstate", "")).startswith("54")
        if too_much or isinstance(cause, (self._driver.DataError, UnicodeError, OverflowError)):
            return Unstorable(f"the store {self.shown!r} cannot keep this: {why}")
        # The tables may be gone.
        self._prepared = False
        return StoreError(f"the store {self.shown!r} failed: {why}")

    @contextmanager
    def _unprepared(self) -> Iterator[Connection]:
        with self._errors(), self._in_use, self._durable.begin() as connection:
            yield connection

    def _version(self) -> int | None:
        """Return the version, or None where a table is missing; raises StoreError for a newer one."""
        with self._unprepared() as connection:
            has_table = sa.inspect(connection).has_table
            if not has_table(versions.name):
                return None
            whole = all(map(has_table, metadata.tables))
            version: int | None = connection.execute(sa.select(sa.func.max(versions.c.version))).scalar()
        if version is not None and version > SCHEMA_VERSION:
            raise StoreError(
                f"the store has schema {version}, this ojs-bridge reads {SCHEMA_VERSION}: update it"
            )
        return version if whole else None

    def _say_encoding(self) -> None:
        """Say once if the database lacks letters that a job's id, type or queue may have."""
        if self._encoding or not self.is_postgres:
            return
        with self._unprepared() as connection:
            self._encoding = str(connection.execute(_ENCODING).scalar_one())
        if self._encoding != _WHOLE:
            logger.warning(
                "the database of the store %r has the encoding %s: a job whose id, type or queue it cannot "
                "hold is a dead letter of its broker; a database of the encoding %s holds all of them",
                *(self.shown, self._encoding, _WHOLE),
            )

    def _create_tables(self) -> None:
        for tries_left in reversed(range(len(metadata.tables) + 1)):
            try:
                with self._unprepared() as connection:
                    tables.create(connection)
                    _SAY_VERSION(connection, {"version": SCHEMA_VERSION})
            except StoreError:
                # Another process may create a table between the check and the creation.
                if not tries_left:
                    raise
            else:
                return
