"""Groups of dead letters in SQL, counted from the index of the fingerprints: a burial counts nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.engine import Connection

from ..filter import EVERYTHING, Filter
from ..protocol import NAMED, NEWEST, Group, GroupPage, Letter
from ..records import from_json, from_ms, group_number, group_of_number, index_text, to_ms
from .database import Database
from .statements import LARGEST_INTEGER, equals, matching
from .tables import groups as firsts
from .tables import letters

#: More groups than that are found sooner by counting all letters.
WALKED = 2000
_c = letters.c


class _Found(NamedTuple):
    """A group as the letters of a filter show it, with the types and queues of its newest letters first."""

    number: int
    first: int
    last: int
    #: Before the first of the times, between each two of them, and after the last.
    deaths: Sequence[int]
    types: Sequence[str]
    queues: Sequence[str]


def chosen(database: Database, where: Filter) -> Iterator[sa.ColumnElement[bool]]:
    """Yield the conditions of the letters that a filter chooses."""
    yield _c.namespace == database.namespace
    yield from equals(_c.queue, where.queue)
    yield from matching(_c.type, where.type, on_postgres=database.is_postgres)
    yield from matching(_c.error_type, where.error_type, on_postgres=database.is_postgres)
    if where.since is not None:
        yield _c.discarded_ms >= to_ms(where.since)
    if where.until is not None:
        yield _c.discarded_ms < to_ms(where.until)
    if where.but_queues:
        yield _c.queue.not_in([*map(index_text, where.but_queues)])
    if where.group is not None:
        yield _c.fault == group_number(where.group)


class GroupsQuery:
    """A question for a page of the groups of the letters that a filter chooses."""

    def __init__(self, database: Database, where: Filter, page: GroupPage) -> None:
        self._db, self._where, self._page = database, where, page
        self._chosen = tuple(chosen(database, where))

    def groups(self, connection: Connection) -> Sequence[Group]:
        """Return the groups; the deaths of those on the page are counted."""
        found = self._found(connection)
        if not found:
            return []
        heads = [(each.number, each.last) for each in found]
        samples = _by_number(connection.execute(self._newest(heads, 1, _c.record)))
        first = self._first_deaths(connection, found)
        return [
            _group(each, first[each.number], samples[each.number][0][1])
            for each in found
            # A letter may have gone meanwhile.
            if samples[each.number]
        ]

    def _found(self, connection: Connection) -> list[_Found]:
        """Return groups without their first deaths and samples."""
        if replace(self._where, since=None, until=None, group=None) != EVERYTHING:
            return self._found_at_once(connection)
        heads = self._heads(connection)
        if not heads:
            return []
        numbers = [head[0] for head in heads]
        deaths = _by_number(connection.execute(self._deaths(numbers)))
        last_seen = [(number, last) for number, _, last in heads]
        newest = _by_number(connection.execute(self._newest(last_seen, NEWEST, _c.type, _c.queue)))
        return [
            _Found(
                number,
                first,
                last,
                [each[2] for each in sorted(deaths[number])],
                [each[1] for each in newest[number]],
                [each[2] for each in newest[number]],
            )
            for number, first, last in heads
        ]

    def _found_at_once(self, connection: Connection) -> list[_Found]:
        """Return groups of some kind: the index of the fingerprints does not tell which letters those are."""
        page = self._page
        kinds = sa.select(
            *(_c.fault, _c.type, _c.queue, self._step().label("step"), sa.func.count().label("n")),
            sa.func.min(_c.discarded_ms).label("first"),
            sa.func.max(_c.discarded_ms).label("last"),
        )
        kind = (
            kinds.where(*self._chosen, *_grouped(page))
            .group_by(_c.fault, _c.type, _c.queue, sa.text("step"))
            .cte()
        )
        last, count = sa.func.max(kind.c.last), sa.func.sum(kind.c.n)
        heads = (
            sa.select(kind.c.fault)
            .group_by(kind.c.fault)
            .order_by(*_order(page, kind.c.fault, last, count))
            .limit(page.limit)
            .offset(page.offset)
            .cte()
        )
        query = sa.select(kind).join(heads, heads.c.fault == kind.c.fault).order_by(kind.c.last.desc())
        found = [
            _Found(
                number,
                min(row.first for row in rows),
                rows[0].last,
                _deaths_in(rows, len(page.times) + 1),
                [row.type for row in rows],
                [row.queue for row in rows],
            )
            for number, rows in _by_number(connection.execute(query)).items()
        ]
        found.sort(key=lambda one: (-one.last, -sum(one.deaths), one.number))
        return found if page.order == "last" else sorted(found, key=lambda one: -sum(one.deaths))

    def _step(self) -> sa.ColumnElement[int]:
        """Return how many of the times a letter's death does not come before."""
        ms = [*map(to_ms, self._page.times)]
        if self._db.is_postgres:
            return sa.func.width_bucket(_c.discarded_ms, sa.cast(ms, ARRAY(sa.BigInteger)))
        return sa.case(*((_c.discarded_ms < end, n) for n, end in enumerate(ms)), else_=len(ms))

    def _heads(self, connection: Connection) -> Sequence[Any]:
        """Return the number, the first and the last time of groups."""
        page = self._page
        if page.order == "last" and self._where.group is None:
            rows, but = connection.execute(self._walk()).all(), {*map(group_number, page.but)}
            if len(rows) <= WALKED:
                seen = [row for row in rows if row[2] is not None and row[0] not in but]
                return sorted(seen, key=lambda row: (-row[2], row[0]))[page.offset : page.offset + page.limit]
        last = sa.func.max(_c.discarded_ms)
        query = (
            sa.select(_c.fault, sa.func.min(_c.discarded_ms), last)
            .where(*self._chosen, *_grouped(page))
            .group_by(_c.fault)
            .order_by(*_order(page, _c.fault, last, sa.func.count()))
        )
        return connection.execute(query.limit(page.limit).offset(page.offset)).all()

    def _first_deaths(self, connection: Connection, found: Sequence[_Found]) -> Mapping[int, int]:
        """Return the first death of each group; of one that has kept none, that of its oldest letter."""
        ours = firsts.c.namespace == self._db.namespace, firsts.c.fault.in_([each.number for each in found])
        known = dict(connection.execute(sa.select(firsts.c.fault, firsts.c.first_ms).where(*ours)).all())
        return {each.number: min(known.get(each.number, each.first), each.first) for each in found}

    def _walk(self) -> sa.Select[Any]:
        """Return a query that steps from group to group in the index, and reads no letter between them."""
        ours, least = _c.namespace == self._db.namespace, sa.func.min(_c.fault)
        walk = sa.select(least.label("n"), sa.literal(0).label("k")).where(ours).cte(recursive=True)
        following = sa.select(least).where(ours, _c.fault > walk.c.n).correlate(walk).scalar_subquery()
        is_on = sa.and_(walk.c.n.is_not(None), walk.c.k < WALKED)
        walk = walk.union_all(sa.select(following, walk.c.k + 1).where(is_on))

        def time(which: Any) -> sa.ScalarSelect[Any]:
            same = sa.select(which(_c.discarded_ms)).where(*self._chosen, _c.fault == walk.c.n)
            return same.correlate(walk).scalar_subquery()

        return sa.select(walk.c.n, time(sa.func.min), time(sa.func.max)).where(walk.c.n.is_not(None))

    def _deaths(self, numbers: Sequence[int]) -> sa.Select[Any]:
        """Return a query that counts the letters of groups between the times, before and after them."""
        ms, where = [-LARGEST_INTEGER, *map(to_ms, self._page.times), LARGEST_INTEGER], self._where
        first = ms[0] if where.since is None else to_ms(where.since)
        last = ms[-1] if where.until is None else to_ms(where.until)
        groups = sa.union_all(*(sa.select(sa.literal(n, sa.BigInteger).label("n")) for n in numbers)).cte()
        spans = sa.union_all(
            *(
                sa.select(
                    *(sa.literal(n, sa.BigInteger).label(name) for name, n in (("k", k), ("a", a), ("b", b)))
                )
                for k, (a, b) in enumerate((max(a, first), min(b, last)) for a, b in pairwise(ms))
            )
        ).cte()
        # PostgreSQL without statistics would look for the time alone, and read the letters of all groups.
        place = sa.tuple_(_c.fault, _c.discarded_ms)
        count = (
            sa.select(sa.func.count())
            .where(_c.namespace == self._db.namespace, place >= sa.tuple_(groups.c.n, spans.c.a))
            .where(place < sa.tuple_(groups.c.n, spans.c.b))
            .correlate(groups, spans)
            .scalar_subquery()
        )
        return sa.select(groups.c.n, spans.c.k, count).select_from(groups.join(spans, sa.true()))

    def _newest(
        self, heads: Iterable[tuple[int, int]], limit: int, *columns: sa.Column[Any]
    ) -> sa.CompoundSelect[Any]:
        """Return a query of columns of the newest letters of groups, given the last times of these."""
        newest = sa.select(_c.fault, *columns).where(*self._chosen)
        newest = newest.order_by(_c.discarded_ms.desc()).limit(limit)
        # The time is where an index begins, also if the letters of a kind are few in the group.
        each = (newest.where(_c.fault == number, _c.discarded_ms <= last) for number, last in heads)
        return sa.union_all(*(sa.select(query.subquery()) for query in each))


def _by_number(rows: Any) -> defaultdict[int, list[Any]]:
    """Return the rows of each group, which its number begins."""
    by_number = defaultdict[int, list[Any]](list)
    for row in rows:
        by_number[row[0]].append(row)
    return by_number


def _grouped(page: GroupPage) -> tuple[sa.ColumnElement[bool], ...]:
    return (_c.fault.not_in([*map(group_number, page.but)]),)


def _order(page: GroupPage, fault: Any, last: Any, count: Any) -> Iterator[sa.ColumnElement[Any]]:
    by = (last, count) if page.order == "last" else (count, last)
    return iter((*(each.desc() for each in by), fault))


def _deaths_in(rows: Iterable[Any], steps: int) -> Sequence[int]:
    deaths = [0] * steps
    for row in rows:
        deaths[row.step] += row.n
    return deaths


def _group(found: _Found, first: int, record: str) -> Group:
    types, queues = (tuple(dict.fromkeys(each))[:NAMED] for each in (found.types, found.queues))
    return Group(
        group_of_number(found.number),
        sum(found.deaths),
        from_ms(first),
        from_ms(found.last),
        types,
        queues,
        tuple(found.deaths[1:-1]),
        from_json(Letter, record),
    )
