-- Keeps error entries of a job; an entry that is there already stays.
-- KEYS: kept errors
-- ARGV: places and entries by turns...
for n = 1, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[n], ARGV[n + 1]) end
return 0
