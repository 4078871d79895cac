-- Returns the fields and counts of the rates of some spans.
-- KEYS: the hash of each span...
-- ARGV: none
local found = {}
for k = 1, #KEYS do found[k] = redis.call('HGETALL', KEYS[k]) end
return found
