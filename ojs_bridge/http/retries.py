"""The parked retries' routes: list, get, run now, cancel; in the shapes of the dead letters' routes."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..bridge import Bridge
from ..errors import RetryNotFound
from ..spec.job import format_time
from ..store import Parked, ParkedPage
from .answers import Answer, held, not_found
from .asking import PAGE, json_of, page_of, query_of


class Retries:
    """Serves the parked retries of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._retries = bridge.retries
        self._now = bridge.engine.now

    def routes(self) -> list[Route]:
        """Return the routes; an id may hold anything, slashes too."""
        return [
            Route("/retries", self.list, methods=["GET"]),
            Route("/retries/{id:path}/run", self.run, methods=["POST"]),
            Route("/retries/{id:path}", self.get, methods=["GET"]),
            Route("/retries/{id:path}", self.cancel, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        """Answer with a page of retries, the next one due first."""
        query = query_of(request, "queue", "type", *PAGE)
        return Answer(await run_in_threadpool(self._list, query))

    def _list(self, query: dict[str, str]) -> dict[str, Any]:
        queue, type_ = query.get("queue"), query.get("type")

        def read(limit: int, cursor: str | None) -> ParkedPage:
            return self._retries.list(queue=queue, type=type_, limit=limit, cursor=cursor)

        page, told = page_of(read, query)
        total = self._retries.count() if queue is type_ is None else None
        return {"jobs": [parked.to_ojs() for parked in page.retries], "pagination": {"total": total, **told}}

    async def get(self, request: Request) -> Response:
        """Answer with a job's retry."""
        query_of(request)
        return Answer((await self._parked(request)).to_ojs())

    async def run(self, request: Request) -> Response:
        """Make a retry due now; a worker's scheduler publishes it."""
        query_of(request)
        await json_of(request)
        parked = await self._parked(request)
        try:
            await run_in_threadpool(self._retries.run, parked.id)
        except RetryNotFound as error:
            raise held(error) from None
        return Answer({"job": {**parked.to_ojs(), "next_retry_at": format_time(self._now())}})

    async def cancel(self, request: Request) -> Response:
        """Delete a retry: its job never runs again."""
        query_of(request)
        await json_of(request)
        parked = await self._parked(request)
        try:
            await run_in_threadpool(self._retries.cancel, parked.id)
        except RetryNotFound as error:
            raise held(error) from None
        return Answer({"deleted": True, "job_id": parked.id})

    async def _parked(self, request: Request) -> Parked:
        job_id = request.path_params["id"]
        try:
            return await run_in_threadpool(self._retries.get, job_id)
        except RetryNotFound:
            raise not_found("parked_retry", job_id) from None
