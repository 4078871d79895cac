-- Deletes a retry, and settles its reservation, if any; returns 0 when it is claimed, was replaced or is gone, or
-- when a run of that fence has begun.
-- NEEDS: _index, _parked, _full
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens, reservation (if any)
-- ARGV: key of the retry, fence, parked_at, the end of the reservation's record (if any), the publication or ''
go_on_if_full()
local key = ARGV[1]
local fence, parked_at, entry, job, framework = state_of(key)
if not is_same(key, ARGV[2], ARGV[3], fence, parked_at) then return 0 end
if KEYS[10] then
  local known, publication, its_fence, _ = redis.call('GET', KEYS[10]), ''
  if known then its_fence, _, _, publication = cmsgpack.unpack(known) end
  -- The record of another job that was sent under this id stays.
  if publication == '' or ARGV[5] == '' or publication == ARGV[5] then
    if its_fence and its_fence >= fence then return 0 end
    if publication == '' then publication = ARGV[5] end
    redis.call('SET', KEYS[10], cmsgpack.pack(fence, -1, '', publication, '', 0), 'PXAT', ARGV[4])
  end
end
erase(key, entry, job, framework)
return 1
