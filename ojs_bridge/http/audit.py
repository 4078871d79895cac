"""The routes of the audit, which tells who did what, and of marks."""

from __future__ import annotations

from typing import cast

from ..bridge import Bridge
from . import shapes
from .answers import invalid
from .requests import AuditQuery, MarkBody, Since
from .routes import Operation, answers

AUDIT: list[Operation] = []


class Audit:
    """Serves the audit and the marks of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._audit = bridge.audit
        self._marks = bridge.marks

    @answers(AUDIT, "GET", "/audit")
    def list(self, query: AuditQuery) -> shapes.Records:
        """List the operator actions of the last 180 days, the newest first."""
        try:
            page = self._audit.list(**dict(query))
        except ValueError as error:
            raise invalid(str(error)) from None
        records = [cast(shapes.Record, record.to_ojs()) for record in page.records]
        return {"records": records, "next_cursor": page.next_cursor}

    @answers(AUDIT, "GET", "/marks")
    def marks(self, query: Since) -> shapes.Marks:
        """List the marks of the last 180 days, the newest first."""
        found = self._marks.list(since=query.since, limit=query.limit)
        return {"marks": [cast(shapes.Mark, mark.to_ojs()) for mark in found]}

    @answers(AUDIT, "POST", "/marks")
    def mark(self, body: MarkBody) -> shapes.Mark:
        """Write a mark, such as a deploy, for now or for another time."""
        try:
            return cast(shapes.Mark, self._marks.add(body.text, at=body.at).to_ojs())
        except ValueError as error:
            raise invalid(str(error)) from None
