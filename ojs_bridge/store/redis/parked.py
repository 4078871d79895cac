"""Parked retries in Redis."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime

from ..parked import ALL_PARKED, Due, Parked, ParkedFilter, ParkedPage
from ..records import index_id, index_text, parked_from_json, parked_to_json, to_ms
from ..reservations import Settle
from .index import RedisIndex, Rows, entry_of, moment, rows_of, time_of, wanting
from .reservations import settle_words
from .server import RedisServer, Word


class RedisParked:
    """The part of a store that holds parked retries."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        listed = server.keys("parked", "parked:by_time", "parked:by_kind", "parked:kinds")
        others = server.keys("parked:states", "parked:ready", "parked:jobs", "parked:claims", "parked:tokens")
        self._parked_keys = (*listed, *others)
        self._parked_index = RedisIndex(server, listed, newest_first=False)

    def park(self, parked: Parked, settle: Settle | None = None) -> bool:
        """Settle the job's reservation and write its retry, in one step."""
        key, fence, parked_at = _identity(parked)
        keys = [*self._parked_keys]
        entry = entry_of((parked.queue, parked.type), parked.next_retry_at, index_id(parked.key))
        words = [key, parked_to_json(parked), fence, parked_at, entry, index_id(parked.id), parked.framework]
        if settle:
            keys.append(self._server.reservation_key(settle.reservation))
            words += settle_words(settle)
        return bool(self._server.run("park", keys, words))

    def claim_due(self, framework: str, *, now: datetime, until: datetime, limit: int) -> Due:
        """Claim a framework's due retries, the longest due first, atomically."""
        token = secrets.token_hex(8)
        words = (to_ms(now), to_ms(until), token, limit, framework, f"{moment(now)};")
        return Due(token, _retries(rows_of(self._server.run("claim_due", self._parked_keys, words))))

    def claim_parked(self, keys: Sequence[str], *, now: datetime, until: datetime) -> Due:
        """Claim the retries of these keys that nobody has claimed, atomically."""
        token = secrets.token_hex(8)
        words: tuple[Word, ...] = (to_ms(now), to_ms(until), token, *map(index_id, keys))
        return Due(token, _retries(rows_of(self._server.run("claim_parked", self._parked_keys, words))))

    def unpark(self, retries: Sequence[Parked], claim: str) -> int:
        """Delete published retries that this claim still holds; return how many."""
        words = (claim, *(index_id(parked.key) for parked in retries))
        return int(self._server.run("unpark", self._parked_keys, words))

    def unclaim_parked(self, retries: Sequence[Parked], claim: str) -> None:
        """End the claim of retries that could not be published."""
        words = (claim, *(index_id(parked.key) for parked in retries))
        self._server.run("unclaim_parked", self._parked_keys, words)

    def list_parked(self, where: ParkedFilter, *, limit: int, cursor: str | None) -> ParkedPage:
        """Return a page, the next one due first."""
        found, more = self._parked_index.page(wanting(where.queue, where.type), limit, cursor)
        return ParkedPage(_retries(found), more)

    def get_parked(self, job_id: str) -> Parked | None:
        """Return a job's parked retry, or None."""
        found = rows_of(self._server.run("get_parked", self._parked_keys, (index_id(job_id),)))
        return _retries(found)[0] if found else None

    def parked_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids of jobs that begin with a text, from the sorted set of jobs."""
        begin = index_text(text).encode()
        found: list[bytes] = []
        low, high = b"[" + begin, b"(" + begin + b"\xff"
        while len(found) < limit:
            rows = self._server.ask("ZRANGEBYLEX", self._parked_keys[6], low, high, "LIMIT", 0, 1)
            if not rows:
                break
            found.append(rows[0].partition(b"\0")[0])
            low = b"(" + found[-1] + b"\1"
        return [job.decode() for job in found]

    def reschedule(self, parked: Parked, at: datetime) -> bool:
        """Make a retry due at another time; False when it is claimed, was replaced or is gone."""
        words = (*_identity(parked), moment(at))
        return bool(self._server.run("reschedule", self._parked_keys, words))

    def cancel_parked(self, parked: Parked) -> bool:
        """Delete a retry; False when it is claimed, was replaced or is gone."""
        return bool(self._server.run("cancel_parked", self._parked_keys, _identity(parked)))

    def count_parked(self, where: ParkedFilter = ALL_PARKED) -> int:
        """Count the parked retries that match a filter."""
        return self._parked_index.count(wanting(where.queue, where.type), None, None)


def _identity(parked: Parked) -> tuple[Word, Word, Word]:
    return index_id(parked.key), parked.fence, moment(parked.parked_at)


def _retries(rows: Rows) -> tuple[Parked, ...]:
    return tuple(parked_from_json(record.decode(), due_ms=to_ms(time_of(place))) for place, record in rows)
