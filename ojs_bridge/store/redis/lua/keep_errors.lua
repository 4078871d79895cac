-- Keeps a job's error entries; an entry that is there already stays.
-- KEYS: kept errors
-- ARGV: a place and an entry for each...
for n = 1, #ARGV, 2 do redis.call('HSETNX', KEYS[1], ARGV[n], ARGV[n + 1]) end
return 0
