-- Makes a retry due at another time; returns 0 when it is claimed, was replaced or is gone.
-- NEEDS: _index, _parked
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens
-- ARGV: key of the retry, fence, parked_at, the moment when it is due
-- Repeated, it writes the same again.
local key = ARGV[1]
local fence, parked_at, entry, job, framework = state_of(key)
if not is_same(key, ARGV[2], ARGV[3], fence, parked_at) then return 0 end
local kind = split(entry)
erase_place(entry, framework)
write(key, fence, parked_at, kind .. '\0' .. ARGV[4] .. ':' .. key, job, framework)
return 1
