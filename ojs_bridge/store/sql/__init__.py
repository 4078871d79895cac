"""The SQL store, through SQLAlchemy Core: SQLite and PostgreSQL."""

from __future__ import annotations

from .database import Database, MemoryDatabase
from .documents import SQLDocuments
from .groups import SQLGroups
from .letters import SQLLetters
from .parked import SQLParked
from .rates import SQLRates
from .reservations import SQLReservations
from .texts import SQLTexts

__all__ = ["Database", "MemoryDatabase", "SQLStore"]


class SQLStore:
    """All that is kept, in one SQL database: its methods are those of its parts, which share the database."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self.is_in_memory = database.is_in_memory
        self.prepare, self.schema = database.prepare, database.schema
        self.clock, self.close = database.clock, database.close

        reservations = SQLReservations(database)
        self.reserve, self.extend = reservations.reserve, reservations.extend
        self.settle, self.release = reservations.settle, reservations.release
        self.expire, self.expire_before = reservations.expire, reservations.expire_before

        texts = SQLTexts(database)
        self.index_texts = texts.index_texts
        letters = SQLLetters(database, texts)
        self.bury, self.bury_all = letters.bury, letters.bury_all
        self.keep_errors, self.kept_errors = letters.keep_errors, letters.kept_errors
        self.forget_errors = letters.forget_errors
        self.list, self.cursor_after, self.count = letters.list, letters.cursor_after, letters.count
        self.get, self.letters_beginning = letters.get, letters.letters_beginning
        self.claim, self.unclaim = letters.claim, letters.unclaim
        self.delete, self.prune, self.stats = letters.delete, letters.prune, letters.stats
        groups = SQLGroups(database, letters)
        self.groups, self.group_sizes = groups.groups, groups.group_sizes
        self.group_older, self.forget_groups = groups.group_older, groups.forget_groups

        parked = SQLParked(database)
        self.park, self.unpark = parked.park, parked.unpark
        self.claim_due, self.claim_parked = parked.claim_due, parked.claim_parked
        self.unclaim_parked, self.list_parked = parked.unclaim_parked, parked.list_parked
        self.get_parked, self.parked_beginning = parked.get_parked, parked.parked_beginning
        self.reschedule, self.cancel_parked = parked.reschedule, parked.cancel_parked
        self.count_parked = parked.count_parked

        documents = SQLDocuments(database)
        self.write_document, self.get_document = documents.write_document, documents.get_document
        self.list_documents, self.count_documents = documents.list_documents, documents.count_documents
        self.forget_documents = documents.forget_documents

        rates = SQLRates(database)
        self.record_rates, self.rates = rates.record_rates, rates.rates
        self.forget_rates = rates.forget_rates
