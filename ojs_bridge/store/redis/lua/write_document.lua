-- Writes a document whose revision follows the one that is there; returns 0 when another writer came first.
-- NEEDS: _index
-- KEYS: records, by_time, by_kind, kinds
-- ARGV: id, revision, record, entry
-- Repeated, it finds its own record, and returns 1 again.
local known = redis.call('HGET', KEYS[1], ARGV[1])
if known and known ~= ARGV[3] and cjson.decode(known).revision ~= ARGV[2] - 1 then return 0 end
if known and cjson.decode(known).at ~= cjson.decode(ARGV[3]).at then
  local prefix = split(ARGV[4]) .. '\0'
  for _, earlier in ipairs(redis.call('ZRANGEBYLEX', KEYS[3], '[' .. prefix, '(' .. split(ARGV[4]) .. '\1')) do
    local _, place = split(earlier)
    if string.sub(place, 17) == ARGV[1] then leave(KEYS[2], KEYS[3], KEYS[4], earlier) end
  end
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
enter(KEYS[2], KEYS[3], KEYS[4], ARGV[4])
return 1
