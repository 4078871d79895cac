"""The engines, and the special needs of each database.

SQLite: processes share a file, and no connection stays open across a fork. PostgreSQL: an answer, or an
error, in time, even on a network that loses packets.
"""

from __future__ import annotations

import logging
import math
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal
from urllib.parse import unquote, urlsplit
from weakref import WeakSet

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, NoSuchModuleError

from ...errors import ConfigurationError
from ..protocol import without_password

logger = logging.getLogger("ojs_bridge")


def quick(url: str, patience: float) -> sa.Engine:
    """Make the engine for single statements, which need no round trips for a transaction.

    A question waits for its answer for `patience` seconds. Raises ConfigurationError.
    """
    shown = without_password(url)
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"store: {shown!r} is not a database URL") from None
    is_postgres = parsed.get_backend_name() == "postgresql"
    try:
        # Parameters are the arguments of jobs, which belong in no log.
        options = _postgres_options(parsed, patience) if is_postgres else _SQLITE_OPTIONS
        engine = sa.create_engine(parsed, hide_parameters=True, **options)
    except ImportError as error:
        how = "pip install 'ojs-bridge[postgresql]'" if "psycopg" in str(error) else error
        raise ConfigurationError(f"store: the driver of {shown!r} is not installed: {how}") from None
    except (ArgumentError, TypeError, ValueError) as error:
        why = (
            f"no driver has the name {parsed.drivername!r}"
            if isinstance(error, NoSuchModuleError)
            else without_password(url, str(error))
        )
        raise ConfigurationError(f"store: {shown!r} is not a store that ojs-bridge knows: {why}") from None
    if is_postgres:
        _test_rested(engine)
        if engine.dialect.driver == "psycopg":
            _answer_in_time(engine, patience)
    elif parsed.database and ":memory:" not in parsed.database:
        _share_file(engine, synchronous="NORMAL", patience=patience)
    else:
        why = "would be gone with the process: name a file, as in sqlite:///ojs.db"
        raise ConfigurationError(f"store: {shown!r} {why}")
    return engine


def durable(quick: sa.Engine, patience: float) -> sa.Engine:
    """Make the engine for transactions. Except on SQLite it has the same connections."""
    if quick.dialect.name == "postgresql":
        return quick.execution_options(isolation_level="READ COMMITTED")
    engine = sa.create_engine(quick.url, hide_parameters=True, **_SQLITE_OPTIONS)
    _share_file(engine, synchronous="FULL", patience=patience)
    return engine


#: SQLAlchemy chooses another pool for a database in memory.
_SQLITE_OPTIONS: dict[str, Any] = {"poolclass": sa.QueuePool}
#: A thread waits for a busy file at least for so many seconds.
_BUSY_SECONDS = 5.0

#: A thread holds this lock while it uses a connection, so that no process forks meanwhile. A child would
#: inherit SQLite's note that the file is locked, and wait for ever for a thread that it does not have.
in_use = threading.RLock()
_engines: WeakSet[sa.Engine] = WeakSet()


def _share_file(engine: sa.Engine, *, synchronous: Literal["FULL", "NORMAL"], patience: float) -> None:
    """Let many processes read and write the engine's file, forked children too.

    A write with NORMAL waits for no disk. It outlasts every crash, except one of the whole machine.
    """
    busy = busy_seconds(patience)

    def set_up(connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA busy_timeout={math.ceil(busy * 1000)}")
        _write_ahead(connection, busy)
        connection.execute(f"PRAGMA synchronous={synchronous}")

    sa.event.listen(engine, "connect", set_up)
    sa.event.listen(engine, "do_connect", _make_private)
    _engines.add(engine)


def _make_private(_dialect: object, _record: object, args: Sequence[Any], _options: object) -> None:
    """Make a file that is not there, for its owner alone: it gets the arguments of jobs.

    SQLite gives its log and its index the same rights. A file that is there keeps its own.
    """
    path, _, options = str(args[0]).partition("?")
    if path.startswith("file:"):
        # With a mode, SQLite may not make the file.
        path = "" if "mode=" in options else unquote(urlsplit(path).path)
    with suppress(OSError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))


