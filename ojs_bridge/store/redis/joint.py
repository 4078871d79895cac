"""Settling a turn in one step with what a broker on the same server does about its message."""

from __future__ import annotations

from collections.abc import Sequence

from ..protocol import StoreError
from ..reservations import Settle
from .namespace import RedisNamespace
from .reservations import SETTLE, settle_words
from .server import Script, Word

#: KEYS: turn, then the companion's. ARGV: fence or '' to try the companion alone, holder, keep_until, then
#: the companion's. Repeated, it finds the message gone, and remembers the turn where it might have
#: forgotten it.
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
if gone == 1 and ARGV[1] == '0' then
  local known = redis.call('GET', KEYS[1])
  if known then
    local its_fence, its_until, its_holder = cmsgpack.unpack(known)
    if its_fence == 0 and its_until >= 0 and its_holder == ARGV[2] then
      redis.call('DEL', KEYS[1])
      return 1
    end
  end
end
return settle(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
"""
)


class Joint:
    """Settles turns along with a companion: Lua that takes `keys` and `words` and first writes something.

    It returns 1 when it has deleted the only message of the turn, which is then forgotten if it was a job's
    first; no copy of it can come.
    """

    def __init__(self, redis: RedisNamespace, companion: str, database: int) -> None:
        there, back = "", ""
        if database != redis.database:
            there, back = (f"redis.call('SELECT', {n})" for n in (database, redis.database))
        self._redis = redis
        self._script = Script(_JOINT % (companion, there, back))

    def settle(self, settle: Settle, keys: Sequence[bytes], words: Sequence[Word]) -> bool:
        """Settle a turn as its store does, and do what the companion does; raises StoreError."""
        turn = self._redis.turn(settle.turn)
        return bool(self._redis.run(self._script, (turn, *keys), (*settle_words(settle), *words)))

    def works(self, keys: Sequence[bytes], words: Sequence[Word]) -> bool:
        """Return whether the server lets the store do what the companion does, which it does here."""
        try:
            return bool(
                self._redis.run(self._script, (self._redis.key("schema"), *keys), ("", "", "", *words))
            )
        except StoreError:
            return False
