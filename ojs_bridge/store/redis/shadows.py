"""The tallies of shadow mode in Redis: three hashes, which have the same fields."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from ..records import from_ms, to_ms
from ..shadows import Tally
from .namespace import RedisNamespace
from .server import Script, Word

#: How long a write is known, so that what is repeated after a lost answer is not counted twice.
_KNOWN_MS = 60_000

#: KEYS: counts, told, examples, the write itself. ARGV: how long it is known, then for each tally: field,
#: count, told, how many examples, examples.
_ADD = Script("""
if redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
redis.call('SET', KEYS[4], '1', 'PX', ARGV[1])
for n = 2, #ARGV, 5 do
  local field = ARGV[n]
  redis.call('HINCRBY', KEYS[1], field, ARGV[n + 1])
  redis.call('HSET', KEYS[2], field, ARGV[n + 2])
  local there = redis.call('HGET', KEYS[3], field)
  if not there or tonumber(ARGV[n + 3]) >= tonumber(string.match(there, '^%d+')) then
    redis.call('HSET', KEYS[3], field, ARGV[n + 3] .. ' ' .. ARGV[n + 4])
  end
end
return 0
""")

#: KEYS: counts, told, examples.
_ALL = Script("""
local answer = {}
for n, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  answer[n] = {field, redis.call('HGET', KEYS[1], field), redis.call('HGET', KEYS[2], field),
               redis.call('HGET', KEYS[3], field)}
end
return answer
""")

_CLEAR = Script("""
local count = redis.call('HLEN', KEYS[1])
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
return count
""")


class RedisShadows:
    """The part of a store that holds the tallies of shadow mode."""

    def __init__(self, redis: RedisNamespace) -> None:
        self._redis = redis
        self._shadow_keys = redis.keys("shadow:counts", "shadow:told", "shadow:examples")

    def record_shadows(self, tallies: Sequence[Tally]) -> None:
        """Add to the counts, in one step."""
        keys = [*self._shadow_keys, self._redis.key(f"shadow:write:{uuid4().hex}")]
        words = [word for tally in tallies for word in _words(tally)]
        self._redis.run(_ADD, keys, (_KNOWN_MS, *words))

    def shadows(self) -> list[Tally]:
        """Return all tallies, in the order of framework, task and kind."""
        found = map(_tally, self._redis.run(_ALL, self._shadow_keys))
        return sorted(found, key=lambda tally: (tally.framework, tally.task, tally.kind))

    def clear_shadows(self) -> int:
        """Forget all tallies; return how many there were."""
        return int(self._redis.run(_CLEAR, self._shadow_keys))


def _words(tally: Tally) -> tuple[Word, ...]:
    field = json.dumps([tally.framework, tally.task, tally.kind])
    told = json.dumps([to_ms(tally.last_seen), tally.explanation])
    return field, tally.count, told, len(tally.examples), json.dumps([*map(dict, tally.examples)])


def _tally(row: Sequence[Any]) -> Tally:
    (framework, task, kind), (last_ms, explanation) = json.loads(row[0]), json.loads(row[2])
    examples = tuple(json.loads(row[3].partition(b" ")[2]))
    return Tally(framework, task, kind, int(row[1]), from_ms(last_ms), explanation, examples)
