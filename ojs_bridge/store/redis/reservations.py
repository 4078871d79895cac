"""Reservations in Redis: one record per key, which expires; `lua/_settle.lua` says its form."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from ...errors import StoreError
from ..records import from_ms, to_ms
from ..reservations import Grant, Reservation, ReserveAnswer, Settle
from .server import RedisServer, Script, Word, lua

#: How long an unsettled record outlives its reservation.
OUTLIVE_MS = timedelta(weeks=1) // timedelta(milliseconds=1)
#: Lua counts exactly up to this number.
LARGEST_FENCE = 2**53

#: The length of the answer HELD. The answer LOST is longer.
_OF_ONE_HELD = 3
_WITHOUT_TIME = {
    -1: ReserveAnswer(Grant.TAKEN),
    -2: ReserveAnswer(Grant.LOST),
    -3: ReserveAnswer(Grant.SETTLED),
    -4: ReserveAnswer(Grant.RESENT),
}


class RedisReservations:
    """The part of a store that holds reservations."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def reserve(
        self,
        reservation: Reservation,
        *,
        publication: str,
        holder: str,
        mark: str,
        now: datetime,
        until: datetime,
    ) -> ReserveAnswer:
        """Reserve a run until a time, atomically."""
        end = to_ms(until)
        words: list[Word] = [_fence(reservation), publication, holder, to_ms(now), end]
        words += (end + OUTLIVE_MS, mark)
        told: int | list[Any] = self._server.run("reserve", self._keys(reservation), words)
        if isinstance(told, int):
            return _WITHOUT_TIME[told]
        grant = Grant.HELD if len(told) == _OF_ONE_HELD else Grant.LOST
        its_holder, its_mark = (text.decode("utf-8", "surrogatepass") for text in told[1:3])
        return ReserveAnswer(grant, from_ms(told[0]), its_holder, its_mark)

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the unsettled reservations of `holder`; return those that `holder` has lost."""
        if not reservations:
            return []
        end = to_ms(until)
        words: list[Word] = [holder, end, end + OUTLIVE_MS, *map(_fence, reservations)]
        return [reservations[n] for n in self._server.run("extend", self._keys(*reservations), words)]

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as settled; False when the record has another fence or holder."""
        return bool(self._server.run("settle", self._keys(settle.reservation), settle_words(settle)))

    def release(self, settle: Settle) -> bool:
        """Release a reservation unused; False when the record has another fence or holder, or is settled."""
        words = (*settle_words(settle), settle.mark)
        return bool(self._server.run("release", self._keys(settle.reservation), words))

    def expire(self, reservations: Sequence[Reservation]) -> None:
        """Delete the records of settled reservations that have the same fence and were never lost."""
        if reservations:
            self._server.run("expire", self._keys(*reservations), [*map(_fence, reservations)])

    def expire_before(self, now: datetime, *, limit: int) -> int:  # noqa: ARG002
        """Do nothing: Redis deletes settled records itself."""
        return 0

    def joint(self, companion: str, *, run_id: str, database: int) -> Joint | None:
        """Return a joint with a companion; None where the store is not on the server with this `run_id`."""
        return Joint(self._server, companion, database) if self._server.run_id() == run_id else None

    def _keys(self, *reservations: Reservation) -> list[bytes]:
        return [*map(self._server.reservation_key, reservations)]


class Joint:
    """Settles a reservation and deletes its message in one step, where store and broker share a server.

    The companion is Lua code that deletes the message from the broker. It takes `keys` and `words`, writes
    first, and returns 1 for a deleted message and 0 for one that was not there.
    """

    def __init__(self, server: RedisServer, companion: str, database: int) -> None:
        self._server = server
        self._databases = (database, server.database)
        code = f"local function companion(keys, words)\n{companion}\nend\n"
        self._script = Script(code + lua("settle_along"))

    def settle(self, settle: Settle, keys: Sequence[bytes], words: Sequence[Word]) -> tuple[bool, bool]:
        """Settle a reservation, run the companion, and return whether each was done; raises StoreError."""
        key = self._server.reservation_key(settle.reservation)
        done = self._run((key, *keys), (*settle_words(settle), *self._databases, *words))
        return bool(done & 1), bool(done & 2)

    def works(self, keys: Sequence[bytes], words: Sequence[Word]) -> bool:
        """Run the companion alone; return whether the server allows that."""
        try:
            keys = (self._server.key("schema"), *keys)
            return bool(self._run(keys, ("", "", "", *self._databases, *words)))
        except StoreError:
            return False

    def _run(self, keys: Sequence[bytes], words: Sequence[Word]) -> int:
        done: int = self._server.run(self._script, keys, words)
        return done


def settle_words(settle: Settle) -> tuple[Word, ...]:
    """Return the fence, the holder and the record's end, as the scripts take them."""
    return _fence(settle.reservation), settle.holder or "", to_ms(settle.keep_until)


def _fence(reservation: Reservation) -> int:
    if not 0 <= reservation.fence <= LARGEST_FENCE:
        raise StoreError(f"fence: {reservation.fence} is not between 0 and {LARGEST_FENCE}")
    return reservation.fence
