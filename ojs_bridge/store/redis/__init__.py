"""The Redis store, for Redis 6.2 and newer and for Valkey."""

from __future__ import annotations

from ..protocol import Store
from .documents import RedisDocuments
from .jobs import RedisParkedJobs, RedisReservedRuns
from .letters import RedisLetters
from .server import RedisServer

__all__ = ["RedisStore"]


class RedisStore(RedisServer, Store):
    """All that is kept in a namespace of one Redis, whose connections its parts share."""

    backend = "redis"
    is_in_memory = is_on_one_host = False

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        super().__init__(url, namespace, patience=patience)
        self.letters = RedisLetters(self)
        self.parked = RedisParkedJobs(self)
        self.reservations = RedisReservedRuns(self)
        self.documents = RedisDocuments(self)
