-- Claims the dead letters that have no other claim; returns their records.
-- NEEDS: _full
-- KEYS: records, claims
-- ARGV: now, until, token, ids...
-- Repeated, it finds its own token.
-- A claim comes before a deletion, and before a replay, which ends with one.
go_on_if_full()
local records = {}
for n = 4, #ARGV do
  local id = ARGV[n]
  local record, held = redis.call('HGET', KEYS[1], id), redis.call('HGET', KEYS[2], id)
  local until_, token = string.match(held or '0 ', '(.+) (.*)')
  if record and (tonumber(until_) <= tonumber(ARGV[1]) or token == ARGV[3]) then
    redis.call('HSET', KEYS[2], id, ARGV[2] .. ' ' .. ARGV[3])
    records[#records + 1] = record
  end
end
return records
