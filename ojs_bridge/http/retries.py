"""The routes of parked retries: list, get, run now, cancel."""

from __future__ import annotations

from typing import cast

from ..bridge import Bridge
from ..operations.parked_retries import is_plain
from ..rules.job import format_time
from ..store import Parked, ParkedPage
from . import shapes
from .answers import found, invalid
from .paging import listed, page_of
from .requests import RetriesQuery
from .routes import Operation, answers

RETRIES: list[Operation] = []


class Retries:
    """Serves the parked retries of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(RETRIES, "GET", "/retries")
    def list(self, query: RetriesQuery) -> shapes.ParkedPage:
        """List parked retries, the next one due first."""

        kind = query.kind()
        if query.offset and not is_plain(kind):
            raise invalid(f"offset: {query.offset}: goes with queue and type alone; go on by next_cursor")

        def read(limit: int, cursor: str | None) -> ParkedPage:
            return self._bridge.retries.list(limit=limit, cursor=cursor, **kind)

        def total(_page: ParkedPage) -> int | None:
            return None if kind else self._bridge.retries.count()

        page, place = page_of(read, query, total)
        jobs = [cast(shapes.Parked, listed(parked.to_ojs())) for parked in page.retries]
        return {"jobs": jobs, "total": place["total"], "pagination": place}

    @answers(RETRIES, "POST", "/retries/{id}/run")
    def run(self, job_id: str) -> shapes.ParkedJob:
        """Make a parked retry due now; a worker's scheduler publishes it."""
        parked = self._parked(job_id)
        with found("parked_retry", job_id, self._bridge.retries.get):
            self._bridge.retries.run(parked.id)
        return {"job": {**_shown(parked), "next_retry_at": format_time(self._bridge.engine.now())}}

    @answers(RETRIES, "GET", "/retries/{id}")
    def get(self, job_id: str) -> shapes.Parked:
        """Get a parked retry."""
        return _shown(self._parked(job_id))

    @answers(RETRIES, "DELETE", "/retries/{id}")
    def cancel(self, job_id: str) -> shapes.Deleted:
        """Delete a parked retry: its job never runs again."""
        parked = self._parked(job_id)
        with found("parked_retry", job_id, self._bridge.retries.get):
            self._bridge.retries.cancel(parked.id)
        return {"deleted": True, "job_id": parked.id}

    def _parked(self, job_id: str) -> Parked:
        with found("parked_retry", job_id, self._bridge.retries.get):
            return self._bridge.retries.get(job_id)


def _shown(parked: Parked) -> shapes.Parked:
    return cast(shapes.Parked, parked.to_ojs())
