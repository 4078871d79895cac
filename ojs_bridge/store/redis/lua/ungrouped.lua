-- Looks through some dead letters for those that no group has as they are now; ends the membership of letters
-- that are gone. Workers of earlier releases bury and delete letters without a word to the groups.
-- NEEDS: _groups
-- KEYS: records, entries, by_group, groups, grouped
-- ARGV: the cursor of the entries, that of the grouped ones, how many; an ended cursor is ''
-- Returns both cursors, and an id, an entry and a record for each letter.
-- Repeated, it finds the same letters, unless they have changed.
local function scan(key, cursor)
  if cursor == '' then return '', {} end
  local found = redis.call('HSCAN', key, cursor, 'COUNT', ARGV[3])
  return found[1] == '0' and '' or found[1], found[2]
end

local next_entries, entries = scan(KEYS[2], ARGV[1])
local next_grouped, members = scan(KEYS[5], ARGV[2])
local answer = {next_entries, next_grouped}
for n = 1, #members, 2 do
  if redis.call('HEXISTS', KEYS[2], members[n]) == 0 then ungroup(KEYS[3], KEYS[4], KEYS[5], members[n]) end
end
for n = 1, #entries, 2 do
  local id, entry = entries[n], entries[n + 1]
  local known = redis.call('HGET', KEYS[5], id)
  if not known or string.sub(known, -#entry - 1) ~= '\0' .. entry then
    for _, word in ipairs({id, entry, redis.call('HGET', KEYS[1], id)}) do answer[#answer + 1] = word end
  end
end
return answer
