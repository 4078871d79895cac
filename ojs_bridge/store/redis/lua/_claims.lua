-- A function that returns whether a dead letter's claim has a token.

local function is_ours(claims, id, token)
  local held = redis.call('HGET', claims, id)
  return held and string.match(held, ' (.+)') == token
end
