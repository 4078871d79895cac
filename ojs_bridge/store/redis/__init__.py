"""The Redis store, for Redis 6.2 and newer and for Valkey."""

from __future__ import annotations

from ..protocol import StoreOfParts
from .documents import RedisDocuments
from .jobs import RedisParkedJobs, RedisReservedRuns
from .letters import RedisLetters
from .server import RedisServer

__all__ = ["RedisServer", "RedisStore"]


class RedisStore(StoreOfParts):
    """All that is kept, in a namespace of one Redis, which the parts share."""

    is_in_memory = is_on_one_host = False

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        parts = RedisLetters(server), RedisParkedJobs(server), RedisReservedRuns(server)
        super().__init__(server, *parts, RedisDocuments(server))
