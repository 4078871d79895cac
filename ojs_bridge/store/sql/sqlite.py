"""The needs of SQLite alone: a file to share, and no connection open across a fork."""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from typing import Any, Literal
from weakref import WeakSet

import sqlalchemy as sa

#: How long the file may be busy at least before that is an error, in seconds.
BUSY_SECONDS = 5.0

#: Held while a connection is in use. A child that is forked meanwhile would inherit SQLite's note that the
#: file is locked, and wait for ever for a thread that it does not have.
in_use = threading.RLock()
_engines: WeakSet[sa.Engine] = WeakSet()


def share(engine: sa.Engine, *, synchronous: Literal["FULL", "NORMAL"], patience: float) -> None:
    """Have many processes read and write the engine's file, those it is forked into included.

    What is written with NORMAL waits for no disk: it outlasts every crash but one of the whole machine.
    Others may write for twice the patience.
    """
    busy = max(2 * patience, BUSY_SECONDS)

    def share_file(connection: Any, _record: object) -> None:
        connection.execute(f"PRAGMA busy_timeout={math.ceil(busy * 1000)}")
        _write_ahead(connection, busy)
        connection.execute(f"PRAGMA synchronous={synchronous}")

    sa.event.listen(engine, "connect", share_file)
    _engines.add(engine)


class File:
    """The file of an engine, which may be deleted or replaced: connections to the old one still work."""

    def __init__(self, engine: sa.Engine) -> None:
        # As the driver itself finds it, which knows the working directory of this moment.
        path: str = engine.dialect.create_connect_args(engine.url)[0][0]
        self._path = None if path.startswith("file:") else path
        self._identity: tuple[int, int] | None = None

    def opened(self) -> None:
        """Take note of the file that is there now."""
        self._identity = self._found()

    def is_another(self) -> bool:
        """Return whether the file is not there any more that was opened."""
        return self._identity is not None and self._found() != self._identity

    def _found(self) -> tuple[int, int] | None:
        if self._path is None:
            return None
        try:
            # Every use of the store comes by here: a Path takes longer.
            found = os.stat(self._path)  # noqa: PTH116
        except FileNotFoundError:
            return (0, 0)
        return found.st_dev, found.st_ino


def _write_ahead(connection: Any, seconds: float) -> None:
    """Switch to a write-ahead log; SQLite itself does not wait for another process that does so now."""
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
