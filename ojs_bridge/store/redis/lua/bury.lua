-- Writes a dead letter, and settles its reservation, if any; returns 0, and writes nothing, when that fails.
-- NEEDS: _groups, _settle
-- KEYS: records, by_time, by_kind, kinds, entries, claims, by_group, groups, grouped, kept errors, first, reservation (if any)
-- ARGV: id, record, entry, fingerprint, fence, holder or '', keep_until
-- Repeated, it writes the same again, and ends a claim that was made in between, as it must.
if KEYS[12] and settle(KEYS[12], ARGV[5], ARGV[6], ARGV[7]) == 0 then return 0 end
local id, earlier = ARGV[1], redis.call('HGET', KEYS[5], ARGV[1])
redis.call('HSET', KEYS[1], id, ARGV[2])
redis.call('HSET', KEYS[5], id, ARGV[3])
if earlier and earlier ~= ARGV[3] then leave(KEYS[2], KEYS[3], KEYS[4], earlier) end
enter(KEYS[2], KEYS[3], KEYS[4], ARGV[3])
group(KEYS[7], KEYS[8], KEYS[9], KEYS[11], id, ARGV[4] .. '\0' .. ARGV[3])
redis.call('HDEL', KEYS[6], id)
redis.call('DEL', KEYS[10])
return 1
