-- Claims a framework's due retries; returns a place and a record for each.
-- NEEDS: _index, _parked
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens
-- ARGV: now, until, token, limit, framework, the end of the places that are due
-- Repeated, it claims other retries. The first ones, which no caller knows, are due again at `until`.
for _, key in ipairs(redis.call('ZRANGEBYSCORE', KEYS[8], '-inf', ARGV[1], 'LIMIT', 0, 1000)) do
  local _, _, entry, _, framework = state_of(key)
  redis.call('ZADD', KEYS[6], 0, ready_of(entry, framework))
  redis.call('ZREM', KEYS[8], key)
end
local answer = {}
local first, last = '[' .. ARGV[5] .. '\0', '(' .. ARGV[5] .. '\0' .. ARGV[6]
for _, ready in ipairs(redis.call('ZRANGEBYLEX', KEYS[6], first, last, 'LIMIT', 0, ARGV[4])) do
  local place = string.sub(ready, #ARGV[5] + 2)
  local key = string.sub(place, 17)
  redis.call('ZADD', KEYS[8], ARGV[2], key)
  redis.call('HSET', KEYS[9], key, ARGV[3])
  redis.call('ZREM', KEYS[6], ready)
  answer[#answer + 1] = place
  answer[#answer + 1] = redis.call('HGET', KEYS[1], key)
end
return answer
