-- Returns the positions, from 0, of the reservations that are neither settled nor expired, each with its holder.
-- KEYS: reservations...
-- ARGV: now, fences...
local live = {}
for n, key in ipairs(KEYS) do
  local known = redis.call('GET', key)
  if known then
    local fence, until_, holder = cmsgpack.unpack(known)
    if fence == tonumber(ARGV[1 + n]) and until_ > tonumber(ARGV[1]) then live[#live + 1] = {n - 1, holder} end
  end
end
return live
