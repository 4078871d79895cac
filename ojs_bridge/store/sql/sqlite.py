"""The special needs of SQLite: processes share a file, and no connection stays open across a fork."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from typing import Any, Literal
from weakref import WeakSet

import sqlalchemy as sa

#: SQLAlchemy chooses another pool for a database in memory.
OPTIONS: dict[str, Any] = {"poolclass": sa.QueuePool}
#: A thread waits for a busy file at least for so many seconds.
_BUSY_SECONDS = 5.0

#: A thread holds this lock while it uses a connection, so that no process forks meanwhile. A child would
#: inherit SQLite's note that the file is locked, and wait for ever for a thread that it does not have.
in_use = threading.RLock()
_engines: WeakSet[sa.Engine] = WeakSet()


def share(engine: sa.Engine, *, synchronous: Literal["FULL", "NORMAL"], patience: float) -> None:
    """Let many processes read and write the engine's file, forked children too.

    A write with NORMAL waits for no disk. It outlasts every crash, except one of the whole machine.
    """
    busy = busy_seconds(patience)

    def share_file(connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA busy_timeout={math.ceil(busy * 1000)}")
        _write_ahead(connection, busy)
        connection.execute(f"PRAGMA synchronous={synchronous}")

    sa.event.listen(engine, "connect", share_file)
    _engines.add(engine)


def busy_seconds(patience: float) -> float:
    """Return how long a thread waits for a file that others write to."""
    return max(2 * patience, _BUSY_SECONDS)


_GONE = (0, 0)


class File:
    """The file of two engines, and its write-ahead log.

    Either may be deleted or replaced while connections to the old one still work.
    """

    def __init__(self, *engines: sa.Engine) -> None:
        # The driver finds the file in the working directory of this moment.
        path: str = engines[0].dialect.create_connect_args(engines[0].url)[0][0]
        self._path = "" if path.startswith("file:") else path
        self._identity: tuple[int, int] | None = None
        #: The log that the open connections write to. The last connection to a file deletes its log.
        self._log: tuple[int, int] | None = None
        for engine in engines:
            sa.event.listen(engine, "connect", self._connected)
            sa.event.listen(engine, "engine_disposed", self._disposed)

    def opened(self) -> None:
        """Remember the file that is there now."""
        self._identity = _found(self._path) if self._path else None

    def missing(self) -> str:
        """Return which of the opened files is gone, or has another in its place; "" for none of them."""
        if self._identity is not None and _found(self._path) != self._identity:
            return "file"
        if self._log is not None and _found(f"{self._path}-wal") != self._log:
            return "write-ahead log (-wal)"
        return ""

    def _connected(self, connection: Any, _record: object) -> None:
        if self._path and self._log is None:
            # SQLite makes the log when a connection first reads.
            connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
            found = _found(f"{self._path}-wal")
            self._log = None if found == _GONE else found

    def _disposed(self, _engine: sa.Engine) -> None:
        self._log = None


def _found(path: str) -> tuple[int, int]:
    try:
        # Every use of the store calls this, and a Path takes longer.
        found = os.stat(path)  # noqa: PTH116
    except FileNotFoundError:
        return _GONE
    return found.st_dev, found.st_ino


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
