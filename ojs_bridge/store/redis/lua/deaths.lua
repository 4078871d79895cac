-- Counts the records of some kinds together, between each two of some moments.
-- KEYS: by_kind
-- ARGV: the number of moments, moments..., kinds...
local counts, moments = {}, tonumber(ARGV[1])
for n = 1, moments - 1 do
  counts[n] = 0
  for k = moments + 2, #ARGV do
    local low, high = '[' .. ARGV[k] .. '\0' .. ARGV[n + 1], '(' .. ARGV[k] .. '\0' .. ARGV[n + 2]
    counts[n] = counts[n] + redis.call('ZLEXCOUNT', KEYS[1], low, high)
  end
end
return counts
