-- Writes a parked retry, and settles its reservation, if any; returns 0, and writes nothing, when that fails.
-- NEEDS: _index, _parked, _settle
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens, reservation (if any)
-- ARGV: key, record, fence, parked_at, entry, job, framework, fence to settle, holder or '', keep_until
-- Repeated, it writes the same again, and ends a claim that was made in between: the fence stops a second run.
if KEYS[10] and settle(KEYS[10], ARGV[8], ARGV[9], ARGV[10]) == 0 then return 0 end
local key = ARGV[1]
local fence, _, entry, job, framework = state_of(key)
if not fence or fence <= tonumber(ARGV[3]) then
  redis.call('HSET', KEYS[1], key, ARGV[2])
  if job then
    redis.call('ZREM', KEYS[7], job .. '\0' .. key)
    erase_place(entry, framework)
  end
  write(key, tonumber(ARGV[3]), ARGV[4], ARGV[5], ARGV[6], ARGV[7])
end
return 1
