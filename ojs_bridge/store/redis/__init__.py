"""The Redis store, for Redis 6.2 and newer and for Valkey."""

from __future__ import annotations

from ..protocol import StoreOfParts
from .documents import RedisDocuments, RedisRates
from .jobs import RedisParked, RedisReservations
from .letters import RedisGroups, RedisLetters
from .server import RedisServer

__all__ = ["RedisServer", "RedisStore"]


class RedisStore(StoreOfParts):
    """All that is kept, in a namespace of one Redis, which the parts share."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        letters, parked = RedisLetters(server), RedisParked(server)
        groups, reservations = RedisGroups(server, letters), RedisReservations(server)
        documents, rates = RedisDocuments(server), RedisRates(server)
        super().__init__(server, letters, groups, parked, reservations, documents, rates)
        #: Settles many successes in one step.
        self.settle_all = reservations.settle_all
