-- Deletes the tallies of shadow mode; returns how many there were.
-- KEYS: counts, told, examples
-- ARGV: none
local count = redis.call('HLEN', KEYS[1])
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
return count
