-- Returns for each kind with records of a span of time: its texts, their number, the oldest and the newest place.
-- KEYS: by_kind
-- ARGV: the least place, the place beyond, kinds...
local answer = {}
for n = 3, #ARGV do
  local kind = ARGV[n]
  local low, high = '[' .. kind .. '\0' .. ARGV[1], '(' .. kind .. '\0' .. ARGV[2]
  local count = redis.call('ZLEXCOUNT', KEYS[1], low, high)
  if count > 0 then
    local oldest = redis.call('ZRANGEBYLEX', KEYS[1], low, high, 'LIMIT', 0, 1)[1]
    local newest = redis.call('ZREVRANGEBYLEX', KEYS[1], high, low, 'LIMIT', 0, 1)[1]
    answer[#answer + 1] = {kind, count, string.sub(oldest, #kind + 2), string.sub(newest, #kind + 2)}
  end
end
return answer
