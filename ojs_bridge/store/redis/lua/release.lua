-- Releases a reservation unused; returns 0 when the holder may not release it.
-- KEYS: reservation
-- ARGV: fence, holder or '', keep_until, mark or ''
-- Repeated, it has no effect.
local known = redis.call('GET', KEYS[1])
if not known then return 0 end
local fence, until_, holder, publication, mark, told = cmsgpack.unpack(known)
if fence ~= tonumber(ARGV[1]) or until_ < 0 or (ARGV[2] ~= '' and holder ~= ARGV[2]) then return 0 end
-- What was answered with a lost attempt has begun before: it is not unused.
if ARGV[4] ~= '' and (mark ~= ARGV[4] or told == -2) then return 0 end
if fence == 0 then
  redis.call('DEL', KEYS[1])
else
  redis.call('SET', KEYS[1], cmsgpack.pack(fence - 1, -1, holder, publication, '', 0), 'PXAT', ARGV[3])
end
return 1
