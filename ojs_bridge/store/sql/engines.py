"""From a URL to SQLAlchemy's engines."""

from __future__ import annotations

import math
import time
from typing import Any

import sqlalchemy as sa
from sqlalchemy.exc import ArgumentError, InvalidatePoolError, NoSuchModuleError

from ...errors import ConfigurationError
from ..protocol import without_password
from . import sqlite

CONNECT_SECONDS = 5
#: A connection that has rested for longer is asked whether it still stands before it is used.
REST_SECONDS = 1.0


def quick_engine(url: str, patience: float) -> sa.Engine:
    """Make the engine of single statements, without the round trips of a transaction where they are any.

    `patience` is how many seconds a question waits for its answer. Raises ConfigurationError.
    """
    shown = without_password(url)
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"store: {shown!r} is not a database URL") from None
    engine = _engine(parsed, shown, patience)
    if engine.dialect.name == "sqlite":
        if not parsed.database or ":memory:" in parsed.database:
            raise ConfigurationError(
                f"store: {shown!r} would be gone with the process: name a file, as in sqlite:///ojs.db"
            )
        sqlite.share(engine, synchronous="NORMAL", patience=patience)
    else:
        _ask_the_rested(engine)
    if engine.dialect.driver == "psycopg":
        from .postgres import answer_in_time

        answer_in_time(engine, patience)
    return engine


def durable_engine(quick: sa.Engine, patience: float) -> sa.Engine:
    """Make the engine of transactions, on the same connections except on SQLite."""
    if quick.dialect.name == "postgresql":
        return quick.execution_options(isolation_level="READ COMMITTED")
    if quick.dialect.name == "sqlite":
        durable = sa.create_engine(quick.url, hide_parameters=True)
        sqlite.share(durable, synchronous="FULL", patience=patience)
        return durable
    return quick


def _engine(url: sa.URL, shown: str, patience: float) -> sa.Engine:
    given = {name: value for name, value in _patience(url, patience).items() if name not in url.query}
    try:
        # Parameters are the arguments of jobs, which belong in no log.
        return sa.create_engine(url, hide_parameters=True, connect_args=given, **_isolation(url))
    except ImportError as error:
        raise ConfigurationError(f"store: the driver of {shown!r} is not installed: {error}") from None
    except (ArgumentError, NoSuchModuleError, TypeError, ValueError) as error:
        why = f"no driver has the name {url.drivername!r}" if isinstance(error, NoSuchModuleError) else error
        raise ConfigurationError(f"store: {shown!r} is not a store that ojs-bridge knows: {why}") from None


def _isolation(url: sa.URL) -> dict[str, Any]:
    return {"isolation_level": "AUTOCOMMIT"} if url.get_backend_name() == "postgresql" else {}


def _patience(url: sa.URL, seconds: float) -> dict[str, int]:
    """Return what keeps a worker from waiting minutes for a host that does not answer."""
    connecting, whole = {"connect_timeout": CONNECT_SECONDS}, math.ceil(seconds)
    match url.get_backend_name():
        case "postgresql":
            kernel = {"tcp_user_timeout": whole * 1000, "keepalives_idle": whole, "keepalives_interval": 2}
            return connecting | kernel | {"keepalives_count": 3}
        case "mysql" | "mariadb" if url.get_driver_name() == "pymysql":
            return connecting | {"read_timeout": whole, "write_timeout": whole}
        case "mysql" | "mariadb":
            return connecting
    return {}


def _ask_the_rested(engine: sa.Engine) -> None:
    """Replace connections that the server has closed meanwhile, at no cost to those in steady use."""
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
