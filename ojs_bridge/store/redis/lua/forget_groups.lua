-- Forgets the first deaths of groups that have no letter; returns how many.
-- KEYS: first, by_group
-- ARGV: fingerprints...
-- Repeated, it finds them gone, and returns less.
local forgotten = 0
for n = 1, #ARGV do
  local left = redis.call('ZRANGEBYLEX', KEYS[2], '[' .. ARGV[n] .. '\0', '(' .. ARGV[n] .. '\1', 'LIMIT', 0, 1)
  if #left == 0 then forgotten = forgotten + redis.call('HDEL', KEYS[1], ARGV[n]) end
end
return forgotten
