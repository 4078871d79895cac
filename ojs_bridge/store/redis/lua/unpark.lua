-- Deletes the retries that were claimed last with this token; returns how many.
-- NEEDS: _index, _parked
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens
-- ARGV: token, keys of retries...
-- A retry that is gone has no token.
local gone = 0
for n = 2, #ARGV do
  if redis.call('HGET', KEYS[9], ARGV[n]) == ARGV[1] then
    local _, _, entry, job, framework = state_of(ARGV[n])
    erase(ARGV[n], entry, job, framework)
    gone = gone + 1
  end
end
return gone
