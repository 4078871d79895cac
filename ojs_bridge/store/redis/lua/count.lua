-- Counts the records of some kinds, of a span of time.
-- KEYS: by_time, by_kind
-- ARGV: the least place, the place beyond, kinds... (none is all)
if #ARGV == 2 then return redis.call('ZLEXCOUNT', KEYS[1], '[' .. ARGV[1], '(' .. ARGV[2]) end
local count = 0
for n = 3, #ARGV do
  local low, high = '[' .. ARGV[n] .. '\0' .. ARGV[1], '(' .. ARGV[n] .. '\0' .. ARGV[2]
  count = count + redis.call('ZLEXCOUNT', KEYS[2], low, high)
end
return count
