-- Settles the last run of a job, and deletes its parked retry, unless that has a higher fence, and its letters,
-- unless they were written anew; returns 0, and deletes nothing, when the holder may not settle it.
-- NEEDS: _groups, _parked, _settle
-- KEYS: records, by_time, by_kind, kinds, states, ready, jobs, claims, tokens, letters, their by_time, by_kind, kinds, entries, claims, by_group, groups, grouped, reservation
-- ARGV: fence, holder or '', keep_until, key, an id and a place of each letter...
-- Repeated, it finds nothing more.
if settle(KEYS[19], ARGV[1], ARGV[2], ARGV[3]) == 0 then return 0 end
local fence, _, entry, job, framework = state_of(ARGV[4])
if fence and fence <= tonumber(ARGV[1]) then erase(ARGV[4], entry, job, framework) end
for n = 5, #ARGV, 2 do
  local id = ARGV[n]
  local known = redis.call('HGET', KEYS[14], id)
  if known and select(2, split(known)) == ARGV[n + 1] then
    leave(KEYS[11], KEYS[12], KEYS[13], known)
    ungroup(KEYS[16], KEYS[17], KEYS[18], id)
    for _, key in ipairs({KEYS[10], KEYS[14], KEYS[15]}) do redis.call('HDEL', key, id) end
  end
end
return 1
