"""Reservations in Redis: one packed string per key, which ends by itself."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ...errors import StoreError
from ..records import from_ms, to_ms
from ..reservations import Grant, Reservation, ReserveAnswer, Settle
from .namespace import RedisNamespace
from .server import Script, Word

#: How long an unsettled record outlives its holder's time.
OUTLIVE_MS = timedelta(weeks=1) // timedelta(milliseconds=1)
#: What Lua can count up to.
LARGEST_FENCE = 2**53

#: What a record is packed of, in MessagePack.
_INT64, _STR32 = 0xD3, 0xDB
_ANY_TEXT = ("utf-8", "surrogatepass")

#: How much is told of a reservation that another one holds; of a lost one, one word more.
_OF_ONE_HELD = 3
_TAKEN, _LOST, _SETTLED, _RESENT = -1, -2, -3, -4
_WITHOUT_TIME = {
    _TAKEN: ReserveAnswer(Grant.TAKEN),
    _LOST: ReserveAnswer(Grant.LOST),
    _SETTLED: ReserveAnswer(Grant.SETTLED),
    _RESENT: ReserveAnswer(Grant.RESENT),
}

#: A record: fence, until or -1 when settled, holder, publication, the mark of the request that wrote it and
#: what that was told; -2, that the reservation was taken over, stays. Settling again writes the same again.
SETTLE = """
local function settle(key, fence, holder, keep_until)
  local known, publication, told = redis.call('GET', key), '', 0
  if known then
    local its_fence, its_until, its_holder, its_publication, _, its_told = cmsgpack.unpack(known)
    if its_fence ~= tonumber(fence) then return 0 end
    -- What its holder has settled itself was not left by a dead one.
    if its_holder ~= holder and (holder ~= '' or its_until < 0) then return 0 end
    publication = its_publication
    if its_told == -2 then told = -2 end
  end
  local record = cmsgpack.pack(tonumber(fence), -1, holder, publication, '', told)
  redis.call('SET', key, record, 'PXAT', keep_until)
  return 1
end
"""

#: KEYS: reservation. ARGV: fence, publication, holder, now, until, the record's end, mark. A repeat, whose
#: first answer was lost with the connection, finds its own mark and is told the same.
_RESERVE = Script("""
local fence, publication, told, lost = tonumber(ARGV[1]), ARGV[2], -1, nil
local known = redis.call('GET', KEYS[1])
if known then
  local its_fence, its_until, its_holder, its_publication, its_mark, its_told = cmsgpack.unpack(known)
  if its_mark == ARGV[7] then return its_told end
  if fence == 0 and publication ~= '' and its_publication ~= '' and publication ~= its_publication then
    return -4
  end
  if its_fence > fence then return -3 end
  if its_fence == fence then
    if its_until < 0 then return -3 end
    if its_until > tonumber(ARGV[4]) then return {its_until, its_holder, its_mark} end
    told, lost = -2, {its_until, its_holder, its_mark, told}
  end
  publication = its_publication
end
local record = cmsgpack.pack(fence, tonumber(ARGV[5]), ARGV[3], publication, ARGV[7], told)
redis.call('SET', KEYS[1], record, 'PXAT', ARGV[6])
return lost or told
""")

#: KEYS: reservations. ARGV: holder, until, the records' end, fences. Extending again writes the same again.
_EXTEND = Script("""
local lost = {}
for n, key in ipairs(KEYS) do
  local known = redis.call('GET', key)
  local fence, until_, holder, publication, mark, told
  if known then fence, until_, holder, publication, mark, told = cmsgpack.unpack(known) end
  if known and fence == tonumber(ARGV[3 + n]) and holder == ARGV[1] and until_ >= 0 then
    local record = cmsgpack.pack(fence, tonumber(ARGV[2]), holder, publication, mark, told)
    redis.call('SET', key, record, 'PXAT', ARGV[3])
  else
    lost[#lost + 1] = n - 1
  end
end
return lost
""")

#: KEYS: reservation. ARGV: fence, holder or '', keep_until.
_SETTLE = Script(SETTLE + "return settle(KEYS[1], ARGV[1], ARGV[2], ARGV[3])")

#: KEYS: reservation. ARGV: fence, holder or '', keep_until, mark or ''. Repeated, it has no effect.
_RELEASE = Script("""
local known = redis.call('GET', KEYS[1])
if not known then return 0 end
local fence, until_, holder, publication, mark = cmsgpack.unpack(known)
if fence ~= tonumber(ARGV[1]) or until_ < 0 or (ARGV[2] ~= '' and holder ~= ARGV[2]) then return 0 end
if ARGV[4] ~= '' and mark ~= ARGV[4] then return 0 end
if fence == 0 then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], cmsgpack.pack(fence - 1, -1, holder, publication, '', 0), 'PXAT', ARGV[3])
end
return 1
""")

#: KEYS: reservations. ARGV: fences. What has been forgotten is not there to be forgotten again.
_EXPIRE = Script("""
for n, key in ipairs(KEYS) do
  local known = redis.call('GET', key)
  if known then
    local fence, until_, _, _, _, told = cmsgpack.unpack(known)
    if fence == tonumber(ARGV[n]) and until_ < 0 and told ~= -2 then redis.call('DEL', key) end
  end
