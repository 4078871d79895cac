"""Settling a turn in one step with what a broker on the same server does about its message."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import StoreError
from ..reservations import Settle
from .namespace import RedisNamespace
from .reservations import SETTLE, settle_words
from .server import Script, Word

#: KEYS: turn, then the companion's. ARGV: fence or '' to try the companion alone, holder, keep_until, then
#: the companion's. Repeated, it finds the message gone.
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
    """Settles turns along with a companion: Lua that takes `keys` and `words` and first writes something.

    It returns 1 when it has deleted the turn's message, and 0 when that was not there.
    """

    def __init__(self, redis: RedisNamespace, companion: str, database: int) -> None:
        there, back = "", ""
        if database != redis.database:
            there, back = (f"redis.call('SELECT', {n})" for n in (database, redis.database))
        self._redis = redis
        self._script = Script(_JOINT % (companion, there, back))

    def settle(self, settle: Settle, keys: Sequence[bytes], words: Sequence[Word]) -> tuple[bool, bool]:
        """Settle a turn and do what the companion does; return whether each was done; raises StoreError."""
        turn = self._redis.turn(settle.turn)
        done = self._redis.run(self._script, (turn, *keys), (*settle_words(settle), *words))
        return bool(done & 1), bool(done & 2)

    def works(self, keys: Sequence[bytes], words: Sequence[Word]) -> bool:
        """Return whether the server lets the store do what the companion does, which it does here."""
        try:
            return bool(
                self._redis.run(self._script, (self._redis.key("schema"), *keys), ("", "", "", *words))
            )
        except StoreError:
            return False
