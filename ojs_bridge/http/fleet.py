"""The routes of the fleet as a whole: its health, its rates, the audit and the marks."""

from __future__ import annotations

from typing import cast

from starlette.requests import Request

from ..bridge import Bridge
from . import shapes
from .answers import Refusal, invalid
from .guarding import ANONYMOUS
from .requests import AuditQuery, MarkBody, RatesQuery, Since
from .routes import Operation, answers

FLEET: list[Operation] = []


class Fleet:
    """Serves what a bridge knows of its fleet and of its operators."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(FLEET, "GET", "/health")
    def health(self, request: Request) -> shapes.Health:
        """Tell the health of store, broker, workers and parked retries; 503 if store or broker are away."""
        # Without a token a probe is told the status alone.
        found = self._bridge.health.check()
        told: shapes.Health = {"status": found.status}
        if ANONYMOUS not in request.scope:
            told["checks"] = found.to_ojs()["checks"]
        if found.status == "away":
            message = "the store or the broker is away"
            raise Refusal(503, "backend_error", message, retryable=True, details={**told})
        return told

    @answers(FLEET, "GET", "/rates")
    def rates(self, query: RatesQuery) -> shapes.Rates:
        """Count runs by the minute or by the hour; of the last 14 days at most."""
        return cast(shapes.Rates, self._bridge.rates(**dict(query)).to_ojs())

    @answers(FLEET, "GET", "/audit")
    def audit(self, query: AuditQuery) -> shapes.Records:
        """List the operator actions of the last 180 days, the newest first."""
        try:
            page = self._bridge.audit.list(**dict(query))
        except ValueError as error:
            raise invalid(str(error)) from None
        records = [cast(shapes.Record, record.to_ojs()) for record in page.records]
        return {"records": records, "next_cursor": page.next_cursor}

    @answers(FLEET, "GET", "/marks")
    def marks(self, query: Since) -> shapes.Marks:
        """List the marks of the last 180 days, the newest first."""
        found = self._bridge.marks.list(since=query.since, limit=query.limit)
        return {"marks": [cast(shapes.Mark, mark.to_ojs()) for mark in found]}

    @answers(FLEET, "POST", "/marks")
    def mark(self, body: MarkBody) -> shapes.Mark:
        """Write a mark, such as a deploy, for now or for another time."""
        try:
            return cast(shapes.Mark, self._bridge.marks.add(body.text, at=body.at).to_ojs())
        except ValueError as error:
            raise invalid(str(error)) from None
