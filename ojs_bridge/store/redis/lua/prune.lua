-- Deletes the dead letters that have no claim and still have these entries; returns how many.
-- NEEDS: _groups, _bin
-- KEYS: records, by_time, by_kind, kinds, entries, claims, by_group, groups, grouped, the bin (if any)
-- ARGV: now, for how long the bin keeps them, an id and an entry for each...
-- Repeated, it finds the letters gone, and returns less.
local pruned = 0
for n = 3, #ARGV, 2 do
  local id, entry = ARGV[n], ARGV[n + 1]
  local held = redis.call('HGET', KEYS[6], id)
  local free = not held or tonumber(string.match(held, '(.+) .+')) <= tonumber(ARGV[1])
  if free and redis.call('HGET', KEYS[5], id) == entry then
    keep(KEYS[10], KEYS[1], id, ARGV[2])
    leave(KEYS[2], KEYS[3], KEYS[4], entry)
    ungroup(KEYS[7], KEYS[8], KEYS[9], id)
    for _, key in ipairs({KEYS[1], KEYS[5], KEYS[6]}) do redis.call('HDEL', key, id) end
    pruned = pruned + 1
  end
end
return pruned
