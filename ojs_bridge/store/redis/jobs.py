"""Jobs under way in Redis: reservations, with one record per key, which expires, and parked retries.

`lua/_settle.lua` says the form of a reservation.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from ...errors import StoreError
from ...rules.job import Job
from ..filter import EVERYTHING, Filter, Kind
from ..jobs import (
    KEEP,
    LOOKED,
    OUTLIVE_MS,
    SUSPECTED,
    Due,
    DueCounts,
    Grant,
    Parked,
    ParkedPage,
    Reservation,
    ReserveAnswer,
    Settle,
)
from ..protocol import Letter
from ..records import from_json, from_ms, index_id, index_text, to_json, to_ms
from .index import (
    LOT,
    RedisIndex,
    Rows,
    Wanted,
    entry_of,
    moment,
    place_of,
    rows_of,
    texts_of,
    time_of,
    wanting,
)
from .server import RedisServer, Word

_SUSPECTED_MS = SUSPECTED // timedelta(milliseconds=1)
PARKED_KEYS = (
    *("parked", "parked:by_time", "parked:by_kind", "parked:kinds"),
    *("parked:states", "parked:ready", "parked:jobs", "parked:claims", "parked:tokens"),
)
LETTER_KEYS = (
    *("letters", "letters:by_time", "letters:by_kind", "letters:kinds", "letters:entries", "letters:claims"),
    *("letters:by_fault", "letters:faults", "letters:fault_of"),
)
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


class RedisReservedRuns:
    """The reservations of a store."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._parked, self._letters = server.keys(*PARKED_KEYS), server.keys(*LETTER_KEYS)

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
        answer: int | list[Any] = self._server.run("reserve", self._keys(reservation), words)
        if isinstance(answer, int):
            return _WITHOUT_TIME[answer]
        grant = Grant.HELD if len(answer) == _OF_ONE_HELD else Grant.LOST
        its_holder, its_mark = (text.decode("utf-8", "surrogatepass") for text in answer[1:3])
        return ReserveAnswer(grant, from_ms(answer[0]), its_holder, its_mark)

    def extend(
        self, reservations: Sequence[Reservation], *, holder: str, until: datetime
    ) -> Sequence[Reservation]:
        """Extend the unsettled reservations of `holder`; return those that `holder` has lost."""
        if not reservations:
            return []
        end = to_ms(until)
        words: list[Word] = [holder, end, end + OUTLIVE_MS, *map(_fence, reservations)]
        return [reservations[n] for n in self._server.run("extend", self._keys(*reservations), words)]

    def under_way(self, reservations: Sequence[Reservation], *, now: datetime) -> Mapping[Reservation, str]:
        """Return those that are neither settled nor expired, with their holders."""
        if not reservations:
            return {}
        words: list[Word] = [to_ms(now), *map(_fence, reservations)]
        found = self._server.run("under_way", self._keys(*reservations), words)
        return {reservations[n]: holder.decode("utf-8", "surrogatepass") for n, holder in found}

    def settle(self, settle: Settle) -> bool:
        """Mark a reservation as settled; False when the record has another fence or holder."""
        return not self.settle_all([settle])

    def settle_all(self, settles: Sequence[Settle]) -> Sequence[Reservation]:
        """Mark reservations as settled; return those whose records have another fence or holder."""
        lost = [each.reservation for each in settles if each.job and not self._settle_last(each, each.job)]
        plain = [settle for settle in settles if settle.job is None]
        if not plain:
            return lost
        words = [word for settle in plain for word in settle_words(settle)]
        reservations = [settle.reservation for settle in plain]
        return lost + [reservations[n] for n in self._server.run("settle", self._keys(*reservations), words)]

    def _settle_last(self, settle: Settle, job: Job) -> bool:
        """Settle a reservation; delete the parked retry and the letters that earlier messages have left.

        While its run is reserved, no other worker can write more of them.
        """
        words: list[Word] = [*settle_words(settle), index_id(job.key)]
        for letter_id in map(index_id, (job.letter_id, job.own_letter_id)):
            record = self._server.ask("HGET", self._letters[0], letter_id)
            letter = from_json(Letter, record.decode()) if record else None
            if letter and letter.is_left_by(job, settle.keep_until - KEEP):
                words += (letter_id, place_of(letter.discarded_at, letter_id))
        keys = [*self._parked, *self._letters, *self._keys(settle.reservation)]
        return bool(self._server.run("settle_last", keys, words))

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

    def suspect(self, family: str, *, gone: bool) -> timedelta | None:
        """Return for how long a family has been suspected; the time is what its key has lived of a day."""
        key = self._suspect_key(family)
        if gone:
            self._server.ask("SET", key, "", "PX", _SUSPECTED_MS, "NX")
        left: int = self._server.ask("PTTL", key)
        return timedelta(milliseconds=_SUSPECTED_MS - left) if left >= 0 else None

    def clear(self, family: str) -> None:
        """End the suspicion against a family."""
        self._server.ask("DEL", self._suspect_key(family))

    def _suspect_key(self, family: str) -> bytes:
        return self._server.key(f"suspect:{index_id(family)}")

    def _keys(self, *reservations: Reservation) -> list[bytes]:
        return [*map(self._server.reservation_key, reservations)]


def settle_words(settle: Settle) -> tuple[Word, ...]:
    """Return the fence, the holder and the record's end, as the scripts take them."""
    return _fence(settle.reservation), settle.holder or "", to_ms(settle.keep_until)


