"""Dead letters in Redis, the error entries for which a message has no room, and groups.

The groups are a second index of the letters, whose kinds begin with the fingerprint.
"""

from __future__ import annotations

import json
import re
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any, TypeAlias

from ...errors import StoreError
from ...rules.job import PlacedEntry
from ..filter import EVERYTHING, Filter
from ..jobs import Settle
from ..protocol import (
    BIN_KEPT,
    NAMED,
    Bin,
    Claim,
    Claimed,
    Group,
    GroupPage,
    Letter,
    Order,
    Page,
    Stats,
    counts_of,
)
from ..records import from_json, index_id, index_text, to_json, to_ms
from .index import RedisIndex, Wanted, entry_of, lots, moment, place_of, rows_of, time_of, wanting
from .jobs import LETTER_KEYS, settle_words
from .server import RedisServer, Word

LARGEST_PLACE = 2**63 - 1
#: How many ids, and how many groups, the server looks through at once: it answers nobody else meanwhile.
_IDS_AT_ONCE, _GROUPS_AT_ONCE = 5_000, 100
#: How long a bin keeps its letters, and how many of them the server looks at, or moves, at once.
_KEPT_MS, _BINNED_AT_ONCE = BIN_KEPT // timedelta(milliseconds=1), 100
#: A kind of letters: its texts, their number, the places of the oldest and the newest.
Kind: TypeAlias = tuple[Sequence[str], int, bytes, bytes]

#: How many members of a group are looked at for a letter that is still there.
_TRIED = 20


