-- Looks through some dead letters for those that no group has as they are now; ends the membership of letters
-- that are gone. Workers of earlier releases bury and delete letters without a word to the groups.
-- NEEDS: _groups
-- KEYS: entries, by_group, groups, grouped
-- ARGV: the cursor of the entries, the cursor of grouped, the cursor of by_group, how many
-- A cursor that has ended is ''.
-- Returns the cursors, and a list with an id and an entry for each letter.
-- Repeated, it finds the same letters, unless they have changed.
local function scan(command, key, cursor)
  if cursor == '' then return '', {} end
  local found = redis.call(command, key, cursor, 'COUNT', ARGV[4])
  return found[1] == '0' and '' or found[1], found[2]
end

local next_entries, entries = scan('HSCAN', KEYS[1], ARGV[1])
local next_grouped, members = scan('HSCAN', KEYS[4], ARGV[2])
local next_by_group, listed = scan('ZSCAN', KEYS[2], ARGV[3])
for n = 1, #members, 2 do
  if redis.call('HEXISTS', KEYS[1], members[n]) == 0 then ungroup(KEYS[2], KEYS[3], KEYS[4], members[n]) end
end
for n = 1, #listed, 2 do
  local _, place = split(listed[n])
  local known = redis.call('HGET', KEYS[4], string.sub(place, 17))
  if known ~= listed[n] then leave_kind(KEYS[2], KEYS[3], listed[n]) end
end
local ungrouped = {}
for n = 1, #entries, 2 do
  local id, entry = entries[n], entries[n + 1]
  local known = redis.call('HGET', KEYS[4], id)
  local is_known = known and string.sub(known, -#entry - 1) == '\0' .. entry
  if not (is_known and redis.call('ZSCORE', KEYS[2], known)) then
    ungrouped[#ungrouped + 1] = id
    ungrouped[#ungrouped + 1] = entry
  end
end
return {next_entries, next_grouped, next_by_group, ungrouped}
