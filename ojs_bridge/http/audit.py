"""The route of the audit: who did what."""

from __future__ import annotations

from typing import cast

from ..bridge import Bridge
from . import shapes
from .answers import invalid
from .requests import AuditQuery
from .routes import Operation, answers

AUDIT: list[Operation] = []


class Audit:
    """Serves the audit of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._audit = bridge.operations.audit

    @answers(AUDIT, "GET", "/audit")
    def list(self, query: AuditQuery) -> shapes.Records:
        """List the operator actions of the last 180 days, the newest first."""
        try:
            page = self._audit.list(**dict(query))
        except ValueError as error:
            raise invalid(str(error)) from None
        records = [cast(shapes.Record, record.to_ojs()) for record in page.records]
        return {"records": records, "next_cursor": page.next_cursor}
