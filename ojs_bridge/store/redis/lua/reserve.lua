-- Reserves a run. Returns -1 taken, -2 lost, -3 settled, -4 resent, or {until, holder, mark} of the worker that
-- holds the run; with a fourth word that worker has lost it.
-- KEYS: reservation
-- ARGV: fence, publication, holder, now, until, the record's end, mark
-- Repeated, after a lost answer, it finds its own mark and returns the same answer.
local fence, publication, told, lost = tonumber(ARGV[1]), ARGV[2], -1, nil
local known = redis.call('GET', KEYS[1])
if known then
  local its_fence, its_until, its_holder, its_publication, its_mark, its_told = cmsgpack.unpack(known)
  if its_mark == ARGV[7] and its_holder == ARGV[3] then return its_told end
  if publication ~= '' and its_publication ~= '' and publication ~= its_publication then return -4 end
  if its_fence > fence then return -3 end
  if its_fence == fence then
    if its_until < 0 then return -3 end
    if its_until > tonumber(ARGV[4]) then return {its_until, its_holder, its_mark} end
    told, lost = -2, {its_until, its_holder, its_mark, told}
  end
  publication = its_publication
end
local record = cmsgpack.pack(fence, tonumber(ARGV[5]), ARGV[3], publication, ARGV[7], told)
redis.call('SET', KEYS[1], record, 'PXAT', ARGV[6])
return lost or told
