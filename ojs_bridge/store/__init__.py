"""Where dead letters live: one protocol, SQL behind it."""

from .protocol import Claim, Letter, LetterFilter, Page, Stats, Store, StoreError, open_store

__all__ = ["Claim", "Letter", "LetterFilter", "Page", "Stats", "Store", "StoreError", "open_store"]
