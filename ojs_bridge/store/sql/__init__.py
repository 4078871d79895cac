"""The SQL store, through SQLAlchemy Core: SQLite and PostgreSQL."""

from __future__ import annotations

from ..protocol import StoreOfParts
from .database import Database, MemoryDatabase
from .documents import SQLDocuments
from .jobs import SQLParkedJobs, SQLReservedRuns
from .letters import SQLLetters

__all__ = ["Database", "MemoryDatabase", "SQLStore"]


class SQLStore(StoreOfParts):
    """All that is kept, in one SQL database, which the parts share."""

    def __init__(self, database: Database) -> None:
        self.database, self.is_in_memory = database, database.is_in_memory
        self.is_on_one_host = not (database.is_postgres or database.is_in_memory)
        parts = SQLLetters(database), SQLParkedJobs(database), SQLReservedRuns(database)
        super().__init__(database, *parts, SQLDocuments(database))
