"""Dead letters in Redis, and the error entries for which a message has no room."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timedelta

from ...errors import StoreError
from ...rules.job import PlacedEntry
from ..protocol import EVERY_LETTER, Claim, Claimed, Letter, LetterFilter, Page, Stats, counts_of
from ..records import index_id, index_text, letter_from_json, letter_to_json, to_ms
from ..reservations import Settle
from .index import RedisIndex, Wanted, entry_of, place_of, rows_of, time_of, wanting
from .reservations import settle_words
from .server import RedisServer, Word

LARGEST_PLACE = 2**63 - 1
#: How many ids the server looks through at once: it answers nobody else meanwhile.
_SCANNED = 5_000


class RedisLetters:
    """The part of a store that holds dead letters: hashes of records, and an index for listings."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        listed = server.keys("letters", "letters:by_time", "letters:by_kind", "letters:kinds")
        self.records = listed[0]
        self.entries, self._letter_claims = server.keys("letters:entries", "letters:claims")
        # Workers of earlier releases keep other groups, under other keys.
        self.group_keys = server.keys("letters:by_fault", "letters:faults", "letters:fault_of")
        self.first_deaths = server.key("letters:first_deaths")
        self._letter_keys = (*listed, self.entries, self._letter_claims, *self.group_keys)
        self._letter_index = RedisIndex(server, listed, newest_first=True)
        self.group_index = RedisIndex(server, [*listed[:2], *self.group_keys[:2]], newest_first=True)

    def bury(self, letter: Letter, settle: Settle | None = None) -> bool:
        """Settle the job's reservation; write its letter in place of an earlier one and of kept entries."""
        return self._bury([letter], settle)

    def bury_all(self, letters: Sequence[Letter]) -> None:
        """Write letters in one script, each as `bury` does."""
        self._bury(letters, None)

    def _bury(self, letters: Sequence[Letter], settle: Settle | None) -> bool:
        keys = [*self._letter_keys, self.first_deaths, *(self._kept(letter.id) for letter in letters)]
        words: list[Word] = ["", "", ""]
        if settle:
            keys.append(self._server.reservation_key(settle.reservation))
            words = [*settle_words(settle)]
        for letter in letters:
            words += (index_id(letter.id), letter_to_json(letter), _entry(letter), letter.group)
        return bool(self._server.run("bury", keys, words))

    def index_texts(self, _text_of: Callable[[Letter], str | None], /) -> Iterator[int]:
        """Write nothing."""
        return iter(())

    def keep_errors(self, job_id: str, entries: Sequence[PlacedEntry]) -> None:
        """Keep error entries; an entry that is there already stays as it is."""
        for place, _ in entries:
            if abs(place) > LARGEST_PLACE:
                raise StoreError(f"place: {place} is out of range")
        if entries:
            words = [word for place, entry in entries for word in (place, json.dumps(entry))]
            self._server.run("keep_errors", (self._kept(job_id),), words)

    def kept_errors(self, job_id: str) -> list[PlacedEntry]:
        """Return the kept entries with their places, oldest first."""
        found = self._server.ask("HGETALL", self._kept(job_id))
        kept = [(int(place), json.loads(record)) for place, record in rows_of(found)]
        return sorted(kept, key=lambda placed: placed[0])

    def forget_errors(self, job_id: str) -> None:
        """Delete the kept entries of a job."""
        self._server.ask("DEL", self._kept(job_id))

    def list(
        self,
        where: LetterFilter,
        *,
        limit: int,
        cursor: str | None,
        oldest_first: bool = False,
        text: str | None = None,  # noqa: ARG002 - Redis has no index of texts
    ) -> Page:
        """Return a page, newest first. A cursor names a letter, so that new letters do not shift the page."""
        found, more = self._index(where).page(
            wanted_kinds(where),
            limit,
            cursor,
            since=where.since,
            until=where.until,
            oldest_first=oldest_first,
        )
        # A worker of an earlier release leaves the members of a group as they were.
        letters = ((place, letter_from_json(record.decode())) for place, record in found if record)
        now = (letter for place, letter in letters if place.decode() == self.cursor_after(letter))
        return Page(tuple(letter for letter in now if where.group in (None, letter.group)), more)

    def cursor_after(self, letter: Letter) -> str:
        """Return the cursor that names a letter."""
        return place_of(letter.discarded_at, index_id(letter.id))

    def count(self, where: LetterFilter) -> int:
        """Return how many letters there are of some kind."""
        return self._index(where).count(wanted_kinds(where), where.since, where.until)

    def prune(self, letters: Sequence[Letter], *, now: datetime) -> int:
        """Delete letters that nobody replays and whose jobs have not died again."""
        words: list[Word] = [to_ms(now)]
        for letter in letters:
            words += (index_id(letter.id), _entry(letter))
        return int(self._server.run("prune", self._letter_keys, words))

    def get(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None."""
        record = self._server.ask("HGET", self.records, index_id(letter_id))
        return None if record is None else letter_from_json(record.decode())

    def letters_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids that begin with a text. The server, which has no order of ids, looks through all."""
        begins = re.sub(r"[*?\[\\]", r"\\\g<0>", index_text(text)) + "*"
        found: set[str] = set()
        cursor = b"0"
        while len(found) < limit:
            words = ("HSCAN", self.entries, cursor, "MATCH", begins, "COUNT", _SCANNED)
            cursor, rows = self._server.ask(*words)
            found.update(letter_id.decode() for letter_id, _ in rows_of(rows))
            if cursor == b"0":
                break
        return sorted(found)[:limit]

    def claim(self, letter_ids: Sequence[str], *, now: datetime, seconds: float) -> Claimed:
        """Claim letters, atomically. A claim is a number that no other claim has."""
        token = secrets.randbits(62)
        until = to_ms(now + timedelta(seconds=seconds))
        words: tuple[Word, ...] = (to_ms(now), until, token, *map(index_id, letter_ids))
        records = self._server.run("claim_letters", (self.records, self._letter_claims), words)
        return Claimed(token, tuple(letter_from_json(record.decode()) for record in records))

    def unclaim(self, letter_ids: Sequence[str], claim: Claim) -> None:
        """End the claims that are still ours."""
        self._server.run("unclaim_letters", (self._letter_claims,), (claim, *map(index_id, letter_ids)))

    def delete(self, letter_ids: Sequence[str], claim: Claim) -> int:
        """Delete the letters whose claim is still ours. A letter that is buried anew has no claim."""
        return int(self._server.run("delete_letters", self._letter_keys, (claim, *map(index_id, letter_ids))))

    def stats(self, where: LetterFilter = EVERY_LETTER) -> Stats:
        """Count the letters of some kind, in all and by queue, type and last error type."""
        found = self._index(where).counts(wanted_kinds(where), where.since, where.until)
        return counts_of([(texts[-3:], n, time_of(first), time_of(last)) for texts, n, first, last in found])

    def _index(self, where: LetterFilter) -> RedisIndex:
        return self._letter_index if where.group is None else self.group_index

    def _kept(self, job_id: str) -> bytes:
        return self._server.key(f"kept:{index_id(job_id)}")


def _entry(letter: Letter) -> str:
    texts = (letter.queue, letter.type, letter.error_type)
    return entry_of(texts, letter.discarded_at, index_id(letter.id))


def wanted_kinds(where: LetterFilter) -> Wanted | None:
    """Return which kinds of an index a filter wants; None for all."""
    wanted = wanting(where.queue, where.type, where.error_type, but_queues=where.but_queues)
    if where.group is None:
        return wanted
    return lambda texts: texts[0] == where.group and (wanted is None or wanted(texts[1:]))
