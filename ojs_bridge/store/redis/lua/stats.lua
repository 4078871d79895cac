-- Returns the oldest place, the newest place, and for each kind its texts and its number of records.
-- KEYS: by_time, by_kind, kinds
-- ARGV: none
local answer = {redis.call('ZRANGE', KEYS[1], 0, 0), redis.call('ZRANGE', KEYS[1], -1, -1)}
for _, kind in ipairs(redis.call('SMEMBERS', KEYS[3])) do
  answer[#answer + 1] = kind
  answer[#answer + 1] = redis.call('ZLEXCOUNT', KEYS[2], '[' .. kind .. '\0', '(' .. kind .. '\1')
end
return answer
