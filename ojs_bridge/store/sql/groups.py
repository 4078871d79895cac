"""Groups of dead letters in SQL, counted from the index of the fingerprints: a burial counts nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from ..protocol import NAMED, NEWEST, Group, LetterFilter, Order
from ..records import from_ms, group_number, group_of_number, letter_from_json, to_ms
from . import growing
from .letters import SQLLetters
from .statements import batches
from .tables import GROUPED, letters

_BATCH = 500
_c = letters.c


class SQLGroups(SQLLetters):
    """The part of a store that holds dead letters and their groups."""

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
        """Return groups: all are counted, and of those on the page the deaths are."""
        matching = [*self._matching(where), _c.fingerprint.is_not(None)]
        if but:
            matching.append(_c.fingerprint.not_in([*map(group_number, but)]))
        last, count = sa.func.max(_c.discarded_ms), sa.func.count()
        by = (last, count) if order == "last" else (count, last)
        heads = (
            sa.select(_c.fingerprint, count, sa.func.min(_c.discarded_ms), last)
            .where(*matching)
            .group_by(_c.fingerprint)
            .order_by(*(each.desc() for each in by), _c.fingerprint)
            .limit(limit)
            .offset(offset)
        )
        with self._statement() as connection:
            rows = connection.execute(heads).all()
            if not rows:
                return []
            numbers = [row[0] for row in rows]
            deaths = _by_number(connection.execute(self._deaths(numbers, where, times)))
            newest = _by_number(connection.execute(self._newest(numbers, where, NEWEST, _c.type, _c.queue)))
            samples = _by_number(connection.execute(self._newest(numbers, where, 1, _c.record)))
        return [
            _group(row, [each[2] for each in sorted(deaths[row[0]])], newest[row[0]], samples[row[0]])
            for row in rows
            # A letter may have gone meanwhile.
            if samples[row[0]]
        ]

    def _deaths(
        self, numbers: Sequence[int], where: LetterFilter, times: Sequence[datetime]
    ) -> sa.Select[Any]:
        """Return a query that counts a range of the index for each group and each two times."""
        ms = [*map(to_ms, times)]
        groups = sa.union_all(*(sa.select(sa.literal(n, sa.BigInteger).label("n")) for n in numbers)).cte()
        spans = sa.union_all(
            *(
                sa.select(sa.literal(a, sa.BigInteger).label("a"), sa.literal(b, sa.BigInteger).label("b"))
                for a, b in pairwise(ms)
            )
        ).cte()
        count = (
            sa.select(sa.func.count())
            .where(*self._matching(where), _c.fingerprint == groups.c.n)
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
                    sa.select(_c.fingerprint, *columns)
                    .where(*self._matching(where), _c.fingerprint == number)
                    .order_by(_c.discarded_ms.desc())
                    .limit(limit)
                    .subquery()
                )
                for number in numbers
            )
        )

    def group_older(self) -> Iterator[int]:
        """Add the column and the index if they are missing, and fill in the fingerprints."""
        self._get_ready()
        self._has_fingerprints = self._has_fingerprints or self._grow()
        done = _BATCH if self._has_fingerprints and self._has_index() else 0
        while done == _BATCH:
            done = self._group_some()
            yield done

    def _has_index(self) -> bool:
        """Return whether the index of the groups is there; build it if it is not."""
        if self._is_postgres:
            with self._errors():
                return growing.build_concurrently(self._durable.url)
        with self._unprepared() as connection:
            GROUPED.create(connection, checkfirst=True)
        return True

    def _group_some(self) -> int:
        is_older = sa.and_(_c.namespace == self._namespace, _c.fingerprint.is_(None))
        with self._statement() as connection:
            rows = connection.execute(sa.select(_c.id, _c.record).where(is_older).limit(_BATCH)).all()
        ids = defaultdict[str, list[str]](list)
        for letter_id, record in rows:
            ids[letter_from_json(record).group].append(letter_id)
        for group, same in ids.items():
            change = sa.update(letters).where(is_older).values(fingerprint=group_number(group))
            self._change(change, map(_c.id.in_, batches(same)))
        return len(rows)


def _by_number(rows: Any) -> defaultdict[int, list[Any]]:
    """Return the rows of each group, which its number begins."""
    found = defaultdict[int, list[Any]](list)
    for row in rows:
        found[row[0]].append(tuple(row))
    return found


def _group(row: Any, deaths: Sequence[int], newest: Sequence[Any], samples: Sequence[Any]) -> Group:
    number, count, first, last = row
    types, queues = (tuple(dict.fromkeys(each[place] for each in newest))[:NAMED] for place in (1, 2))
    return Group(
        group_of_number(number),
        count,
        from_ms(first),
        from_ms(last),
        types,
        queues,
        tuple(deaths),
        letter_from_json(samples[0][1]),
    )
