"""How many jobs are in each state that the store knows of."""

from __future__ import annotations

from ..store import LetterFilter, ParkedFilter, Store
from .letters import needed


def counts_of(store: Store | None, queue: str | None) -> dict[str, int]:
    """Return the number of jobs by state; raises ConfigurationError without a store, and StoreError."""
    known = needed(store, "counts by state")
    return {
        "retryable": known.count_parked(ParkedFilter(queue)),
        "discarded": known.count(LetterFilter(queue)),
    }
