-- Returns for each kind with records of a span of time: its texts, their number, the oldest and the newest place.
-- KEYS: by_kind, kinds
-- ARGV: the least place, the place beyond, kinds... (none is all)
local kinds = {}
for n = 3, #ARGV do kinds[n - 2] = ARGV[n] end
if #kinds == 0 then kinds = redis.call('SMEMBERS', KEYS[2]) end
local answer = {}
for _, kind in ipairs(kinds) do
  local low, high = '[' .. kind .. '\0' .. ARGV[1], '(' .. kind .. '\0' .. ARGV[2]
  local count = redis.call('ZLEXCOUNT', KEYS[1], low, high)
  if count > 0 then
    local oldest = redis.call('ZRANGEBYLEX', KEYS[1], low, high, 'LIMIT', 0, 1)[1]
    local newest = redis.call('ZREVRANGEBYLEX', KEYS[1], high, low, 'LIMIT', 0, 1)[1]
    answer[#answer + 1] = {kind, count, string.sub(oldest, #kind + 2), string.sub(newest, #kind + 2)}
  end
end
return answer
