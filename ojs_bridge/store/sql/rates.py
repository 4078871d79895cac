"""Rates in SQL: a row for each span, job type, queue and outcome, with a column for each duration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from ..rates import BOUNDS, KEPT, SECONDS, Rate, Span, begun
from ..records import from_ms, index_id, index_text, to_ms
from .database import Database
from .statements import New, Upsert
from .tables import rates as table

_c = table.c
_PLACE = ("key", "seconds", "at_ms")
_COUNTS = tuple(f"count_{place}" for place in range(len(BOUNDS) + 1))


def _added(new: New) -> dict[str, Any]:
    return {name: _c[name] + new[name] for name in _COUNTS}


_ADD = Upsert(table, "queue", changes=_added)


class SQLRates:
    """The part of a store that holds rates."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def record_rates(self, rates: Sequence[Rate], writer: str, number: int) -> None:  # noqa: ARG002
        """Add to the counts, in one transaction."""
        # All processes write in the same order, so that no two of them wait for each other's rows.
        rows = sorted((row for rate in rates for row in self._rows(rate)), key=itemgetter(*_PLACE))
        if rows:
            with self._db.connection(durable=True) as connection:
                _ADD.all(connection, rows)

    def rates(self, since: datetime, until: datetime, span: Span) -> list[Rate]:
        """Return the rates of the spans that begin in a time, by time."""
        ours = _c.namespace == self._db.namespace, _c.seconds == SECONDS[span]
        query = sa.select(table).where(*ours, _c.at_ms >= to_ms(since), _c.at_ms < to_ms(until))
        with self._db.connection() as connection:
            rows = connection.execute(query.order_by(_c.at_ms, _c.key)).all()
        return [
            Rate(from_ms(row.at_ms), row.type, row.queue, row.outcome, tuple(row[-len(_COUNTS) :]))
            for row in rows
        ]

    def forget_rates(self, now: datetime) -> None:
        """Delete old rates."""
        for span, kept in KEPT.items():
            old = _c.seconds == SECONDS[span], _c.at_ms < to_ms(now - kept)
            self._db.change(sa.delete(table), [sa.and_(_c.namespace == self._db.namespace, *old)])

    def _rows(self, rate: Rate) -> Iterator[dict[str, Any]]:
        told = tuple(map(index_text, (rate.type, rate.queue, rate.outcome)))
        for span, seconds in SECONDS.items():
            yield {
                "namespace": self._db.namespace,
                "seconds": seconds,
                "at_ms": begun(rate.at, span),
                "key": index_id("\n".join(told)),
                **dict(zip(("type", "queue", "outcome"), told, strict=True)),
                **dict(zip(_COUNTS, rate.counts, strict=True)),
            }
