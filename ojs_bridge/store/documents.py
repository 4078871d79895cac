"""Documents: small records that operators keep beside the jobs, such as bulk operations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Document:
    """A record in JSON. Its `revision` is 1 when it is new, and grows by 1 with each change."""

    kind: str
    id: str
    at: datetime
    body: Mapping[str, Any]
    revision: int = 1


@dataclass(frozen=True, slots=True)
class DocumentPage:
    """Documents of a kind, the newest first, and the cursor of the next page; None on the last page."""

    documents: tuple[Document, ...]
    next_cursor: str | None


class Documenting(Protocol):
    """The store's methods for documents. All raise StoreError."""

    def write_document(self, document: Document) -> bool:
        """Write a document; False when the store has this revision, or a later one, from another writer."""

    def get_document(self, kind: str, document_id: str) -> Document | None:
        """Return a document, or None."""

    def list_documents(self, kind: str, *, limit: int, cursor: str | None) -> DocumentPage:
        """Return a page, newest first; raises ValueError for a cursor that no page gave out."""

    def count_documents(self, kinds: Collection[str]) -> Mapping[str, int]:
        """Return the number of documents of each of these kinds that has any."""

    def forget_documents(self, kind: str, *, before: datetime) -> int:
        """Delete the documents of a kind that are older; return how many."""
