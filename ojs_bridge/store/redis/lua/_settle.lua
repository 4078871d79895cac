-- A function that settles a reservation; it returns 0 when the holder may not settle it.
-- A record is packed: fence, until (-1 when settled), holder, publication, the mark of the request that wrote
-- it, and the answer to that request: -1 taken, -2 lost. A -2 stays. Repeated, it writes the same again.

local function settle(key, fence, holder, keep_until)
  local known, publication, told = redis.call('GET', key), '', 0
  if known then
    local its_fence, its_until, its_holder, its_publication, _, its_told = cmsgpack.unpack(known)
    if its_fence ~= tonumber(fence) then return 0 end
    -- A worker that has settled its reservation itself was not dead.
    if its_holder ~= holder and (holder ~= '' or its_until < 0) then return 0 end
    publication = its_publication
    if its_told == -2 then told = -2 end
  end
  local record = cmsgpack.pack(tonumber(fence), -1, holder, publication, '', told)
  redis.call('SET', key, record, 'PXAT', keep_until)
  return 1
end
