-- Returns the place and the record of a job's retry; of any retry where a job has several.
-- NEEDS: _index, _parked
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens
-- ARGV: job
local first, last = '[' .. ARGV[1] .. '\0', '(' .. ARGV[1] .. '\1'
local found = redis.call('ZRANGEBYLEX', KEYS[7], first, last, 'LIMIT', 0, 1)[1]
if not found then return {} end
local key = string.sub(found, #ARGV[1] + 2)
local _, _, entry = state_of(key)
return {place_of(entry), redis.call('HGET', KEYS[1], key)}
