-- Adds to the rates of minutes and hours.
-- KEYS: the mark of this write, the hash of each span...
-- ARGV: the mark's life in ms, and for each hash when it expires (ms), the number of its fields, fields and counts...
-- Repeated, after a lost answer, it finds the mark and adds nothing.
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('SET', KEYS[1], '1', 'PX', ARGV[1])
local n = 2
for k = 2, #KEYS do
  local expires, fields = ARGV[n], ARGV[n + 1]
  n = n + 2
  for _ = 1, fields do
    redis.call('HINCRBY', KEYS[k], ARGV[n], ARGV[n + 1])
    n = n + 2
  end
  redis.call('PEXPIREAT', KEYS[k], expires)
end
return 0
