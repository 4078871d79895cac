-- Settles a reservation; returns 0 when the holder may not settle it.
-- NEEDS: _settle
-- KEYS: reservation
-- ARGV: fence, holder or '', keep_until
return settle(KEYS[1], ARGV[1], ARGV[2], ARGV[3])
