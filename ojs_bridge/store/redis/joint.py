"""Settling a reservation in one step with what a broker on the same server does about its message."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import StoreError
from ..reservations import Settle
from .namespace import RedisNamespace
from .reservations import SETTLE, settle_words
from .server import Script, Word

#: KEYS: reservation, then the companion's. ARGV: fence or '' to try the companion alone, holder, keep_until,
#: then the companion's. Repeated, it finds the message gone.
_JOINT = (
    SETTLE
    + """
local function companion(keys, words)
%s
end
%s
local gone = companion({unpack(KEYS, 2)}, {unpack(ARGV, 4)})
%s
if ARGV[1] == '' then return 1 end
return settle(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) + 2 * gone
"""
)


class Joint:
    """Settles reservations along with a companion: Lua that takes `keys` and `words` and writes first.

    It returns 1 when it has deleted the reservation's message, and 0 when that was not there.
    """

    def __init__(self, redis: RedisNamespace, companion: str, database: int) -> None:
        there, back = "", ""
        if database != redis.database:
            there, back = (f"redis.call('SELECT', {n})" for n in (database, redis.database))
        self._redis = redis
        self._script = Script(_JOINT % (companion, there, back))

    def settle(self, settle: Settle, keys: Sequence[bytes], words: Sequence[Word]) -> tuple[bool, bool]:
        """Settle a reservation, run the companion, and return whether each was done; raises StoreError."""
        reservation = self._redis.reservation_key(settle.reservation)
        done = self._redis.run(self._script, (reservation, *keys), (*settle_words(settle), *words))
        return bool(done & 1), bool(done & 2)

    def works(self, keys: Sequence[bytes], words: Sequence[Word]) -> bool:
        """Return whether the server lets the store do what the companion does, which it does here."""
        try:
            return bool(
                self._redis.run(self._script, (self._redis.key("schema"), *keys), ("", "", "", *words))
            )
        except StoreError:
            return False
