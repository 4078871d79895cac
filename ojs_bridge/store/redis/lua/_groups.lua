-- Functions that keep the groups of dead letters: a second index, whose kinds begin with the fingerprint.
-- by_group holds its entries, groups its kinds, and grouped the entry of each id. first holds the time of
-- each fingerprint's first death, which stays when the letters go.
-- NEEDS: _index

local function ungroup(by_group, groups, grouped, id)
  local earlier = redis.call('HGET', grouped, id)
  if not earlier then return end
  leave_kind(by_group, groups, earlier)
  redis.call('HDEL', grouped, id)
end

local function group(by_group, groups, grouped, first, id, entry)
  local earlier = redis.call('HGET', grouped, id)
  redis.call('HSET', grouped, id, entry)
  if earlier and earlier ~= entry then leave_kind(by_group, groups, earlier) end
  enter_kind(by_group, groups, entry)
  local _, place = split(entry)
  local fingerprint, at = string.match(entry, '^[^%z]*'), string.sub(place, 1, 15)
  local known = redis.call('HGET', first, fingerprint)
  if not known or tonumber(at) < tonumber(known) then redis.call('HSET', first, fingerprint, at) end
end
