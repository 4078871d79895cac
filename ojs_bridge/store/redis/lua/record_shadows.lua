-- Adds to the tallies of shadow mode.
-- KEYS: counts, told, examples, the mark of this write
-- ARGV: the mark's life in ms, and for each tally its field, count, told, number of examples, examples...
-- Repeated, after a lost answer, it finds the mark and adds nothing.
if redis.call('EXISTS', KEYS[4]) == 1 then return 0 end
redis.call('SET', KEYS[4], '1', 'PX', ARGV[1])
for n = 2, #ARGV, 5 do
  local field = ARGV[n]
  redis.call('HINCRBY', KEYS[1], field, ARGV[n + 1])
  redis.call('HSET', KEYS[2], field, ARGV[n + 2])
  local there = redis.call('HGET', KEYS[3], field)
  if not there or tonumber(ARGV[n + 3]) >= tonumber(string.match(there, '^%d+')) then
    redis.call('HSET', KEYS[3], field, ARGV[n + 3] .. ' ' .. ARGV[n + 4])
  end
end
return 0
