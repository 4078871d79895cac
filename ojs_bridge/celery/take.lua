-- Acknowledges what a worker has ended, then takes the oldest messages and notes that the worker has them.
-- KEYS: the hash of unacknowledged messages, its index by time, the hash of their workers, the workers that
-- live, those that listen for messages, then the lists of the queues, priority by priority.
-- ARGV: one character for each queue, 1 if it is consumed without acknowledgement, else 0; the worker; 1 if a
-- queue goes behind the others when it has given a message, else 0; the most messages to take; 1 if the worker
-- asks to be one of those that listen, else 0; then the delivery tags to acknowledge. What another worker has
-- now is not acknowledged.
-- Returns for each message the number of its list, its delivery tag, and the message. A first message that this
-- script cannot read is the error OJSNATIVE: kombu takes it in its own way. Returns 1 without a message if the
-- worker may listen: few do, since each message wakes all of them. The time is the server's.
-- It writes what kombu writes when it has read a message. It writes before it pops: a server without memory
-- refuses the writing, and then nothing may be popped.
local unacked, index, workers, listeners, first = KEYS[1], KEYS[2], KEYS[3], KEYS[5], 6
local flags, worker, turns, most = ARGV[1], ARGV[2], ARGV[3] == '1', tonumber(ARGV[4])
for n = 6, #ARGV do
  local has = redis.call('HGET', workers, ARGV[n])
  if not has or has == worker then
    redis.call('ZREM', index, ARGV[n])
    redis.call('HDEL', unacked, ARGV[n])
    redis.call('HDEL', workers, ARGV[n])
  end
end

local order, empty, shares, taken, now = {}, {}, {}, {}, nil
for queue = 1, #flags do order[queue] = queue end

-- The place in the order, the number, and the oldest message of the first list that has one.
local function oldest()
  for before = first - 1, #KEYS - 1, #flags do
    for place, queue in ipairs(order) do
      local n = before + queue
      local item = not empty[n] and redis.call('LINDEX', KEYS[n], -1)
      if item then return place, n, item end
      empty[n] = true
    end
  end
end

local function note(item)
  local read, message = pcall(cjson.decode, item)
  local properties = read and type(message) == 'table' and message.properties
  local info = type(properties) == 'table' and properties.delivery_info
  if type(info) ~= 'table' or type(properties.delivery_tag) ~= 'string' then
    return redis.error_reply('OJSNATIVE')
  end
  local route = cjson.encode(info.exchange or '') .. ',' .. cjson.encode(info.routing_key or '')
  local tag = properties.delivery_tag
  now = now or redis.call('TIME')
  local added = redis.pcall('ZADD', index, string.format('%d.%06d', now[1], now[2]), tag)
  if type(added) == 'table' then return added end
  redis.call('HSET', unacked, tag, '[' .. item .. ',' .. route .. ']')
  redis.call('HSET', workers, tag, worker)
  return tag
end

for _ = 1, most do
  local place, n, item = oldest()
  if not item or shares[n] == 0 then break end
  -- No worker takes more than its part at a time, and leaves one for those that do not tell that they live.
  if most > 1 and not shares[n] then
    shares[n] = math.max(1, math.floor(redis.call('LLEN', KEYS[n]) / (redis.call('ZCARD', KEYS[4]) + 1)))
  end
  local queue = order[place]
  local tag = string.sub(flags, queue, queue) == '1' and '' or note(item)
  if type(tag) == 'table' then
    if #taken == 0 then return tag end
    break
  end
  redis.call('RPOP', KEYS[n])
  taken[#taken + 1] = {n - first, tag, item}
  if turns then table.insert(order, table.remove(order, place)) end
  if shares[n] then shares[n] = shares[n] - 1 end
end
if #taken > 0 then redis.call('ZREM', listeners, worker) end
if #taken > 0 or ARGV[5] ~= '1' then return taken end

-- A server that takes no writes just now is no reason to stop looking.
local seconds = tonumber(redis.call('TIME')[1])
redis.pcall('ZREMRANGEBYSCORE', listeners, '-inf', seconds)
local may_listen = redis.call('ZSCORE', listeners, worker) or redis.call('ZCARD', listeners) < 2
local added = may_listen and redis.pcall('ZADD', listeners, seconds + 8, worker)
redis.pcall('EXPIRE', listeners, 60)
return type(added) == 'number' and 1 or taken
