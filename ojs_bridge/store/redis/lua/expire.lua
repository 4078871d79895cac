-- Deletes the records of settled reservations that have the same fence and were never lost.
-- KEYS: reservations...
-- ARGV: fences...
for n, key in ipairs(KEYS) do
  local known = redis.call('GET', key)
  if known then
    local fence, until_, _, _, _, told = cmsgpack.unpack(known)
    if fence == tonumber(ARGV[n]) and until_ < 0 and told ~= -2 then redis.call('DEL', key) end
  end
end
return 0
