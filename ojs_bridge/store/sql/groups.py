"""Groups of dead letters in SQL, counted from the index of the fingerprints: a burial counts nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import pairwise
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from ...errors import StoreError
from ..protocol import EVERY_LETTER, NAMED, NEWEST, Group, LetterFilter, Order
from ..records import from_ms, group_in, group_number, group_of_number, letter_from_json, to_ms
from .database import Database
from .letters import SQLLetters
from .statements import LARGEST_INTEGER, batches
from .tables import FAULT, letters
from .tables import groups as firsts

_BATCH = 500
#: More groups than that are found sooner by counting all letters.
WALKED = 2000
_c = letters.c


class SQLGroups:
    """The part of a store that groups its dead letters."""

    def __init__(self, database: Database, letters: SQLLetters) -> None:
        self._db, self._letters = database, letters

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
        """Return groups; the deaths of those on the page are counted."""
        self._db.get_ready()
        if not self._db.has(FAULT.name):
            raise StoreError(
                f"the store {self._db.shown!r} has no groups: it lacks a column, and the log says why"
            )
        while True:
            with self._db.connection() as connection:
                heads = self._heads(connection, where, order, {*map(group_number, but)}, limit, offset)
                if not heads:
                    return []
                numbers = [head[0] for head in heads]
                deaths = _by_number(connection.execute(self._deaths(numbers, where, times)))
                newest = _by_number(
                    connection.execute(self._newest(numbers, where, NEWEST, _c.type, _c.queue))
                )
                samples = _by_number(connection.execute(self._newest(numbers, where, 1, _c.record)))
                first = self._first_deaths(connection, heads)
            found = [
                _group(
                    (head[0], first[head[0]], head[2]),
                    [each[2] for each in sorted(deaths[head[0]])],
                    newest[head[0]],
                    samples[head[0]],
                )
                for head in heads
                # A letter may have gone meanwhile.
                if samples[head[0]]
            ]
            strays = [group for group in found if group.sample.group != group.fingerprint]
            if not strays:
                return found
            for group in strays:
                # A listing takes those that it meets out of the group.
                self._letters.list(replace(where, group=group.fingerprint), limit=_BATCH, cursor=None)

    def _heads(
        self,
        connection: Connection,
        where: LetterFilter,
        order: Order,
        but: set[int],
        limit: int,
        offset: int,
    ) -> Sequence[Any]:
        """Return the number, the first and the last time of groups."""
        if order == "last" and replace(where, since=None, until=None) == EVERY_LETTER:
            rows = connection.execute(self._walk(where)).all()
            if len(rows) <= WALKED:
                seen = [row for row in rows if row[2] is not None and row[0] not in but]
                return sorted(seen, key=lambda row: (-row[2], row[0]))[offset : offset + limit]
        last, count = sa.func.max(_c.discarded_ms), sa.func.count()
        by = (last, count) if order == "last" else (count, last)
        query = (
            sa.select(_c.fault, sa.func.min(_c.discarded_ms), last)
            .where(*self._letters.chosen(where), _c.fault.is_not(None), _c.fault.not_in(but))
            .group_by(_c.fault)
            .order_by(*(each.desc() for each in by), _c.fault)
        )
        return connection.execute(query.limit(limit).offset(offset)).all()

    def _first_deaths(self, connection: Connection, heads: Sequence[Any]) -> Mapping[int, int]:
        """Return the first death of each group; of one that has kept none, that of its oldest letter."""
        known: dict[int, int] = {}
        if self._db.has(firsts.name):
            ours = firsts.c.namespace == self._db.namespace, firsts.c.fault.in_([head[0] for head in heads])
            known.update(connection.execute(sa.select(firsts.c.fault, firsts.c.first_ms).where(*ours)).all())
        return {number: min(known.get(number, oldest), oldest) for number, oldest, _ in heads}

    def group_sizes(self, where: LetterFilter) -> Mapping[str, tuple[int, datetime]]:
        """Count the letters of each group."""
        self._db.get_ready()
        if not self._db.has(FAULT.name):
            return {}
        query = sa.select(_c.fault, sa.func.count(), sa.func.max(_c.discarded_ms)).group_by(_c.fault)
        with self._db.connection() as connection:
            rows = connection.execute(query.where(*self._letters.chosen(where), _c.fault.is_not(None))).all()
        return {group_of_number(number): (count, from_ms(last)) for number, count, last in rows}

    def forget_groups(self, *, before: datetime) -> int:
        """Forget the first deaths of groups that are gone."""
        if not (self._db.has(firsts.name) and self._db.has(FAULT.name)):
            return 0
        has_letters = sa.exists().where(_c.namespace == firsts.c.namespace, _c.fault == firsts.c.fault)
        return self._db.change(sa.delete(firsts).where(firsts.c.first_ms < to_ms(before), ~has_letters))

    def _walk(self, where: LetterFilter) -> sa.Select[Any]:
        """Return a query that steps from group to group in the index, and reads no letter between them."""
        ours, least = _c.namespace == self._db.namespace, sa.func.min(_c.fault)
        walk = sa.select(least.label("n"), sa.literal(0).label("k")).where(ours).cte(recursive=True)
        following = sa.select(least).where(ours, _c.fault > walk.c.n).correlate(walk).scalar_subquery()
        is_on = sa.and_(walk.c.n.is_not(None), walk.c.k < WALKED)
        walk = walk.union_all(sa.select(following, walk.c.k + 1).where(is_on))

        def time(which: Any) -> sa.ScalarSelect[Any]:
            same = sa.select(which(_c.discarded_ms)).where(*self._letters.chosen(where), _c.fault == walk.c.n)
            return same.correlate(walk).scalar_subquery()

        return sa.select(walk.c.n, time(sa.func.min), time(sa.func.max)).where(walk.c.n.is_not(None))

    def _deaths(
        self, numbers: Sequence[int], where: LetterFilter, times: Sequence[datetime]
    ) -> sa.Select[Any]:
        """Return a query that counts the letters of groups between the times, before and after them."""
        ms = [-LARGEST_INTEGER, *map(to_ms, times), LARGEST_INTEGER]
        groups = sa.union_all(*(sa.select(sa.literal(n, sa.BigInteger).label("n")) for n in numbers)).cte()
        spans = sa.union_all(
            *(
                sa.select(sa.literal(a, sa.BigInteger).label("a"), sa.literal(b, sa.BigInteger).label("b"))
                for a, b in pairwise(ms)
            )
        ).cte()
        count = (
            sa.select(sa.func.count())
            .where(*self._letters.chosen(where), _c.fault == groups.c.n)
            .where(_c.discarded_ms >= spans.c.a, _c.discarded_ms < spans.c.b)
            .correlate(groups, spans)
            .scalar_subquery()
        )
        return sa.select(groups.c.n, spans.c.a, count).select_from(groups.join(spans, sa.true()))

    def _newest(
        self, numbers: Sequence[int], where: LetterFilter, limit: int, *columns: sa.Column[Any]
    ) -> sa.CompoundSelect[Any]:
        """Return a query of columns of the newest letters of each group."""
        return sa.union_all(
            *(
                sa.select(
                    sa.select(_c.fault, *columns)
                    .where(*self._letters.chosen(where), _c.fault == number)
                    .order_by(_c.discarded_ms.desc())
                    .limit(limit)
                    .subquery()
                )
                for number in numbers
            )
        )

    def group_older(self) -> Iterator[int]:
        """Add the column and the index if they are missing, and fill in the fingerprints."""
        self._db.get_ready()
        if not self._db.has(FAULT.name):
            self._db.grow(at_once=True)
        done = _BATCH if self._db.has(FAULT.name) and self._db.build_index() else 0
        while done == _BATCH:
            done = self._group_some()
            yield done

    def _group_some(self) -> int:
        """Group some letters, without one that a replay or a deletion is changing: none waits for another."""
        is_older = sa.and_(_c.namespace == self._db.namespace, _c.fault.is_(None))
        query = (
            sa.select(_c.id, _c.record, _c.discarded_ms)
            .where(is_older)
            .limit(_BATCH)
            .with_for_update(skip_locked=True)
        )
        ids, first = defaultdict[str, list[str]](list), dict[str, int]()
        with self._db.connection(durable=True) as connection:
            rows = connection.execute(query).all()
            for letter_id, record, ms in rows:
                group = group_in(record)
                ids[group].append(letter_id)
                first[group] = min(first.get(group, ms), ms)
            # In one order, so that no two processes wait for each other.
            for group, same in sorted(ids.items()):
                self._letters.keep_first(connection, group_number(group), first[group])
                change = sa.update(letters).where(is_older).values(fault=group_number(group))
                for batch in batches(same):
                    connection.execute(change.where(_c.id.in_(batch)))
        return len(rows)


def _by_number(rows: Any) -> defaultdict[int, list[Any]]:
    """Return the rows of each group, which its number begins."""
    found = defaultdict[int, list[Any]](list)
    for row in rows:
        found[row[0]].append(tuple(row))
    return found


def _group(head: Any, deaths: Sequence[int], newest: Sequence[Any], samples: Sequence[Any]) -> Group:
    number, first, last = head
    types, queues = (tuple(dict.fromkeys(each[place] for each in newest))[:NAMED] for place in (1, 2))
    return Group(
        group_of_number(number),
        sum(deaths),
        from_ms(first),
        from_ms(last),
        types,
        queues,
        tuple(deaths[1:-1]),
        letter_from_json(samples[0][1]),
    )
