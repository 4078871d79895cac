-- Writes the version of the keys unless there is one, and returns the version that is there.
-- KEYS: schema
-- ARGV: version
local found = redis.call('GET', KEYS[1])
if not found then redis.call('SET', KEYS[1], ARGV[1]) end
return tonumber(found or ARGV[1])
