-- Takes dead letters out of a bin; returns the positions, from 0, of those that are there now.
-- NEEDS: _groups
-- KEYS: records, by_time, by_kind, kinds, entries, claims, by_group, groups, grouped, first, bin, the reservation of each...
-- ARGV: id, entry, fingerprint and fence of each...
-- Repeated, it finds the letters there.
local there = {}
for n = 1, #ARGV / 4 do
  local id, entry, fingerprint, fence = unpack(ARGV, 4 * n - 3, 4 * n)
  local record, known, begun = redis.call('HGET', KEYS[11], id), redis.call('HGET', KEYS[5], id), false
  local reserved = redis.call('GET', KEYS[11 + n])
  if reserved then
    local its_fence, its_until = cmsgpack.unpack(reserved)
    begun = its_fence > tonumber(fence) or (its_fence == tonumber(fence) and its_until >= 0)
  end
  if known == entry then
    there[#there + 1] = n - 1
  elseif record and not known and not begun then
    redis.call('HSET', KEYS[1], id, record)
    redis.call('HSET', KEYS[5], id, entry)
    enter(KEYS[2], KEYS[3], KEYS[4], entry)
    group(KEYS[7], KEYS[8], KEYS[9], KEYS[10], id, fingerprint .. '\0' .. entry)
    redis.call('HDEL', KEYS[6], id)
    redis.call('HDEL', KEYS[11], id)
    there[#there + 1] = n - 1
  end
end
return there
