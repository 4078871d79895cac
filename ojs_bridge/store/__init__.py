"""Where dead letters live: one protocol, SQL behind it."""

from .protocol import Letter, LetterFilter, Page, Stats, Store, StoreError, open_store

__all__ = ["Letter", "LetterFilter", "Page", "Stats", "Store", "StoreError", "open_store"]
