"""What is listed: in the order of time, all of it and of each kind, as sorted sets without scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeAlias

from ..records import from_ms, index_text, matches, to_ms
from .namespace import RedisNamespace
from .server import Script

#: Keeps the milliseconds of every time above zero, and so their digits in order.
_YEAR_ONE_MS = 62_135_596_800_000
_DIGITS = 15

#: A place is the moment, a colon and the id; an entry its kind's texts, then the place, between NULs.
#: `by_time` holds places, `by_kind` entries, `kinds` the kinds that have any.
INDEX = """
local function split(entry)
  local at = string.match(entry, '.*%z()')
  return string.sub(entry, 1, at - 2), string.sub(entry, at)
end

local function enter(by_time, by_kind, kinds, entry)
  local kind, place = split(entry)
  redis.call('ZADD', by_time, 0, place)
  redis.call('ZADD', by_kind, 0, entry)
  redis.call('SADD', kinds, kind)
end

local function leave(by_time, by_kind, kinds, entry)
  local kind, place = split(entry)
  redis.call('ZREM', by_time, place)
  redis.call('ZREM', by_kind, entry)
  local left = redis.call('ZRANGEBYLEX', by_kind, '[' .. kind .. '\\0', '(' .. kind .. '\\1', 'LIMIT', 0, 1)
  if #left == 0 then redis.call('SREM', kinds, kind) end
end
"""

#: KEYS: records, by_time, by_kind. ARGV: size, the order, the place to go on after or '', kinds or none for
#: all. Strings are compared byte by byte, for Lua's own order is that of the server's locale.
PAGE = Script("""
local size, newest, cursor = tonumber(ARGV[1]), ARGV[2] == 'newest', ARGV[3]

local function places(key, prefix, after, count)
  local low, high = '[' .. prefix, '(' .. prefix .. ':'
  local found
  if newest then
    if after ~= '' then high = '(' .. prefix .. after end
    found = redis.call('ZREVRANGEBYLEX', key, high, low, 'LIMIT', 0, count)
  else
    if after ~= '' then low = '(' .. prefix .. after end
    found = redis.call('ZRANGEBYLEX', key, low, high, 'LIMIT', 0, count)
  end
  for n = 1, #found do found[n] = string.sub(found[n], #prefix + 1) end
  return found
end

