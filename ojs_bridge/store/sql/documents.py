"""Documents and rates in SQL; rates have a row for each span, job type, queue and outcome."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any

import sqlalchemy as sa

from ..documents import BOUNDS, KEPT, SECONDS, Document, DocumentPage, Rate, Span, begun
from ..records import from_json, from_ms, index_id, index_text, to_json, to_ms
from . import tables
from .database import Database
from .statements import New, Upsert, batches, page

_d = tables.documents.c


def _is_next(new: New) -> sa.ColumnElement[bool]:
    """Return the condition that a row follows the one that is there, or is written again."""
    again = sa.and_(_d.revision == new["revision"], _d.record == new["record"])
    return sa.or_(_d.revision == new["revision"] - 1, again)


_WRITE = Upsert(tables.documents, "at_ms", "revision", "record", where=_is_next)
_LISTED = sa.select(_d.record, _d.at_ms, _d.id)

_t = tables.rates.c
_place = itemgetter("key", "seconds", "at_ms")
_COUNTS = tuple(f"count_{place}" for place in range(len(BOUNDS) + 1))


def _added(new: New) -> dict[str, Any]:
    return {name: _t[name] + new[name] for name in _COUNTS}


_ADD = Upsert(tables.rates, "queue", changes=_added, may_be_lost=True)


class SQLDocuments:
    """The documents and rates of a store."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def write(self, document: Document, *, of_operator: bool = False) -> bool:  # noqa: ARG002
        """Write a document in place of its earlier revision."""
        row = {
            "namespace": self._db.namespace,
            "kind": document.kind,
            "id": index_id(document.id),
            "at_ms": to_ms(document.at),
            "revision": document.revision,
            "record": to_json(document),
        }
        with self._db.connection(durable=True) as connection:
            return _WRITE(connection, row)

    def get(self, kind: str, document_id: str) -> Document | None:
        """Return a document, or None."""
        query = sa.select(_d.record).where(*self._of_kind(kind), _d.id == index_id(document_id))
        with self._db.connection() as connection:
            record = connection.execute(query).scalar()
        return None if record is None else from_json(Document, record)

    def list(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:
        """Return a page, newest first."""
        with self._db.connection() as connection:
            rows, more = page(connection, _LISTED.where(*self._of_kind(kind)), limit, cursor, newest=True)
        return DocumentPage(tuple(from_json(Document, row.record) for row in rows), more)

    def count(self, kinds: Collection[str]) -> Mapping[str, int]:
        """Count documents by kind."""
        counts: dict[str, int] = {}
        for batch in batches([*kinds]):
            query = sa.select(_d.kind, sa.func.count()).group_by(_d.kind)
            with self._db.connection() as connection:
                rows = connection.execute(query.where(_d.namespace == self._db.namespace, _d.kind.in_(batch)))
                counts.update((kind, count) for kind, count in rows)
        return counts

    def forget(self, kind: str, *, before: datetime) -> int:
        """Delete older documents."""
        older = _d.kind == kind, _d.at_ms < to_ms(before)
        return self._db.change(sa.delete(tables.documents).where(*older))

    def record_rates(self, rates: Sequence[Rate], writer: str, number: int) -> None:  # noqa: ARG002
        """Add to the counts, in one transaction."""
        rows: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in (row for rate in rates for row in self._rows(rate)):
            known = rows.setdefault(_place(row), row)
            if known is not row:
                known.update((name, known[name] + row[name]) for name in _COUNTS)
        if rows:
            # All processes write in the same order, so that no two of them wait for each other's rows.
            self._db.write(_ADD, *(rows[place] for place in sorted(rows)))

    def rates(self, since: datetime, until: datetime, span: Span) -> Sequence[Rate]:
        """Return the rates of the spans that begin in a time, by time."""
        ours = _t.namespace == self._db.namespace, _t.seconds == SECONDS[span]
        query = sa.select(tables.rates).where(*ours, _t.at_ms >= to_ms(since), _t.at_ms < to_ms(until))
        with self._db.connection() as connection:
            rows = connection.execute(query.order_by(_t.at_ms, _t.key)).all()
        return [
            Rate(from_ms(row.at_ms), row.type, row.queue, row.outcome, tuple(row[-len(_COUNTS) :]))
            for row in rows
        ]

    def forget_rates(self, now: datetime) -> None:
        """Delete old rates."""
        for span, kept in KEPT.items():
            old = _t.seconds == SECONDS[span], _t.at_ms < to_ms(now - kept)
            self._db.change(sa.delete(tables.rates).where(*old))

    def _rows(self, rate: Rate) -> Iterator[dict[str, Any]]:
        texts = tuple(map(index_text, (rate.type, rate.queue, rate.outcome)))
        for span, seconds in SECONDS.items():
            yield {
                "namespace": self._db.namespace,
                "seconds": seconds,
                "at_ms": begun(rate.at, span),
                "key": index_id("\n".join(texts)),
                **dict(zip(("type", "queue", "outcome"), texts, strict=True)),
                **dict(zip(_COUNTS, rate.counts, strict=True)),
            }

    def _of_kind(self, kind: str) -> tuple[sa.ColumnElement[bool], ...]:
        return _d.namespace == self._db.namespace, _d.kind == kind
