-- Puts dead letters into their groups; a letter that has changed meanwhile is left alone. Returns how many.
-- NEEDS: _groups
-- KEYS: entries, by_group, groups, grouped, first
-- ARGV: an id, a fingerprint and an entry for each...
-- Repeated, it writes the same again.
local done = 0
for n = 1, #ARGV, 3 do
  local id, entry = ARGV[n], ARGV[n + 2]
  if redis.call('HGET', KEYS[1], id) == entry then
    group(KEYS[2], KEYS[3], KEYS[4], KEYS[5], id, ARGV[n + 1] .. '\0' .. entry)
    done = done + 1
  end
end
return done
