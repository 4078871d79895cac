-- Ends the claims of retries that were claimed last with this token.
-- NEEDS: _index, _parked
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens
-- ARGV: token, keys of retries...
-- A retry without a claim has no token.
for n = 2, #ARGV do
  if redis.call('HGET', KEYS[9], ARGV[n]) == ARGV[1] then
    local _, _, entry, _, framework = state_of(ARGV[n])
    redis.call('ZADD', KEYS[6], 0, ready_of(entry, framework))
    unclaimed(ARGV[n])
  end
end
return 0
