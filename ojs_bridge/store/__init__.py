"""The store of dead letters, parked retries and reservations: one protocol, SQL and Redis behind it."""

from .documents import Document, DocumentPage
from .opening import PATIENCE_SECONDS, open_store
from .parked import ALL_PARKED, Due, Parked, ParkedFilter, ParkedPage
from .protocol import (
    MEMORY,
    Claim,
    Claimed,
    Group,
    Letter,
    LetterFilter,
    Order,
    Page,
    Stats,
    Store,
    without_password,
)
from .rates import BOUNDS, SECONDS, Rate, Span
from .records import from_ms, index_text, letter_from_json, letter_to_json, matches, to_ms
from .reservations import Grant, Reservation, ReserveAnswer, Settle

__all__ = [
    "ALL_PARKED",
    "BOUNDS",
    "MEMORY",
    "PATIENCE_SECONDS",
    "SECONDS",
    "Claim",
    "Claimed",
    "Document",
    "DocumentPage",
    "Due",
    "Grant",
    "Group",
    "Letter",
    "LetterFilter",
    "Order",
    "Page",
    "Parked",
    "ParkedFilter",
    "ParkedPage",
    "Rate",
    "Reservation",
    "ReserveAnswer",
    "Settle",
    "Span",
    "Stats",
    "Store",
    "from_ms",
    "index_text",
    "letter_from_json",
    "letter_to_json",
    "matches",
    "open_store",
    "to_ms",
    "without_password",
]
