-- Deletes the dead letters whose claims still have this token; returns how many.
-- NEEDS: _groups, _claims, _bin
-- KEYS: records, by_time, by_kind, kinds, entries, claims, by_group, groups, grouped, the bin (if any)
-- ARGV: token, for how long the bin keeps them, ids...
-- Repeated, it finds no token.
local deleted = 0
for n = 3, #ARGV do
  local id = ARGV[n]
  if is_ours(KEYS[6], id, ARGV[1]) then
    keep(KEYS[10], KEYS[1], id, ARGV[2])
    leave(KEYS[2], KEYS[3], KEYS[4], redis.call('HGET', KEYS[5], id))
    ungroup(KEYS[7], KEYS[8], KEYS[9], id)
    for _, key in ipairs({KEYS[1], KEYS[5], KEYS[6]}) do redis.call('HDEL', key, id) end
    deleted = deleted + 1
  end
end
return deleted
