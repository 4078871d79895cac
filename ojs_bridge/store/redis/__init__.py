"""The Redis store, for Redis 6.2 and newer and for Valkey."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

from .documents import RedisDocuments
from .groups import RedisGroups
from .namespace import RedisNamespace
from .parked import RedisParked
from .rates import RedisRates
from .reservations import RedisReservations


class RedisStore(RedisGroups, RedisParked, RedisReservations, RedisDocuments, RedisRates):
    """All that is kept, in one namespace of a Redis."""

    def __init__(self, url: str, namespace: str, *, patience: float) -> None:
        redis = RedisNamespace(url, namespace, patience)
        RedisGroups.__init__(self, redis)
        RedisParked.__init__(self, redis)
        RedisReservations.__init__(self, redis)
        RedisDocuments.__init__(self, redis)
        RedisRates.__init__(self, redis)

    def prepare(self) -> None:
        """Write the version of the keys; raises StoreError when a newer version wrote them."""
        self._redis.prepare()

    def schema(self) -> int:
        """Return the version of the keys, and write it before their first use."""
        return self._redis.schema()

    def clock(self) -> datetime:
        """Return the server's time."""
        seconds, microseconds = self._redis.ask("TIME")
        return datetime.fromtimestamp(int(seconds), timezone.utc) + timedelta(microseconds=int(microseconds))

    def close(self) -> None:
        """Close the connections of this process."""
        self._redis.close()
