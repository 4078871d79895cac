-- Settles a reservation and deletes its message in one step, by `companion`, which is the broker's own Lua.
-- Returns 1 for a settled reservation plus 2 for a deleted message. Without a fence only the companion runs.
-- NEEDS: _settle
-- KEYS: reservation, the companion's keys...
-- ARGV: fence or '', holder or '', keep_until, the broker's database, the store's database, the companion's words...
-- Repeated, it finds the message gone.
if ARGV[4] ~= ARGV[5] then redis.call('SELECT', ARGV[4]) end
local gone = companion({unpack(KEYS, 2)}, {unpack(ARGV, 6)})
if ARGV[4] ~= ARGV[5] then redis.call('SELECT', ARGV[5]) end
if ARGV[1] == '' then return 1 end
return settle(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) + 2 * gone
