"""Where dead letters live: one protocol, SQL behind it."""

from .opening import open_store
from .protocol import Claim, Letter, LetterFilter, Page, Stats, Store, StoreError

__all__ = ["Claim", "Letter", "LetterFilter", "Page", "Stats", "Store", "StoreError", "open_store"]