class RedisLetters:
    """The dead letters of a store: hashes of records, and an index for listings; a second one for groups."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        self._keys = server.keys(*LETTER_KEYS)
        listed, (self._entries, self._claims) = self._keys[:4], self._keys[4:6]
        self._records, self._group_keys = listed[0], self._keys[6:]
        self._first_deaths = server.key("letters:first_deaths")
        self._by_time = RedisIndex(server, listed, newest_first=True)
        self._group_index = RedisIndex(server, [*listed[:2], *self._group_keys[:2]], newest_first=True)

    def bury(self, letter: Letter, settle: Settle | None = None) -> bool:
        """Settle the job's reservation; write its letter in place of an earlier one and of kept entries."""
        return self._bury([letter], settle)

    def bury_all(self, letters: Sequence[Letter]) -> None:
        """Write letters in one script, each as `bury` does."""
        self._bury(letters, None)

    def _bury(self, letters: Sequence[Letter], settle: Settle | None) -> bool:
        keys = [*self._keys, self._first_deaths, *(self._kept(letter.id) for letter in letters)]
        words: list[Word] = ["", "", ""]
        if settle:
            keys.append(self._server.reservation_key(settle.reservation))
            words = [*settle_words(settle)]
        for letter in letters:
            words += (index_id(letter.id), to_json(letter), _entry(letter), letter.group)
        return bool(self._server.run("bury", keys, words))

    def keep_errors(self, letter_id: str, entries: Sequence[PlacedEntry]) -> None:
        """Keep error entries; an entry that is there already stays as it is."""
        for place, _ in entries:
            if abs(place) > LARGEST_PLACE:
                raise StoreError(f"place: {place} is out of range")
        if entries:
            words = [word for place, entry in entries for word in (place, json.dumps(entry))]
            self._server.run("keep_errors", (self._kept(letter_id),), words)

    def kept_errors(self, letter_id: str) -> list[PlacedEntry]:
        """Return the kept entries with their places, oldest first."""
        answer = self._server.ask("HGETALL", self._kept(letter_id))
        kept = [(int(place), json.loads(record)) for place, record in rows_of(answer)]
        return sorted(kept, key=lambda placed: placed[0])

    def forget_errors(self, letter_id: str) -> None:
        """Delete the kept entries of a job."""
        self._server.ask("DEL", self._kept(letter_id))

    def list(self, where: Filter, *, limit: int, cursor: str | None, oldest_first: bool = False) -> Page:
        """Return a page, newest first.

        A cursor names a letter, so that new letters do not shift the page.
        """
        rows, more = self._index(where).page(
            _wanted_kinds(where),
            limit,
            cursor,
            since=where.since,
            until=where.until,
            oldest_first=oldest_first,
        )
        return Page(tuple(from_json(Letter, record.decode()) for _, record in rows if record), more)

    def cursor_after(self, letter: Letter) -> str:
        """Return the cursor that names a letter."""
        return place_of(letter.discarded_at, index_id(letter.id))

    def count(self, where: Filter) -> int:
        """Return how many letters there are of some kind."""
        return self._index(where).count(_wanted_kinds(where), where.since, where.until)

    def prune(self, letters: Sequence[Letter], *, now: datetime, into: Bin | None = None) -> int:
        """Delete letters that nobody replays and whose jobs have not died again."""
        words: list[Word] = [to_ms(now), _KEPT_MS]
        for letter in letters:
            words += (index_id(letter.id), _entry(letter))
        return int(self._server.run("prune", self._with(into), words))

    def get(self, letter_id: str) -> Letter | None:
        """Return a dead letter, or None."""
        record = self._server.ask("HGET", self._records, index_id(letter_id))
        return None if record is None else from_json(Letter, record.decode())

    def ids_beginning(self, text: str, limit: int) -> Sequence[str]:
        """Return ids that begin with a text. The server, which has no order of ids, looks through all."""
        begins = re.sub(r"[*?\[\\]", r"\\\g<0>", index_text(text)) + "*"
        ids: set[str] = set()
        cursor = b"0"
        while len(ids) < limit:
            words = ("HSCAN", self._entries, cursor, "MATCH", begins, "COUNT", _IDS_AT_ONCE)
            cursor, rows = self._server.ask(*words)
            ids.update(letter_id.decode() for letter_id, _ in rows_of(rows))
            if cursor == b"0":
                break
        return sorted(ids)[:limit]

    def claim(self, letter_ids: Sequence[str], *, now: datetime, seconds: float) -> Claimed:
        """Claim letters, atomically. A claim is a number that no other claim has."""
        token = secrets.randbits(62)
        until = to_ms(now + timedelta(seconds=seconds))
        words: tuple[Word, ...] = (to_ms(now), until, token, *map(index_id, letter_ids))
        records = self._server.run("claim_letters", (self._records, self._claims), words)
        return Claimed(token, tuple(from_json(Letter, record.decode()) for record in records))

    def unclaim(self, letter_ids: Sequence[str], claim: Claim) -> None:
        """End the claims that are still ours."""
        self._server.run("unclaim_letters", (self._claims,), (claim, *map(index_id, letter_ids)))

    def delete(self, letter_ids: Sequence[str], claim: Claim, into: Bin | None = None) -> int:
        """Delete the letters whose claim is still ours. A letter that is buried anew has no claim."""
        words: Sequence[Word] = (claim, _KEPT_MS, *map(index_id, letter_ids))
        return int(self._server.run("delete_letters", self._with(into), words))

    def binned(self, deletion: str, *, since: datetime) -> Iterator[Sequence[Letter]]:  # noqa: ARG002
        """Yield the letters of a bin, which Redis deletes at its time; one may come twice."""
        cursor = b"0"
        while True:
            cursor, rows = self._server.ask("HSCAN", self._bin(deletion), cursor, "COUNT", _BINNED_AT_ONCE)
            if rows:
                yield [from_json(Letter, record.decode()) for _, record in rows_of(rows)]
            if cursor == b"0":
                return

    def restore(self, deletion: str, letters: Sequence[Letter]) -> Collection[str]:
        """Take letters out of a bin; each lot in one script."""
        there = set[str]()
        for lot in lots(letters, _BINNED_AT_ONCE):
            keys = [*self._keys, self._first_deaths, self._bin(deletion)]
            keys += [self._server.reservation_key(letter.last_run) for letter in lot]
            words: list[Word] = []
            for letter in lot:
                words += (index_id(letter.id), _entry(letter), letter.group, letter.last_run.fence)
            there.update(lot[n].id for n in self._server.run("restore", keys, words))
        return there

    def forget_bin(self, *, before: datetime) -> int:  # noqa: ARG002
        """Do nothing: Redis deletes the bins itself."""
        return 0

    def _bin(self, deletion: str) -> bytes:
        return self._server.key(f"bin:{index_id(deletion)}")

    def _with(self, into: Bin | None) -> Sequence[bytes]:
        return [*self._keys, self._bin(into.deletion)] if into else self._keys

    def stats(self, where: Filter = EVERYTHING) -> Stats:
        """Count the letters of some kind, in all and by queue, type and last error type."""
        rows = self._index(where).counts(_wanted_kinds(where), where.since, where.until)
        return counts_of([(texts[-3:], n, time_of(first), time_of(last)) for texts, n, first, last in rows])

    def groups(self, where: Filter, page: GroupPage) -> Sequence[Group]:
        """Return groups: their kinds are counted on the server, and put together here."""
        kinds_of = defaultdict[str, list[Kind]](list)
        for kind in self._kinds(where, page.but):
            kinds_of[kind[0][0]].append(kind)
        named = sorted(kinds_of, key=lambda name: (_rank(kinds_of[name], page.order), name), reverse=True)
        chosen = named[page.offset : page.offset + page.limit]
        first = self._server.ask("HMGET", self._first_deaths, *chosen) if chosen else []
        groups = (
            self._group(name, kinds_of[name], known, where, page.times)
            for name, known in zip(chosen, first, strict=True)
        )
        return [group for group in groups if group is not None]

    def group_sizes(self, where: Filter) -> Mapping[str, tuple[int, datetime]]:
        """Count the letters of each group: the kinds of a group are put together here."""
        sizes: dict[str, tuple[int, datetime]] = {}
        for texts, count, _, last in self._kinds(where):
            known, newest = sizes.get(texts[0], (0, time_of(last)))
            sizes[texts[0]] = known + count, max(newest, time_of(last))
        return sizes

    def _kinds(self, where: Filter, but: Collection[str] = ()) -> Iterator[Kind]:
        """Return the kinds of a filter's letters, without some groups; the first text is the fingerprint."""
        wanted = _wanted_kinds(replace(where, group=None))

        def is_wanted(texts: Sequence[str]) -> bool:
            is_named = where.group in (None, texts[0]) and texts[0] not in but
            return is_named and (wanted is None or wanted(texts[1:]))

        return self._group_index.counts(is_wanted, where.since, where.until)

    def _group(
        self,
        name: str,
        kinds: Sequence[Kind],
        known: bytes | None,
        where: Filter,
        times: Sequence[datetime],
    ) -> Group | None:
        oldest, newest = min(first for *_, first, _ in kinds), max(last for *_, last in kinds)
        oldest = oldest if known is None else min(oldest, known)
        sample = self._sample(name, newest, where)
        if sample is None:
            return None
        kinds = sorted(kinds, key=lambda kind: kind[1], reverse=True)
        names = ["\0".join(texts) for texts, *_ in kinds]
        queues, types = (tuple(dict.fromkeys(texts[place] for texts, *_ in kinds)) for place in (1, 2))
        return Group(
            name,
            sum(count for _, count, _, _ in kinds),
            time_of(oldest),
            time_of(newest),
            types[:NAMED],
            queues[:NAMED],
            tuple(self._group_index.between(names, [*map(moment, times)])),
            sample,
        )

    def _sample(self, name: str, newest: bytes, where: Filter) -> Letter | None:
        """Return the newest letter of a group, or one that is still there."""
        letter = self.get(newest.decode().partition(":")[2])
        if letter and letter.group == name and self.cursor_after(letter) == newest.decode():
            return letter
        others = self.list(replace(where, group=name), limit=_TRIED, cursor=None).letters
        return others[0] if others else None

    def forget_groups(self, *, before: datetime) -> int:
        """Forget the first deaths of groups that are gone."""
        forgotten, cursor = 0, b"0"
        while True:
            cursor, rows = self._server.ask("HSCAN", self._first_deaths, cursor, "COUNT", _GROUPS_AT_ONCE)
            old = [name for name, at in rows_of(rows) if time_of(at) < before]
            if old:
                keys = (self._first_deaths, self._group_keys[0])
                forgotten += int(self._server.run("forget_groups", keys, old))
            if cursor == b"0":
                return forgotten

    def _index(self, where: Filter) -> RedisIndex:
        return self._by_time if where.group is None else self._group_index

    def _kept(self, letter_id: str) -> bytes:
        return self._server.key(f"kept:{index_id(letter_id)}")


def _entry(letter: Letter) -> str:
    texts = (letter.queue, letter.type, letter.error_type)
    return entry_of(texts, letter.discarded_at, index_id(letter.id))


def _wanted_kinds(where: Filter) -> Wanted | None:
    """Return which kinds of an index a filter wants; None for all."""
    wanted = wanting(where.queue, where.type, where.error_type, but_queues=where.but_queues)
    if where.group is None:
        return wanted
    return lambda texts: texts[0] == where.group and (wanted is None or wanted(texts[1:]))


def _rank(kinds: Sequence[Kind], order: Order) -> tuple[Any, Any]:
    """Return the place of a group with these kinds: a greater one comes first."""
    last, count = max(last for *_, last in kinds), sum(count for _, count, *_ in kinds)
    return (time_of(last), count) if order == "last" else (count, time_of(last))
