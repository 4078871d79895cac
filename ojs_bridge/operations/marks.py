"""Marks: moments such as deploys that operators write down, for the charts."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from ..engine.context import Context
from ..rules.job import format_time
from ..store import Document, Store
from .audit import MAX_TEXT, Actor, Audit
from .letters import needed, page_size

KIND = "mark"


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment, its text, such as `v42`, and the name of the operator who wrote it."""

    id: str
    at: datetime
    text: str
    by: str

    def to_ojs(self) -> dict[str, Any]:
        """Return the mark in JSON."""
        return {**asdict(self), "at": format_time(self.at)}


class Marks:
    """The marks of one bridge. Its methods raise StoreError; without a store ConfigurationError."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._audit = Audit(context)

    def add(self, text: str, *, at: datetime | None = None) -> Mark:
        """Write a mark, for now or for another time; raises ValueError."""
        text = text.strip()
        if not 0 < len(text) <= MAX_TEXT:
            raise ValueError(f"text: {len(text)} characters; there must be 1 to {MAX_TEXT}")
        if at is not None and not at.tzinfo:
            raise ValueError(f"at: {at!r} must be a time with a zone")
        at = at or self._context.clock()
        mark = Mark(f"mark-{secrets.token_hex(6)}", at, text, Actor.current().name)
        store = self._store
        with self._audit.recording("mark.add", mark=mark.id, text=text, at=format_time(at)):
            store.write_document(Document(KIND, mark.id, at, {"text": text, "by": mark.by}))
        return mark

    def list(self, *, since: datetime | None = None, limit: int = 100) -> Sequence[Mark]:
        """Return the newest marks, of `since` or later; raises ValueError for a limit outside 1 to 1000."""
        found = self._store.list_documents(KIND, limit=page_size(limit), cursor=None).documents
        marks = (Mark(one.id, one.at, str(one.body["text"]), str(one.body["by"])) for one in found)
        return tuple(mark for mark in marks if since is None or mark.at >= since)

    @property
    def _store(self) -> Store:
        return needed(self._context.store, "marks")
