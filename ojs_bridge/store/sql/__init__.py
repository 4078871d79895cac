"""The SQL store, through SQLAlchemy Core: SQLite, PostgreSQL, MySQL."""

from __future__ import annotations

from .letters import Letters
from .parked import ParkedRetries
from .reservations import Reservations
from .shadows import Shadows

__all__ = ["SQLStore"]


class SQLStore(Letters, ParkedRetries, Reservations, Shadows):
    """Dead letters, parked retries, reservations and shadows in one SQL database."""
