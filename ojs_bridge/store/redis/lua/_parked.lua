-- Functions for parked retries. All their scripts have the same KEYS.
-- A state is packed: fence, the time of parking, index entry, job, framework. `ready` holds the framework and
-- the place of each retry without a claim, `claims` the end of each claim by key, `tokens` the token of the
-- last claim of each key. A retry that is written anew has no claim.

local function state_of(key)
  local state = redis.call('HGET', KEYS[5], key)
  if state then return cmsgpack.unpack(state) end
end

local function place_of(entry)
  local _, place = split(entry)
  return place
end

local function unclaimed(key)
  redis.call('ZREM', KEYS[8], key)
  redis.call('HDEL', KEYS[9], key)
end

local function ready_of(entry, framework)
  return framework .. '\0' .. place_of(entry)
end

local function erase_place(entry, framework)
  redis.call('ZREM', KEYS[6], ready_of(entry, framework))
  leave(KEYS[2], KEYS[3], KEYS[4], entry)
end

local function write(key, fence, parked_at, entry, job, framework)
  redis.call('HSET', KEYS[5], key, cmsgpack.pack(fence, parked_at, entry, job, framework))
  redis.call('ZADD', KEYS[6], 0, ready_of(entry, framework))
  redis.call('ZADD', KEYS[7], 0, job .. '\0' .. key)
  enter(KEYS[2], KEYS[3], KEYS[4], entry)
  unclaimed(key)
end

local function erase(key, entry, job, framework)
  erase_place(entry, framework)
  redis.call('HDEL', KEYS[1], key)
  redis.call('HDEL', KEYS[5], key)
  redis.call('ZREM', KEYS[7], job .. '\0' .. key)
  unclaimed(key)
end

-- A worker that was too slow for its claim may still publish: a retry that was once claimed is not the same.
local function is_same(key, fence, parked_at, its_fence, its_parked_at)
  local same = its_fence == tonumber(fence) and its_parked_at == parked_at
  return same and redis.call('HEXISTS', KEYS[9], key) == 0
end
