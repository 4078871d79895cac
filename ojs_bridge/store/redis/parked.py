"""Parked retries in Redis."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime

from ..parked import ALL_PARKED, Due, Parked, ParkedFilter, ParkedPage
from ..records import index_id, parked_from_json, parked_to_json, to_ms
from ..reservations import Settle
from .index import INDEX, RedisIndex, Rows, entry_of, moment, rows_of, time_of, wanting
from .namespace import RedisNamespace
from .reservations import SETTLE, settle_words
from .server import Script, Word

#: KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens. A state: fence, when it was
#: parked, its index entry, its job, its framework. `ready` holds the places of those that nobody has claimed,
#: after their frameworks; `claims` ends by key; `tokens` who claimed a key last. What is written anew has no
#: claim.
_PARKED = (
    INDEX
    + """
local function state_of(key)
  local state = redis.call('HGET', KEYS[5], key)
  if state then return cmsgpack.unpack(state) end
end

local function place_of(entry)
  local _, place = split(entry)
  return place
end

local function unclaimed(key)
  redis.call('ZREM', KEYS[8], key)
  redis.call('HDEL', KEYS[9], key)
end

local function ready_of(entry, framework)
  return framework .. '\\0' .. place_of(entry)
end

local function erase_place(entry, framework)
  redis.call('ZREM', KEYS[6], ready_of(entry, framework))
  leave(KEYS[2], KEYS[3], KEYS[4], entry)
end

local function write(key, fence, parked_at, entry, job, framework)
  redis.call('HSET', KEYS[5], key, cmsgpack.pack(fence, parked_at, entry, job, framework))
  redis.call('ZADD', KEYS[6], 0, ready_of(entry, framework))
  redis.call('ZADD', KEYS[7], 0, job .. '\\0' .. key)
  enter(KEYS[2], KEYS[3], KEYS[4], entry)
  unclaimed(key)
end

local function erase(key, entry, job, framework)
  erase_place(entry, framework)
  redis.call('HDEL', KEYS[1], key)
  redis.call('HDEL', KEYS[5], key)
  redis.call('ZREM', KEYS[7], job .. '\\0' .. key)
  unclaimed(key)
end
"""
)

#: And a reservation. ARGV: key, record, fence, when it was parked, entry, job, framework, and how to settle;
#: 0 and nothing written when that fails. Parking again writes the same again, and ends a claim of the moment
#: between: the fence stops what was published twice.
_PARK = Script(
    _PARKED
    + SETTLE
    + """
if KEYS[10] and settle(KEYS[10], ARGV[8], ARGV[9], ARGV[10]) == 0 then return 0 end
local key = ARGV[1]
local fence, _, entry, job, framework = state_of(key)
if not fence or fence <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[1], key, ARGV[2])
  if job then
    redis.call('ZREM', KEYS[7], job .. '\\0' .. key)
    erase_place(entry, framework)
  end
  write(key, tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6], ARGV[7])
end
return 1
"""
)

#: ARGV: now, until, token, limit, framework, the end of the places that are due. Repeated, it claims others;
#: the first ones, whose names were lost with the connection, are due again at `until`.
_CLAIM_DUE = Script(
    _PARKED
    + """
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[8], '-inf', ARGV[1], 'LIMIT', 0, 1000)) do
  local _, _, entry, _, framework = state_of(key)
  redis.call('ZADD', KEYS[6], 0, ready_of(entry, framework))
  redis.call('ZREM', KEYS[8], key)
