"""The SQL store, through SQLAlchemy Core: SQLite and PostgreSQL."""

from __future__ import annotations

from ..protocol import StoreOfParts
from .database import Database, MemoryDatabase
from .documents import SQLDocuments, SQLRates
from .groups import SQLGroups
from .jobs import SQLParked, SQLReservations
from .letters import SQLLetters

__all__ = ["Database", "MemoryDatabase", "SQLStore"]


class SQLStore(StoreOfParts):
    """All that is kept, in one SQL database, which the parts share."""

    def __init__(self, database: Database) -> None:
        self.database, self.is_in_memory = database, database.is_in_memory
        self.is_on_one_host = not (database.is_postgres or database.is_in_memory)
        letters, parked = SQLLetters(database), SQLParked(database)
        groups, reservations = SQLGroups(database, letters), SQLReservations(database)
        documents, rates = SQLDocuments(database), SQLRates(database)
        super().__init__(database, letters, groups, parked, reservations, documents, rates)
        if not self.is_in_memory:
            #: Settles many successes in one step.
            self.settle_all = reservations.settle_all
