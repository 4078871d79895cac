"""The SQL store, through SQLAlchemy Core: SQLite and PostgreSQL."""

from __future__ import annotations

import os
import sqlite3
from typing import Any
from uuid import uuid4

from ...errors import StoreError
from ..jobs import Transaction
from ..protocol import MEMORY, Store
from . import transactions
from .database import Database
from .documents import SQLDocuments
from .jobs import SQLParkedJobs
from .letters import SQLLetters
from .reservations import SQLReservedRuns

__all__ = ["MemoryStore", "SQLStore"]


class SQLStore(Database, Store):
    """All that is kept in one SQL database, whose connections its parts share."""

    backend = "sql"
    is_in_memory = False

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        super().__init__(url, namespace, patience=patience)
        self.is_on_one_host = not self.is_postgres
        self.letters = SQLLetters(self)
        self.parked = SQLParkedJobs(self)
        self.reservations = SQLReservedRuns(self)
        self.documents = SQLDocuments(self)

    def join(self, connection: Any) -> Transaction:
        """Return the open transaction of a user's connection."""
        return transactions.join(self, connection)

    def joined(self) -> Transaction | None:
        """Return the transaction of Django's on this database that this thread is in, or None."""
        return transactions.joined(self)


class MemoryStore(SQLStore):
    """SQLite in the memory of this process, for tests; empty at first, and no other process has it."""

    is_in_memory = True

    def __init__(self, namespace: str, *, patience: float) -> None:
        file = f"file:ojs-{uuid4().hex}?mode=memory&cache=shared"
        # SQLite forgets the database with its last connection, and a fork closes all those of the engines.
        self._kept = sqlite3.connect(file, uri=True, check_same_thread=False)
        super().__init__(f"sqlite:///{file}&uri=true&check_same_thread=false", namespace, patience=patience)
        self.shown, self.is_on_one_host = MEMORY, False

    def close(self) -> None:
        """Close the connections of this process; then the store is empty."""
        super().close()
        self._kept.close()

    def _be_ours(self) -> None:
        if self._pid != os.getpid():
            raise StoreError(
                f"the store {MEMORY!r} is in the memory of process {self._pid}, and this is process "
                f"{os.getpid()}: processes share a store such as sqlite:///ojs.db"
            )
