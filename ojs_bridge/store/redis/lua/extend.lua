-- Extends reservations; returns the positions, from 0, of those that the holder has lost.
-- KEYS: reservations...
-- ARGV: holder, until, the records' end, fences...
-- Repeated, it writes the same again.
local lost = {}
for n, key in ipairs(KEYS) do
  local known = redis.call('GET', key)
  local fence, until_, holder, publication, mark, told
  if known then fence, until_, holder, publication, mark, told = cmsgpack.unpack(known) end
  if known and fence == tonumber(ARGV[3 + n]) and holder == ARGV[1] and until_ >= 0 then
    local record = cmsgpack.pack(fence, tonumber(ARGV[2]), holder, publication, mark, told)
    redis.call('SET', key, record, 'PXAT', ARGV[3])
  else
    lost[#lost + 1] = n - 1
  end
end
return lost
