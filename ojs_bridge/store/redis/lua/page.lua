-- Returns a page: a place and a record for each.
-- KEYS: records, by_time, by_kind
-- ARGV: size, order (newest or oldest), the last place of the page before or '', kinds... (none is all)
-- It compares strings byte by byte, because Lua's own order depends on the server's locale.
local size, newest, cursor = tonumber(ARGV[1]), ARGV[2] == 'newest', ARGV[3]

local function places(key, prefix, after, count)
  local low, high = '[' .. prefix, '(' .. prefix .. ':'
  local found
  if newest then
    if after ~= '' then high = '(' .. prefix .. after end
    found = redis.call('ZREVRANGEBYLEX', key, high, low, 'LIMIT', 0, count)
  else
    if after ~= '' then low = '(' .. prefix .. after end
    found = redis.call('ZRANGEBYLEX', key, low, high, 'LIMIT', 0, count)
  end
  for n = 1, #found do found[n] = string.sub(found[n], #prefix + 1) end
  return found
end

local function is_first(a, b)
  if newest then a, b = b, a end
  local x, y = tonumber(string.sub(a, 1, 15)), tonumber(string.sub(b, 1, 15))
  if x ~= y then return x < y end
  for n = 17, math.min(#a, #b) do
    x, y = string.byte(a, n), string.byte(b, n)
    if x ~= y then return x < y end
  end
  return #a < #b
end

local rows = {}

local function add(head)
  local low, high = 1, #rows + 1
  while low < high do
    local middle = math.floor((low + high) / 2)
    if is_first(head[1], rows[middle][1]) then low = middle + 1 else high = middle end
  end
  table.insert(rows, low, head)
end

local function merged()
  for n = 4, #ARGV do
    local prefix = ARGV[n] .. '\0'
    local first = places(KEYS[3], prefix, cursor, 1)[1]
    if first then rows[#rows + 1] = {first, prefix, {}, 1} end
  end
  table.sort(rows, function(a, b) return is_first(b[1], a[1]) end)
  local found = {}
  while #found < size and #rows > 0 do
    local row = table.remove(rows)
    found[#found + 1] = row[1]
    if not row[3][row[4]] then row[3], row[4] = places(KEYS[3], row[2], row[1], 20), 1 end
    row[1], row[4] = row[3][row[4]], row[4] + 1
    if row[1] then add(row) end
  end
  return found
end

local answer = {}
for _, place in ipairs(#ARGV > 3 and merged() or places(KEYS[2], '', cursor, size)) do
  answer[#answer + 1] = place
  answer[#answer + 1] = redis.call('HGET', KEYS[1], string.sub(place, 17))
end
return answer
