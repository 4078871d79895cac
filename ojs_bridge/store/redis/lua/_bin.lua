-- A function that writes a dead letter into the bin of a deletion, if there is one. Redis itself empties the bin.
-- A bin holds the record of each id.

local function keep(bin, records, id, length)
  local record = bin and redis.call('HGET', records, id)
  if not record then return end
  redis.call('HSET', bin, id, record)
  redis.call('PEXPIRE', bin, length)
end