def busy_seconds(patience: float) -> float:
    """Return how long a thread waits for a file that others write to."""
    return max(2 * patience, _BUSY_SECONDS)


def _write_ahead(connection: Any, seconds: float) -> None:
    """Switch to a write-ahead log; SQLite itself does not wait for a process that does the same now."""
    give_up_at = time.monotonic() + seconds
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > give_up_at:
                raise
            time.sleep(0.01)
        else:
            return


def _before_fork() -> None:
    in_use.acquire()
    for engine in tuple(_engines):
        engine.dispose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=in_use.release, after_in_child=in_use.release)


CONNECT_SECONDS = 5
#: A process has so many connections at most, and keeps them. SQLAlchemy would close those beyond five after
#: each question. The one that was used last is used next, and so need not be tested.
_POOL = {"pool_size": 15, "max_overflow": 0, "pool_use_lifo": True}
#: A connection that has rested for longer is tested before it is used; that of a scheduler, which asks each
#: second, is not.
REST_SECONDS = 1.5
#: With these settings the server holds no lock for a client that it cannot reach any more, and waits for no
#: other client's lock for long. They are for one transaction, because a pool such as PgBouncer gives one
#: session to many clients.
BOUND = sa.text(
    "SELECT set_config('idle_in_transaction_session_timeout', :seconds, true),"
    " set_config('lock_timeout', :seconds, true)"
)


def _postgres_options(url: sa.URL, patience: float) -> dict[str, Any]:
    """Return the options of PostgreSQL's engine, so that no worker waits for minutes for a silent host."""
    seconds = math.ceil(patience)
    waits = {
        # Otherwise the client would write as the database does: in SQL_ASCII it could not read a text.
        "client_encoding": "utf8",
        "connect_timeout": CONNECT_SECONDS,
        "tcp_user_timeout": seconds * 1000,
        "keepalives_idle": seconds,
        "keepalives_interval": 2,
        "keepalives_count": 3,
    }
    given = {name: value for name, value in waits.items() if name not in url.query}
    return {"connect_args": given, "isolation_level": "AUTOCOMMIT", "pool_timeout": patience, **_POOL}


def _test_rested(engine: sa.Engine) -> None:
    """Replace connections that the server has closed; a connection in steady use is not tested."""
    dialect = engine.dialect

    def note(_connection: Any, record: Any) -> None:
        record.info["rests_since"] = time.monotonic()

    def ask(connection: Any, record: Any, _proxy: object) -> None:
        if time.monotonic() - record.info.get("rests_since", time.monotonic()) < REST_SECONDS:
            return
        try:
            dialect.do_ping(connection)
        except dialect.loaded_dbapi.Error as error:
            raise InvalidatePoolError from error

    sa.event.listen(engine, "checkin", note)
    sa.event.listen(engine, "checkout", ask)


def _answer_in_time(engine: sa.Engine, seconds: float) -> None:
    """Let psycopg wait for an answer for so many seconds at most; by itself it has no limit."""
    from .in_time import InTime

    def connect(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        connection = InTime.connect(*args, **options)
        connection.seconds = seconds
        try:
            _share_no_statement(connection)
        except BaseException:
            connection.close()
            raise
        return connection

    sa.event.listen(engine, "do_connect", connect)


def _share_no_statement(connection: Any) -> None:
    """Let psycopg prepare no statements behind a pool such as PgBouncer.

    There the next question may come to another session. It does not know what this client has prepared, or
    has a statement of another client under the same name. In front of the server itself they halve its work.
    """
    connection.autocommit = True
    (process,) = connection.execute("SELECT pg_backend_pid()").fetchone()
    if process != connection.info.backend_pid:
        connection.prepare_threshold = None
