"""The store of dead letters, parked retries and reservations: one protocol, SQL and Redis behind it."""

from .opening import open_store
from .parked import Due, Parked, ParkedFilter, ParkedPage
from .protocol import Claim, Claimed, Letter, LetterFilter, Page, Stats, Store
from .reservations import Grant, Reservation, ReserveAnswer, Settle
from .shadows import Tally

__all__ = [
    "Claim",
    "Claimed",
    "Due",
    "Grant",
    "Letter",
    "LetterFilter",
    "Page",
    "Parked",
    "ParkedFilter",
    "ParkedPage",
    "Reservation",
    "ReserveAnswer",
    "Settle",
    "Stats",
    "Store",
    "Tally",
    "open_store",
]
