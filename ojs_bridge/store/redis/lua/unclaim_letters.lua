-- Ends the claims of dead letters that still have this token.
-- NEEDS: _claims
-- KEYS: claims
-- ARGV: token, ids...
-- A token that is gone stays gone.
for n = 2, #ARGV do
  if is_ours(KEYS[1], ARGV[n], ARGV[1]) then redis.call('HDEL', KEYS[1], ARGV[n]) end
end
return 0
