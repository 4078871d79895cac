-- Functions for listings in the order of time, of all records and of each kind: sorted sets without scores.
-- A place is the time, a colon and the id. An entry is the kind's texts and the place, with NULs between them.
-- by_time holds places, by_kind holds entries, kinds holds the kinds that have entries.

local function split(entry)
  local at = string.match(entry, '.*%z()')
  return string.sub(entry, 1, at - 2), string.sub(entry, at)
end

local function enter_kind(by_kind, kinds, entry)
  redis.call('ZADD', by_kind, 0, entry)
  redis.call('SADD', kinds, (split(entry)))
end

local function enter(by_time, by_kind, kinds, entry)
  local _, place = split(entry)
  redis.call('ZADD', by_time, 0, place)
  enter_kind(by_kind, kinds, entry)
end

local function leave_kind(by_kind, kinds, entry)
  local kind = split(entry)
  redis.call('ZREM', by_kind, entry)
  local left = redis.call('ZRANGEBYLEX', by_kind, '[' .. kind .. '\0', '(' .. kind .. '\1', 'LIMIT', 0, 1)
  if #left == 0 then redis.call('SREM', kinds, kind) end
end

local function leave(by_time, by_kind, kinds, entry)
  local _, place = split(entry)
  redis.call('ZREM', by_time, place)
  leave_kind(by_kind, kinds, entry)
end
