-- Writes a document whose revision follows the one that is there; returns 0 when another writer came first.
-- NEEDS: _index, _full
-- KEYS: records, by_time, by_kind, kinds
-- ARGV: id, revision, record, entry, 1 for an act of an operator
-- Repeated, it finds its own record, and returns 1 again.
if ARGV[5] == '1' then go_on_if_full() end
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known then
  local before = cjson.decode(known)
  if known ~= ARGV[3] and before.revision ~= ARGV[2] - 1 then return 0 end
  leave(KEYS[2], KEYS[3], KEYS[4], split(ARGV[4]) .. '\0' .. before.moment .. ':' .. ARGV[1])
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
enter(KEYS[2], KEYS[3], KEYS[4], ARGV[4])
return 1
