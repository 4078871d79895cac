-- Settles reservations; returns the positions, from 0, of those that their holders may not settle.
-- NEEDS: _settle
-- KEYS: reservations...
-- ARGV: fence, holder or '', keep_until, and the same of each other...
local lost = {}
for n = 1, #KEYS do
  if settle(KEYS[n], unpack(ARGV, 3 * n - 2, 3 * n)) == 0 then lost[#lost + 1] = n - 1 end
end
return lost