end
local answer = {}
local first, last = '[' .. ARGV[5] .. '\\0', '(' .. ARGV[5] .. '\\0' .. ARGV[6]
for _, ready in ipairs(redis.call('ZRANGEBYLEX', KEYS[6], first, last, 'LIMIT', 0, ARGV[4])) do
  local place = string.sub(ready, #ARGV[5] + 2)
  local key = string.sub(place, 17)
  redis.call('ZADD', KEYS[8], ARGV[2], key)
  redis.call('HSET', KEYS[9], key, ARGV[3])
  redis.call('ZREM', KEYS[6], ready)
  answer[#answer + 1] = place
  answer[#answer + 1] = redis.call('HGET', KEYS[1], key)
end
return answer
"""
)

#: ARGV: now, until, token, keys. Repeated, it finds its own token.
_CLAIM = Script(
    _PARKED
    + """
local answer = {}
for n = 4, #ARGV do
  local key = ARGV[n]
  local fence, _, entry, _, framework = state_of(key)
  local ends = redis.call('ZSCORE', KEYS[8], key)
  local free = not ends or tonumber(ends) <= tonumber(ARGV[1])
  if fence and (free or redis.call('HGET', KEYS[9], key) == ARGV[3]) then
    redis.call('ZADD', KEYS[8], ARGV[2], key)
    redis.call('HSET', KEYS[9], key, ARGV[3])
    redis.call('ZREM', KEYS[6], ready_of(entry, framework))
    answer[#answer + 1] = place_of(entry)
    answer[#answer + 1] = redis.call('HGET', KEYS[1], key)
  end
end
return answer
"""
)

#: ARGV: token, keys. What is gone has no token.
_UNPARK = Script(
    _PARKED
    + """
local gone = 0
for n = 2, #ARGV do
  if redis.call('HGET', KEYS[9], ARGV[n]) == ARGV[1] then
    local _, _, entry, job, framework = state_of(ARGV[n])
    erase(ARGV[n], entry, job, framework)
    gone = gone + 1
  end
end
return gone
"""
)

#: ARGV: token, keys. What has been given back has no token.
_UNCLAIM = Script(
    _PARKED
    + """
for n = 2, #ARGV do
  if redis.call('HGET', KEYS[9], ARGV[n]) == ARGV[1] then
    local _, _, entry, _, framework = state_of(ARGV[n])
    redis.call('ZADD', KEYS[6], 0, ready_of(entry, framework))
    unclaimed(ARGV[n])
  end
end
return 0
"""
)

_SAME = """
local key = ARGV[1]
local fence, parked_at, entry, job, framework = state_of(key)
if fence ~= tonumber(ARGV[2]) or parked_at ~= ARGV[3] then return 0 end
-- Who was too slow for its claim may still publish.
if redis.call('HEXISTS', KEYS[9], key) == 1 then return 0 end
"""

#: ARGV: key, fence, when it was parked, when it is due. It writes the same again.
_RESCHEDULE = Script(
    _PARKED
    + _SAME
    + """
local kind = split(entry)
erase_place(entry, framework)
write(key, fence, parked_at, kind .. '\\0' .. ARGV[4] .. ':' .. key, job, framework)
return 1
"""
)

#: ARGV: key, fence, when it was parked. What is gone stays gone.
_CANCEL = Script(_PARKED + _SAME + "erase(key, entry, job, framework) return 1")

#: ARGV: job. It reads.
_GET = Script(
    _PARKED
    + """
local first, last = '[' .. ARGV[1] .. '\\0', '(' .. ARGV[1] .. '\\1'
local found = redis.call('ZRANGEBYLEX', KEYS[7], first, last, 'LIMIT', 0, 1)[1]
if not found then return {} end
local key = string.sub(found, #ARGV[1] + 2)
local _, _, entry = state_of(key)
return {place_of(entry), redis.call('HGET', KEYS[1], key)}
"""
)


class RedisParked:
    """Retries that wait in the store."""

    def __init__(self, redis: RedisNamespace) -> None:
        self._redis = redis
        listed = redis.keys("parked", "parked:by_time", "parked:by_kind", "parked:kinds")
        others = redis.keys("parked:states", "parked:ready", "parked:jobs", "parked:claims", "parked:tokens")
        self._parked_keys = (*listed, *others)
        self._parked_index = RedisIndex(redis, listed, newest_first=False)

    def park(self, parked: Parked, settle: Settle | None = None) -> bool:
        """Settle the job's reservation and write its retry, in one step."""
        key, fence, parked_at = _identity(parked)
        keys = [*self._parked_keys]
        entry = entry_of((parked.queue, parked.type), parked.next_retry_at, index_id(parked.key))
        words = [key, parked_to_json(parked), fence, parked_at, entry, index_id(parked.id), parked.framework]
        if settle:
            keys.append(self._redis.reservation_key(settle.reservation))
            words += settle_words(settle)
        return bool(self._redis.run(_PARK, keys, words))

    def claim_due(self, framework: str, *, now: datetime, until: datetime, limit: int) -> Due:
        """Claim a framework's due retries, the longest due first, atomically."""
        token = secrets.token_hex(8)
        words = (to_ms(now), to_ms(until), token, limit, framework, f"{moment(now)};")
        return Due(token, _retries(rows_of(self._redis.run(_CLAIM_DUE, self._parked_keys, words))))

    def claim_parked(self, keys: Sequence[str], *, now: datetime, until: datetime) -> Due:
        """Claim the retries of these keys that nobody has claimed, atomically."""
        token = secrets.token_hex(8)
        words: tuple[Word, ...] = (to_ms(now), to_ms(until), token, *map(index_id, keys))
        return Due(token, _retries(rows_of(self._redis.run(_CLAIM, self._parked_keys, words))))

    def unpark(self, retries: Sequence[Parked], claim: str) -> int:
        """Delete retries that were published under a claim that is still theirs; return how many."""
        words = (claim, *(index_id(parked.key) for parked in retries))
        return int(self._redis.run(_UNPARK, self._parked_keys, words))

    def unclaim_parked(self, retries: Sequence[Parked], claim: str) -> None:
        """Give back retries that could not be published."""
        words = (claim, *(index_id(parked.key) for parked in retries))
        self._redis.run(_UNCLAIM, self._parked_keys, words)

    def list_parked(self, where: ParkedFilter, *, limit: int, cursor: str | None) -> ParkedPage:
        """Return a page, the next one due first."""
        found, more = self._parked_index.page(wanting((where.queue, where.type)), limit, cursor)
        return ParkedPage(_retries(found), more)

    def get_parked(self, job_id: str) -> Parked | None:
        """Return a job's parked retry, or None."""
        found = rows_of(self._redis.run(_GET, self._parked_keys, (index_id(job_id),)))
        return _retries(found)[0] if found else None

    def reschedule(self, parked: Parked, at: datetime) -> bool:
        """Make a retry due at another time; False when it is claimed, was replaced or is gone."""
        words = (*_identity(parked), moment(at))
        return bool(self._redis.run(_RESCHEDULE, self._parked_keys, words))

    def cancel_parked(self, parked: Parked) -> bool:
        """Delete a retry; False when it is claimed, was replaced or is gone."""
        return bool(self._redis.run(_CANCEL, self._parked_keys, _identity(parked)))

    def count_parked(self, where: ParkedFilter = ALL_PARKED) -> int:
        """Count the parked retries of some kind."""
        return self._parked_index.count(wanting((where.queue, where.type)), None, None)


def _identity(parked: Parked) -> tuple[Word, Word, Word]:
    return index_id(parked.key), parked.fence, moment(parked.parked_at)


def _retries(rows: Rows) -> tuple[Parked, ...]:
    return tuple(parked_from_json(record.decode(), due_ms=to_ms(time_of(place))) for place, record in rows)
