-- Returns the tallies of shadow mode: field, count, told and examples for each.
-- KEYS: counts, told, examples
-- ARGV: none
local answer = {}
for n, field in ipairs(redis.call('HKEYS', KEYS[1])) do
  answer[n] = {field, redis.call('HGET', KEYS[1], field), redis.call('HGET', KEYS[2], field),
               redis.call('HGET', KEYS[3], field)}
end
return answer
