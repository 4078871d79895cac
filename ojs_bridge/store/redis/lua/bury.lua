-- Writes dead letters, and settles the reservation of one, if any; returns 0, and writes nothing, when that fails.
-- NEEDS: _groups, _settle
-- KEYS: records, by_time, by_kind, kinds, entries, claims, by_group, groups, grouped, first, kept errors of each ... and the reservation (if any)
-- ARGV: fence, holder or '', keep_until (all '' without a reservation), id, record, entry and fingerprint of each ...
-- Repeated, it writes the same again, and ends a claim that was made in between, as it must.
local letters = (#ARGV - 3) / 4
if #KEYS > 10 + letters and settle(KEYS[#KEYS], ARGV[1], ARGV[2], ARGV[3]) == 0 then return 0 end
for n = 1, letters do
  local id, record, entry, fingerprint = unpack(ARGV, 4 * n, 4 * n + 3)
  local earlier = redis.call('HGET', KEYS[5], id)
  redis.call('HSET', KEYS[1], id, record)
  redis.call('HSET', KEYS[5], id, entry)
  if earlier and earlier ~= entry then leave(KEYS[2], KEYS[3], KEYS[4], earlier) end
  enter(KEYS[2], KEYS[3], KEYS[4], entry)
  group(KEYS[7], KEYS[8], KEYS[9], KEYS[10], id, fingerprint .. '\0' .. entry)
  redis.call('HDEL', KEYS[6], id)
  redis.call('DEL', KEYS[10 + n])
end
return 1
