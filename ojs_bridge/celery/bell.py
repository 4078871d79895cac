"""A free worker on Redis hears of a message in any of its queues, though it waits at none of them."""

from __future__ import annotations

from typing import Any

from . import compat

#: Seconds in which Redis rings a bell that is tried.
_RING_SECONDS = 1.0


class Bell:
    """Rings when a list changes that a channel has found empty, by what Redis calls client tracking.

    Redis tells a second connection when a key changes that the channel's own connection has asked to be told
    of. Kombu's poller takes the bell for a channel with that second connection.
    """

    def __init__(self, channel: Any) -> None:
        from redis import Redis

        # Its own object, or redis-py would give the connection back to the pool.
        self._client = Redis(connection_pool=channel.pool, single_connection_client=True)
        self.connection = compat.client_connection(self._client)
        self._number = self._client.client_id()
        self._cycle = channel.connection.cycle
        self.qos, self.handlers = self, {"BELL": self.hear}
        #: Whether it rings for the channel's connection, which may be another one later.
        self.is_set = False
        self.rang = False
        self._say(self.connection, "SUBSCRIBE", "__redis__:invalidate")
        compat.register(self._cycle)(self, self, "BELL")

    def set(self, connection: Any, key: str) -> bool:
        """Let it ring for a connection; return whether it rings when a key is tried."""
        self._say(connection, "CLIENT", "TRACKING", "ON", "REDIRECT", self._number, "OPTIN")
        self._say(connection, "CLIENT", "CACHING", "YES")
        self._say(connection, "EVAL", "return redis.call('LINDEX', KEYS[1], -1)", 1, key)
        self._say(connection, "RPUSH", key, "")
        self._say(connection, "DEL", key)
        self.is_set = self.connection.can_read(timeout=_RING_SECONDS)
        return self.is_set

    def _say(self, connection: Any, *words: object) -> None:
        compat.send_command(connection)(*words)
        connection.read_response(push_request=True)

    def can_consume(self) -> bool:
        """Return True: kombu's poller asks before it lets a channel read."""
        return True

    def hear(self, *_: str) -> None:
        """Read all that Redis has told; kombu's poller calls it."""
        self.rang = True
        while self.connection.can_read(timeout=0):
            self.connection.read_response(push_request=True)

    def close(self) -> None:
        """Ring no more."""
        compat.unregister(self._cycle)(self, self, "BELL")
        owners = compat.fd_to_chan(self._cycle)
        for descriptor in [fd for fd, (owner, _) in owners.items() if owner is self]:
            del owners[descriptor]
        self.connection.disconnect()
