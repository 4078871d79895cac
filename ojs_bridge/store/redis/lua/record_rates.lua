-- Adds to the rates of minutes and hours.
-- KEYS: the number of the writer's last batch, the hash of each span...
-- ARGV: its life in ms, this batch's number, for each hash its end (ms), how many fields, fields and counts...
-- Repeated, after a lost answer, it finds the number and adds nothing.
if tonumber(redis.call('GET', KEYS[1]) or 0) >= tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
local n = 3
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
