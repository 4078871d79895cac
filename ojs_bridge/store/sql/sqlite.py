"""What SQLite needs that other databases do not: a file to share, and no connection open across a fork."""

from __future__ import annotations

import os
import threading
from typing import Any, Literal
from weakref import WeakSet

import sqlalchemy as sa

#: Held while a connection is in use. A child that is forked meanwhile would inherit SQLite's note that the
#: file is locked, and wait for ever for a thread that it does not have.
in_use = threading.RLock()
_engines: WeakSet[sa.Engine] = WeakSet()


def share(engine: sa.Engine, *, synchronous: Literal["FULL", "NORMAL"]) -> None:
    """Have many processes read and write the engine's file, those it is forked into included.

    What is written with NORMAL waits for no disk: it outlasts every crash but one of the whole machine.
    """

    def share_file(connection: Any, _record: object) -> None:
        connection.execute("PRAGMA busy_timeout=30000")
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")

    sa.event.listen(engine, "connect", share_file)
    _engines.add(engine)


def _before_fork() -> None:
    in_use.acquire()
    for engine in tuple(_engines):
        engine.dispose()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=in_use.release, after_in_child=in_use.release)
