"""The SQL store, through SQLAlchemy Core: SQLite, PostgreSQL, MySQL."""

from __future__ import annotations

from .letters import Letters
from .parked import ParkedRetries
from .reservations import Reservations

__all__ = ["SQLStore"]


class SQLStore(Letters, ParkedRetries, Reservations):
    """Dead letters, parked retries and reservations in one SQL database."""
