"""Documents in SQL."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime

import sqlalchemy as sa

from ..documents import Document, DocumentPage
from ..records import document_from_json, document_to_json, index_id, to_ms
from .database import Database
from .statements import New, Upsert, batches, page
from .tables import documents as table

_c = table.c


def _is_next(new: New) -> sa.ColumnElement[bool]:
    """Return the condition that a row follows the one that is there, or is written again."""
    again = sa.and_(_c.revision == new["revision"], _c.record == new["record"])
    return sa.or_(_c.revision == new["revision"] - 1, again)


_WRITE = Upsert(table, "revision", "record", where=_is_next)
_LISTED = sa.select(_c.record, _c.at_ms, _c.id)


class SQLDocuments:
    """The part of a store that holds documents."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def write_document(self, document: Document) -> bool:
        """Write a document in place of its earlier revision."""
        row = {
            "namespace": self._db.namespace,
            "kind": document.kind,
            "id": index_id(document.id),
            "at_ms": to_ms(document.at),
            "revision": document.revision,
            "record": document_to_json(document),
        }
        with self._db.connection(durable=True) as connection:
            return _WRITE(connection, row)

    def get_document(self, kind: str, document_id: str) -> Document | None:
        """Return a document, or None."""
        query = sa.select(_c.record).where(*self._of_kind(kind), _c.id == index_id(document_id))
        with self._db.connection() as connection:
            record = connection.execute(query).scalar()
        return None if record is None else document_from_json(record)

    def list_documents(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:
        """Return a page, newest first."""
        with self._db.connection() as connection:
            rows, more = page(connection, _LISTED.where(*self._of_kind(kind)), limit, cursor, newest=True)
        return DocumentPage(tuple(document_from_json(row.record) for row in rows), more)

    def count_documents(self, kinds: Collection[str]) -> Mapping[str, int]:
        """Count documents by kind."""
        found: dict[str, int] = {}
        for batch in batches([*kinds]):
            query = sa.select(_c.kind, sa.func.count()).group_by(_c.kind)
            with self._db.connection() as connection:
                rows = connection.execute(query.where(_c.namespace == self._db.namespace, _c.kind.in_(batch)))
                found.update((kind, count) for kind, count in rows)
        return found

    def forget_documents(self, kind: str, *, before: datetime) -> int:
        """Delete older documents."""
        return self._db.change(sa.delete(table), [sa.and_(*self._of_kind(kind), _c.at_ms < to_ms(before))])

    def _of_kind(self, kind: str) -> tuple[sa.ColumnElement[bool], ...]:
        return _c.namespace == self._db.namespace, _c.kind == kind