end
return 0
""")


class RedisReservations:
    """Who runs which job, until when."""

    def __init__(self, redis: RedisNamespace) -> None:
        self._redis = redis

    def reserve(
        self,
        reservation: Reservation,
        *,
        publication: str,
        holder: str,
        mark: str,
        now: datetime,
        until: datetime,
    ) -> ReserveAnswer:
        """Reserve a run until a time, atomically."""
        key, fence, end = self._redis.reservation_key(reservation), _fence(reservation), to_ms(until)
        if fence == 0:
            # Mostly there is no record of a first run, and this takes the server a fifth of a script's time.
            record = _record(fence, end, holder, publication, mark)
            if self._redis.ask("SET", key, record, "NX", "PXAT", end + OUTLIVE_MS):
                return _WITHOUT_TIME[_TAKEN]
        words: tuple[Word, ...] = (fence, publication, holder, to_ms(now), end, end + OUTLIVE_MS, mark)
        told: int | list[Any] = self._redis.run(_RESERVE, (key,), words)
        if isinstance(told, int):
            return _WITHOUT_TIME[told]
        grant = Grant.HELD if len(told) == _OF_ONE_HELD else Grant.LOST
        its_holder, its_mark = (text.decode("utf-8", "surrogatepass") for text in told[1:3])
        return ReserveAnswer(grant, from_ms(told[0]), its_holder, its_mark)

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the reservations that `holder` holds, unsettled; return the others."""
        if not reservations:
            return []
        end = to_ms(until)
        words: tuple[Word, ...] = (holder, end, end + OUTLIVE_MS, *map(_fence, reservations))
        return [
            reservations[n]
            for n in self._redis.run(_EXTEND, [*map(self._redis.reservation_key, reservations)], words)
        ]

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as dealt with; False when the record has another fence or holder."""
        return bool(
            self._redis.run(_SETTLE, (self._redis.reservation_key(settle.reservation),), settle_words(settle))
        )

    def release(self, settle: Settle) -> bool:
        """Release a reservation unused; False when the record has another fence or holder, or is settled."""
        words = (*settle_words(settle), settle.mark)
        return bool(self._redis.run(_RELEASE, (self._redis.reservation_key(settle.reservation),), words))

    def expire(self, reservations: Sequence[Reservation]) -> None:
        """Delete the records of settled reservations that still have that very fence and were never lost."""
        if reservations:
            self._redis.run(
                _EXPIRE, [*map(self._redis.reservation_key, reservations)], [*map(_fence, reservations)]
            )

    def expire_before(self, now: datetime, *, limit: int) -> int:  # noqa: ARG002
        """Do nothing: settled records end by themselves."""
        return 0


def settle_words(settle: Settle) -> tuple[Word, ...]:
    """Return the fence, the holder and the end of the record, as the scripts take them."""
    return _fence(settle.reservation), settle.holder or "", to_ms(settle.keep_until)


def _record(fence: int, until: int, holder: str, publication: str, mark: str) -> bytes:
    """Return the record of a reservation that was taken, as the scripts pack it."""
    by, of, under = holder.encode(*_ANY_TEXT), publication.encode(*_ANY_TEXT), mark.encode(*_ANY_TEXT)
    form = f">BqBqBI{len(by)}sBI{len(of)}sBI{len(under)}sb"
    texts = (_STR32, len(by), by, _STR32, len(of), of, _STR32, len(under), under)
    return struct.pack(form, _INT64, fence, _INT64, until, *texts, _TAKEN)


def _fence(reservation: Reservation) -> int:
    if not 0 <= reservation.fence <= LARGEST_FENCE:
        raise StoreError(f"fence: {reservation.fence} is not between 0 and {LARGEST_FENCE}")
    return reservation.fence
