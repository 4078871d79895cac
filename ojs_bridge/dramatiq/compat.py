"""Names of Dramatiq, pika and redis-py that are private or undocumented, and that this adapter needs."""

from __future__ import annotations

from typing import Any


def acks_of(broker: Any, queue_name: str) -> str:
    """Return the key of what this worker has fetched from a queue and not acknowledged."""
    return f"{broker.namespace}:__acks__.{broker.broker_id}.{queue_name}"
