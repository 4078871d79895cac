"""Groups of dead letters in Redis: a second index of the letters, whose kinds begin with the fingerprint."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from operator import add
from typing import Any, TypeAlias

from ..protocol import NAMED, Group, Letter, LetterFilter, Order
from ..records import group_in
from .index import LOT, lots, moment, rows_of, time_of
from .letters import RedisLetters, wanted_kinds
from .server import RedisServer, Word

#: A kind of letters: its texts, their number, the places of the oldest and the newest.
Kind: TypeAlias = tuple[Sequence[str], int, bytes, bytes]

#: How many letters the server looks through at once: it answers nobody else meanwhile.
_SCANNED = 100
_BEGINNING = (b"0", b"0", b"0")
#: How many members of a group are looked at for a letter that is still there.
_TRIED = 20


class RedisGroups:
    """The part of a store that groups its dead letters."""

    def __init__(self, server: RedisServer, letters: RedisLetters) -> None:
        self._server, self._letters = server, letters
        self._is_compared = False
        #: Where the comparison is, in the three scans of its script.
        self._compared: tuple[bytes, ...] = _BEGINNING

    def groups(
        self,
        where: LetterFilter,
        *,
        order: Order,
        but: Collection[str],
        times: Sequence[datetime],
        limit: int,
        offset: int,
    ) -> list[Group]:
        """Return groups: their kinds are counted on the server, and put together here."""
        kinds_of = defaultdict[str, list[Kind]](list)
        wanted = wanted_kinds(replace(where, group=None))

        def is_wanted(texts: Sequence[str]) -> bool:
            is_named = where.group in (None, texts[0]) and texts[0] not in but
            return is_named and (wanted is None or wanted(texts[1:]))

        for kind in self._letters.group_index.counts(is_wanted, where.since, where.until):
            kinds_of[kind[0][0]].append(kind)
        named = sorted(kinds_of, key=lambda name: (_rank(kinds_of[name], order), name), reverse=True)
        chosen = named[offset : offset + limit]
        first = self._server.ask("HMGET", self._letters.first_deaths, *chosen) if chosen else []
        found = (
            self._group(name, kinds_of[name], known, where, times)
            for name, known in zip(chosen, first, strict=True)
        )
        return [group for group in found if group is not None]

    def group_sizes(self, where: LetterFilter) -> Mapping[str, tuple[int, datetime]]:
        """Count the letters of each group: the kinds of a group are put together here."""
        wanted = wanted_kinds(replace(where, group=None))

        def is_wanted(texts: Sequence[str]) -> bool:
            return where.group in (None, texts[0]) and (wanted is None or wanted(texts[1:]))

        found: dict[str, tuple[int, datetime]] = {}
        for texts, count, _, last in self._letters.group_index.counts(is_wanted, where.since, where.until):
            known, newest = found.get(texts[0], (0, time_of(last)))
            found[texts[0]] = known + count, max(newest, time_of(last))
        return found

    def _group(
        self,
        name: str,
        kinds: list[Kind],
        known: bytes | None,
        where: LetterFilter,
        times: Sequence[datetime],
    ) -> Group | None:
        oldest, newest = min(first for *_, first, _ in kinds), max(last for *_, last in kinds)
        oldest = oldest if known is None else min(oldest, known)
        sample = self._sample(name, newest, where)
        if sample is None:
            return None
        kinds.sort(key=lambda kind: kind[1], reverse=True)
        queues, types = (tuple(dict.fromkeys(texts[place] for texts, *_ in kinds)) for place in (1, 2))
        return Group(
            name,
            sum(count for _, count, _, _ in kinds),
            time_of(oldest),
            time_of(newest),
            types[:NAMED],
            queues[:NAMED],
            self._deaths(["\0".join(texts) for texts, *_ in kinds], times),
            sample,
        )

    def _deaths(self, kinds: Sequence[str], times: Sequence[datetime]) -> tuple[int, ...]:
        """Return how many letters of these kinds have died between each two times."""
        head: list[Word] = [len(times), *map(moment, times)]
        deaths = [0] * (len(times) - 1)
        for lot in lots(kinds, max(1, LOT * 3 // len(times))):
            found = self._server.run("deaths", self._letters.group_keys[:1], [*head, *lot])
            deaths = [*map(add, deaths, found)]
        return tuple(deaths)

    def _sample(self, name: str, newest: bytes, where: LetterFilter) -> Letter | None:
        """Return the newest letter of a group, or one that is still there."""
        found = self._letters.get(newest.decode().partition(":")[2])
        if found and found.group == name and self._letters.cursor_after(found) == newest.decode():
            return found
        others = self._letters.list(replace(where, group=name), limit=_TRIED, cursor=None).letters
        return others[0] if others else None

    def group_older(self) -> Iterator[int]:
        """Compare the groups with the letters, and put right what workers of earlier releases have left.

        A process looks through all letters once, and goes on where it was when it was ended. Later it does so
        only if the groups have more letters, or fewer: such a worker may still be there.
        """
        if self._is_compared and self._have_as_many():
            return
        while any(self._compared):
            yield self._compare_some()
        self._is_compared, self._compared = True, _BEGINNING
        # What workers of earlier releases kept; one that still runs makes its groups again.
        self._server.ask(
            "UNLINK", *self._server.keys("letters:by_group", "letters:groups", "letters:grouped")
        )

    def forget_groups(self, *, before: datetime) -> int:
        """Forget the first deaths of groups that are gone."""
        forgotten, cursor = 0, b"0"
        while True:
            cursor, rows = self._server.ask("HSCAN", self._letters.first_deaths, cursor, "COUNT", _SCANNED)
            old = [name for name, at in rows_of(rows) if time_of(at) < before]
            if old:
                keys = (self._letters.first_deaths, self._letters.group_keys[0])
                forgotten += int(self._server.run("forget_groups", keys, old))
            if cursor == b"0":
                return forgotten

    def _have_as_many(self) -> bool:
        by_group, _, grouped = self._letters.group_keys
        asked = (("HLEN", self._letters.entries), ("HLEN", grouped), ("ZCARD", by_group))
        return len({self._server.ask(*words) for words in asked}) == 1

    def _compare_some(self) -> int:
        """Compare some letters and their groups. Their records, which may be large, are read one by one."""
        keys = (self._letters.entries, *self._letters.group_keys)
        *compared, ungrouped = self._server.run("ungrouped", keys, (*self._compared, _SCANNED))
        words: list[Word] = []
        for letter_id, entry in rows_of(ungrouped):
            record = self._server.ask("HGET", self._letters.records, letter_id) or b""
            words += (letter_id, group_in(record.decode(errors="replace")), entry)
        done = int(self._server.run("group", (*keys, self._letters.first_deaths), words)) if words else 0
        self._compared = tuple(compared)
        return done


def _rank(kinds: Sequence[Kind], order: Order) -> tuple[Any, Any]:
    """Return the place of a group with these kinds: a greater one comes first."""
    last, count = max(last for *_, last in kinds), sum(count for _, count, *_ in kinds)
    return (time_of(last), count) if order == "last" else (count, time_of(last))
