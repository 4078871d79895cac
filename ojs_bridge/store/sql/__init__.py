"""The SQL store, through SQLAlchemy Core: SQLite and PostgreSQL."""

from __future__ import annotations

from .documents import SQLDocuments
from .parked import SQLParked
from .rates import SQLRates
from .reservations import SQLReservations
from .texts import SQLTexts

__all__ = ["SQLStore"]


class SQLStore(SQLTexts, SQLParked, SQLReservations, SQLDocuments, SQLRates):
    """All that is kept, in one SQL database."""
