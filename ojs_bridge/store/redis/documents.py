"""Documents in Redis: a hash of records, and an index for listings."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime

from ..documents import Document, DocumentPage
from ..records import document_from_json, document_to_json, index_id
from .index import RedisIndex, entry_of, moment
from .server import RedisServer


class RedisDocuments:
    """The part of a store that holds documents."""

    def __init__(self, server: RedisServer) -> None:
        self._server = server
        names = ("documents", "documents:by_time", "documents:by_kind", "documents:kinds")
        self._document_keys = server.keys(*names)
        self._documents = self._document_keys[0]
        self._document_index = RedisIndex(server, self._document_keys, newest_first=True)

    def write_document(self, document: Document) -> bool:
        """Write a document in place of its earlier revision."""
        field = _field(document.kind, document.id)
        entry = entry_of((document.kind,), document.at, field)
        words = (field, document.revision, document_to_json(document), entry)
        return bool(self._server.run("write_document", self._document_keys, words))

    def get_document(self, kind: str, document_id: str) -> Document | None:
        """Return a document, or None."""
        found = self._server.ask("HGET", self._documents, _field(kind, document_id))
        return None if found is None else document_from_json(found.decode())

    def list_documents(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:
        """Return a page, newest first."""
        found, more = self._document_index.page(lambda texts: texts == [kind], limit, cursor)
        documents = (document_from_json(record.decode()) for _, record in found)
        return DocumentPage(tuple(documents), more)

    def count_documents(self, kinds: Collection[str]) -> Mapping[str, int]:
        """Count documents by kind."""
        found = self._document_index.counts(lambda texts: texts[0] in kinds, None, None)
        return {texts[0]: count for texts, count, _, _ in found}

    def forget_documents(self, kind: str, *, before: datetime) -> int:
        """Delete older documents."""
        return int(self._server.run("forget_documents", self._document_keys, (kind, moment(before))))


def _field(kind: str, document_id: str) -> str:
    return index_id(f"{kind}:{document_id}")
