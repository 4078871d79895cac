"""From a URL to SQLAlchemy's engines."""

from __future__ import annotations

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


def quick_engine(url: str) -> sa.Engine:
    """Make the engine of single statements, without the round trips of a transaction where they are any.

    Raises ConfigurationError.
    """
    shown = without_password(url)
    try:
        parsed = sa.make_url(url)
    except (ArgumentError, ValueError):
        raise ConfigurationError(f"store: {shown!r} is not a database URL") from None
    engine = _engine(parsed, shown)
    if engine.dialect.name == "sqlite":
        if not parsed.database or ":memory:" in parsed.database:
            raise ConfigurationError(
                f"store: {shown!r} would be gone with the process: name a file, as in sqlite:///ojs.db"
            )
        sqlite.share(engine, synchronous="NORMAL")
    else:
        _ask_the_rested(engine)
    return engine


def durable_engine(quick: sa.Engine) -> sa.Engine:
    """Make the engine of transactions, on the same connections except on SQLite."""
    if quick.dialect.name == "postgresql":
        return quick.execution_options(isolation_level="READ COMMITTED")
    if quick.dialect.name == "sqlite":
        durable = sa.create_engine(quick.url, hide_parameters=True)
        sqlite.share(durable, synchronous="FULL")
        return durable
    return quick


def _engine(url: sa.URL, shown: str) -> sa.Engine:
    try:
        # Parameters are the arguments of jobs, which belong in no log.
        return sa.create_engine(url, hide_parameters=True, connect_args=_patience(url), **_isolation(url))
    except ImportError as error:
        raise ConfigurationError(f"store: the driver of {shown!r} is not installed: {error}") from None
    except (ArgumentError, NoSuchModuleError, TypeError, ValueError) as error:
        raise ConfigurationError(f"store: {shown!r} is not a store that ojs-bridge knows: {error}") from None


def _isolation(url: sa.URL) -> dict[str, Any]:
    return {"isolation_level": "AUTOCOMMIT"} if url.get_backend_name() == "postgresql" else {}


def _patience(url: sa.URL) -> dict[str, Any]:
    """Return what keeps a worker from waiting minutes for a host that does not answer."""
    networked = url.get_backend_name() in ("postgresql", "mysql")
    return {"connect_timeout": CONNECT_SECONDS} if networked and "connect_timeout" not in url.query else {}


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
