-- A function that lets a script go on where the server's memory is full: after its first write none is refused.
-- It is for what frees memory, and for the few small records that come before that.

local function go_on_if_full()
  redis.call('DEL', KEYS[1] .. ':none')
end
