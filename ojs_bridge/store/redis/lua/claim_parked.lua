-- Claims the retries of some keys that have no other claim; returns a place and a record for each.
-- NEEDS: _index, _parked
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens
-- ARGV: now, until, token, keys of retries...
-- Repeated, it finds its own token.
local answer = {}
for n = 4, #ARGV do
  local key = ARGV[n]
  local fence, _, entry, _, framework = state_of(key)
  local ends = redis.call('ZSCORE', KEYS[8], key)
  local free = not ends or tonumber(ends) <= tonumber(ARGV[1])
  if fence and (free or redis.call('HGET', KEYS[9], key) == ARGV[3]) then
    redis.call('ZADD', KEYS[8], ARGV[2], key)
    redis.call('HSET', KEYS[9], key, ARGV[3])
    redis.call('ZREM', KEYS[6], ready_of(entry, framework))
    answer[#answer + 1] = place_of(entry)
    answer[#answer + 1] = redis.call('HGET', KEYS[1], key)
  end
end
return answer