def _fence(reservation: Reservation) -> int:
    if not 0 <= reservation.fence <= LARGEST_FENCE:
        raise StoreError(f"fence: {reservation.fence} is not between 0 and {LARGEST_FENCE}")
    return reservation.fence


class RedisParkedJobs:
    """The parked retries of a store."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._parked_keys = server.keys(*PARKED_KEYS)
        self._parked_index = RedisIndex(server, self._parked_keys[:4], newest_first=False)

    def park(self, parked: Parked, settle: Settle | None = None) -> bool:
        """Settle the job's reservation and write its retry, in one step."""
        key, fence, parked_at = _identity(parked)
        keys = [*self._parked_keys]
        texts = (parked.queue, parked.type, parked.kind)
        entry = entry_of(texts, parked.next_retry_at, index_id(parked.key))
        words = [key, to_json(parked), fence, parked_at, entry, index_id(parked.id), parked.framework]
        if settle:
            keys.append(self._server.reservation_key(settle.reservation))
            words += settle_words(settle)
        return bool(self._server.run("park", keys, words))

    def claim_due(self, framework: str, *, now: datetime, until: datetime, limit: int) -> Due:
        """Claim a framework's due retries, the longest due first, atomically."""
        token = secrets.token_hex(8)
        words = (to_ms(now), to_ms(until), token, limit, framework, f"{moment(now)};")
        return Due(token, _retries(rows_of(self._server.run("claim_due", self._parked_keys, words))))

    def claim(self, keys: Sequence[str], *, now: datetime, until: datetime) -> Due:
        """Claim the retries of these keys that nobody has claimed, atomically."""
        token = secrets.token_hex(8)
        words: tuple[Word, ...] = (to_ms(now), to_ms(until), token, *map(index_id, keys))
        return Due(token, _retries(rows_of(self._server.run("claim_parked", self._parked_keys, words))))

    def unpark(self, retries: Sequence[Parked], claim: str) -> int:
        """Delete published retries that this claim still holds; return how many."""
        words = (claim, *(index_id(parked.key) for parked in retries))
        return int(self._server.run("unpark", self._parked_keys, words))

    def unclaim(self, retries: Sequence[Parked], claim: str) -> None:
        """End the claim of retries that could not be published."""
        words = (claim, *(index_id(parked.key) for parked in retries))
        self._server.run("unclaim_parked", self._parked_keys, words)

    def list(self, where: Filter, *, limit: int, cursor: str | None) -> ParkedPage:
        """Return a page, the next one due first."""
        rows, more = self._parked_index.page(_wanted(where), limit, cursor)
        return ParkedPage(_retries(rows), more)

    def get(self, job_id: str, kind: Kind | None = None) -> Parked | None:
        """Return a parked job, or None."""
        rows = rows_of(self._server.run("get_parked", self._parked_keys, (index_id(job_id), kind or "")))
        return _retries(rows)[0] if rows else None

    def ids_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids of jobs that begin with a text, from the sorted set of jobs."""
        begin = index_text(text).encode()
        jobs: list[bytes] = []
        low, high = b"[" + begin, b"(" + begin + b"\xff"
        while len(jobs) < limit:
            rows = self._server.ask("ZRANGEBYLEX", self._parked_keys[6], low, high, "LIMIT", 0, 1)
            if not rows:
                break
            jobs.append(rows[0].partition(b"\0")[0])
            low = b"(" + jobs[-1] + b"\1"
        return [job.decode() for job in jobs]

    def reschedule(self, parked: Parked, at: datetime) -> bool:
        """Make a retry due at another time; False when it is claimed, was replaced or is gone."""
        words = (*_identity(parked), moment(at))
        return bool(self._server.run("reschedule", self._parked_keys, words))

    def cancel(self, parked: Parked, *, drop_until: datetime | None = None) -> bool:
        """Delete a retry, and settle its reservation; False when it is claimed, has begun or is gone."""
        keys, words = [*self._parked_keys], [*_identity(parked)]
        if drop_until is not None:
            keys.append(self._server.reservation_key(Reservation(parked.key, parked.fence)))
            words += (to_ms(drop_until), parked.publication)
        return bool(self._server.run("cancel_parked", keys, words))

    def count(self, where: Filter = EVERYTHING) -> int:
        """Count the parked retries that match a filter."""
        return self._parked_index.count(_wanted(where), None, None)

    def due(self, where: Filter, since: datetime, step: timedelta, steps: int) -> DueCounts:
        """Count what is due: the server counts between two times in its index, however many lie there."""
        moments = ["", *(moment(since + n * step) for n in range(steps + 1))]
        all_names = self._parked_index.kinds_of(_wanted(where))
        if len(all_names) > LOT and self._parked_index.count(None, None, since + steps * step) > LOOKED:
            return DueCounts(0, {})
        names = defaultdict[str, list[str]](list)
        for name in all_names:
            names[texts_of(name)[2]].append(name.decode())
        return DueCounts(
            steps + 1, {kind: self._parked_index.between(its, moments) for kind, its in names.items()}
        )


def _wanted(where: Filter) -> Wanted | None:
    return wanting(where.queue, where.type, where.kind)


def _identity(parked: Parked) -> tuple[Word, Word, Word]:
    return index_id(parked.key), parked.fence, moment(parked.parked_at)


def _retries(rows: Rows) -> tuple[Parked, ...]:
    return tuple(from_json(Parked, record.decode(), next_retry_at=time_of(place)) for place, record in rows)