local function is_first(a, b)
  if newest then a, b = b, a end
  local x, y = tonumber(string.sub(a, 1, 15)), tonumber(string.sub(b, 1, 15))
  if x ~= y then return x < y end
  for n = 17, math.min(#a, #b) do
    x, y = string.byte(a, n), string.byte(b, n)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local rows = {}

local function add(head)
  local low, high = 1, #rows + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_first(head[1], rows[middle][1]) then low = middle + 1 else high = middle end
  end
  table.insert(rows, low, head)
end

local function merged()
  for n = 4, #ARGV do
    local prefix = ARGV[n] .. '\\0'
    local first = places(KEYS[3], prefix, cursor, 1)[1]
    if first then rows[#rows + 1] = {first, prefix, {}, 1} end
  end
  table.sort(rows, function(a, b) return is_first(b[1], a[1]) end)
  local found = {}
  while #found < size and #rows > 0 do
    local row = table.remove(rows)
    found[#found + 1] = row[1]
    if not row[3][row[4]] then row[3], row[4] = places(KEYS[3], row[2], row[1], 20), 1 end
    row[1], row[4] = row[3][row[4]], row[4] + 1
    if row[1] then add(row) end
  end
  return found
end

local answer = {}
for _, place in ipairs(#ARGV > 3 and merged() or places(KEYS[2], '', cursor, size)) do
  answer[#answer + 1] = place
  answer[#answer + 1] = redis.call('HGET', KEYS[1], string.sub(place, 17))
end
return answer
""")


#: KEYS: by_time, by_kind. ARGV: the least place, one beyond, kinds or none for all. It reads.
_COUNT = Script("""
if #ARGV == 2 then return redis.call('ZLEXCOUNT', KEYS[1], '[' .. ARGV[1], '(' .. ARGV[2]) end
local count = 0
for n = 3, #ARGV do
  local low, high = '[' .. ARGV[n] .. '\\0' .. ARGV[1], '(' .. ARGV[n] .. '\\0' .. ARGV[2]
  count = count + redis.call('ZLEXCOUNT', KEYS[2], low, high)
end
return count
""")

Rows: TypeAlias = list[tuple[bytes, bytes]]
#: Whether the texts of a kind are asked for.
Wanted: TypeAlias = Callable[[Sequence[str]], bool]


class RedisIndex:
    """The pages of what is kept under `records`, `by_time`, `by_kind` and `kinds`."""

    def __init__(self, redis: RedisNamespace, keys: Sequence[bytes], *, newest_first: bool) -> None:
        self._redis = redis
        *self._keys, self._kinds = keys
        self._newest_first = newest_first

    def page(
        self,
        wanted: Wanted | None,
        limit: int,
        cursor: str | None,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        oldest_first: bool | None = None,
    ) -> tuple[Rows, str | None]:
        """Return a page of the wanted kinds, of a span of time, and the cursor of the next page."""
        kinds = self._kinds_of(wanted)
        if kinds == []:
            return [], None
        newest = self._newest_first if oldest_first is None else not oldest_first
        low, high = _low(since), _high(until)
        after = _read_cursor(cursor) if cursor is not None else high if newest else low
        after = min(after, high) if newest else max(after, low)
        order = "newest" if newest else "oldest"
        found = rows_of(self._redis.run(PAGE, self._keys, (limit + 1, order, after, *(kinds or ()))))
        found = [row for row in found if low.encode() <= row[0] < high.encode()]
        more = found[limit - 1][0].decode() if len(found) > limit else None
        return found[:limit], more

    def count(self, wanted: Wanted | None, since: datetime | None, until: datetime | None) -> int:
        """Return how many there are of the wanted kinds, of a span of time."""
        kinds = self._kinds_of(wanted)
        if kinds == []:
            return 0
        words = (_low(since), _high(until), *(kinds or ()))
        return int(self._redis.run(_COUNT, self._keys[1:], words))

    def _kinds_of(self, wanted: Wanted | None) -> list[bytes] | None:
        """Return the kinds that are wanted, None for all."""
        if wanted is None:
            return None
        return [kind for kind in self._redis.ask("SMEMBERS", self._kinds) if wanted(texts_of(kind))]


def rows_of(answer: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Return the pairs that stand one after the other in an answer."""
    return list(zip(answer[::2], answer[1::2], strict=True))


def entry_of(texts: Sequence[str], at: datetime, index_id: str) -> str:
    """Return the index entry of a record with these texts, at a time."""
    return "\0".join((*map(index_text, texts), place_of(at, index_id)))


def place_of(at: datetime, index_id: str) -> str:
    """Return the place of a record."""
    return f"{moment(at)}:{index_id}"


def moment(at: datetime) -> str:
    """Return a time in digits whose order is that of time."""
    return f"{to_ms(at) + _YEAR_ONE_MS:0{_DIGITS}}"


def time_of(place: bytes) -> datetime:
    """Return the time of a place, which begins with it."""
    return from_ms(int(place[:_DIGITS]) - _YEAR_ONE_MS)


def texts_of(kind: bytes) -> list[str]:
    """Return the texts of a kind."""
    return kind.decode().split("\0")


def wanting(patterns: Sequence[str | None]) -> Wanted | None:
    """Return whether the texts of a kind match some patterns; None where all do."""
    if all(pattern is None for pattern in patterns):
        return None
    return lambda texts: all(map(matches, texts, patterns))


def _low(since: datetime | None) -> str:
    return "" if since is None else moment(since)


def _high(until: datetime | None) -> str:
    """Return what comes after all places before a time; a colon comes after all digits."""
    return ":" if until is None else moment(until)


def _read_cursor(cursor: str) -> str:
    at, separator, last_id = cursor.partition(":")
    if not (separator and at.isascii() and at.isdecimal() and len(at) <= _DIGITS):
        raise ValueError(f"cursor: {cursor!r} was not given out by this store")
    return f"{at:0>{_DIGITS}}:{index_text(last_id)}"
