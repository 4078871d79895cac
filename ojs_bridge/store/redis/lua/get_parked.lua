-- Returns the place and the record of a parked job; of any one of the kind where several have the id.
-- NEEDS: _index, _parked
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens
-- ARGV: job, kind or nothing
local first, last = '[' .. ARGV[1] .. '\0', '(' .. ARGV[1] .. '\1'
local most = ARGV[2] == '' and 1 or 1000
for _, found in ipairs(redis.call('ZRANGEBYLEX', KEYS[7], first, last, 'LIMIT', 0, most)) do
  local key = string.sub(found, #ARGV[1] + 2)
  local _, _, entry = state_of(key)
  local texts, place = split(entry)
  if ARGV[2] == '' or string.match(texts, '[^%z]*$') == ARGV[2] then
    return {place, redis.call('HGET', KEYS[1], key)}
  end
end
return {}
