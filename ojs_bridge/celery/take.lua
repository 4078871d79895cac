-- Takes the oldest message of the first list that has one, and notes that a worker has it.
-- KEYS: the hash of unacknowledged messages, its index by time, then the lists of the queues by priority.
-- ARGV[1]: one character for each list: 1 if its queue is consumed without acknowledgement, else 0.
-- Returns the list and the message, or false where every list is empty. The time is the server's: so the command
-- is the same each time, and a worker packs it once.
-- It writes what kombu writes when it has read a message. It writes before it pops: a server without memory
-- refuses the writing, and then nothing may be popped.
for n = 3, #KEYS do
  local item = redis.call('LINDEX', KEYS[n], -1)
  if item then
    local owed = string.sub(ARGV[1], n - 2, n - 2) == '0'
    local read, message = pcall(cjson.decode, owed and item or '')
    local properties = read and type(message) == 'table' and message.properties
    local info = properties and properties.delivery_info
    if info and properties.delivery_tag then
      local route = cjson.encode(info.exchange or '') .. ',' .. cjson.encode(info.routing_key or '')
      local now = redis.call('TIME')
      redis.call('ZADD', KEYS[2], string.format('%d.%06d', now[1], now[2]), properties.delivery_tag)
      redis.call('HSET', KEYS[1], properties.delivery_tag, '[' .. item .. ',' .. route .. ']')
    end
    redis.call('RPOP', KEYS[n])
    return {KEYS[n], item}
  end
end
return false
