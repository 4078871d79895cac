-- Deletes the documents of a kind that are older than a moment; returns how many.
-- NEEDS: _index
-- KEYS: records, by_time, by_kind, kinds
-- ARGV: kind, moment
-- Repeated, it finds them gone, and returns less.
local prefix = ARGV[1] .. '\0'
local found = redis.call('ZRANGEBYLEX', KEYS[3], '[' .. prefix, '(' .. prefix .. ARGV[2])
for _, entry in ipairs(found) do
  local _, place = split(entry)
  redis.call('HDEL', KEYS[1], string.sub(place, 17))
  leave(KEYS[2], KEYS[3], KEYS[4], entry)
end
return #found
