-- Counts the records of some kinds together, between each two of some moments.
-- KEYS: by_kind
-- ARGV: the number of moments, moments..., kinds...
-- One count costs as much as the reading of dozens of entries.
local MANY = 500
local counts, ends, moments = {}, {}, tonumber(ARGV[1])
for n = 1, moments - 1 do counts[n], ends[n] = 0, tonumber(ARGV[n + 2]) end

for k = moments + 2, #ARGV do
  local prefix = ARGV[k] .. '\0'
  local function of(command, first, last)
    return redis.call(command, KEYS[1], '[' .. prefix .. ARGV[first], '(' .. prefix .. ARGV[last])
  end
  if of('ZLEXCOUNT', 2, moments + 1) > MANY then
    for n = 1, moments - 1 do counts[n] = counts[n] + of('ZLEXCOUNT', n + 1, n + 2) end
  else
    local n = 1
    for _, entry in ipairs(of('ZRANGEBYLEX', 2, moments + 1)) do
      local at = tonumber(string.sub(entry, #prefix + 1, #prefix + 15))
      while at >= ends[n] do n = n + 1 end
      counts[n] = counts[n] + 1
    end
  end
end
return counts
