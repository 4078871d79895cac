"""The dead letters' routes: list, get, replay, delete, replay and purge many, stats (spec dlq 10)."""

from __future__ import annotations

from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..bridge import Bridge
from ..errors import InvalidRetryPolicy, LetterNotFound
from ..operations.letters import Kind
from ..operations.replaying import OVERRIDES, Bulk, overrides_of
from ..spec.job import Job, format_time
from ..spec.policy import RetryPolicy
from ..store import Letter, Page
from .answers import Answer, Refusal, held, invalid, not_found
from .asking import KIND, PAGE, an_object, flag_of, json_of, kind_of, page_of, query_of
from .bulk import Bulks
from .counts import Counts

#: A replay that waits longer than this between two jobs cannot be told from one that hangs.
SLOWEST, FASTEST = 0.1, 10_000
#: How many retries of a policy are shown.
SCHEDULED = 50


class Letters:
    """Serves the dead letters of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._letters = bridge.dead_letters
        self._now = bridge.engine.now
        self._counts = Counts(bridge.dead_letters.stats)
        self._bulks = Bulks(changed=self._counts.forget)

    def routes(self) -> list[Route]:
        """Return the routes; an id may hold anything, slashes too, so the more special ones come first."""
        return [
            Route("/dead-letter", self.list, methods=["GET"]),
            Route("/dead-letter", self.purge, methods=["DELETE"]),
            Route("/dead-letter/stats", self.stats, methods=["GET"]),
            Route("/dead-letter/timeline", self.timeline, methods=["GET"]),
            Route("/dead-letter/retry", self.retry_all, methods=["POST"]),
            Route("/dead-letter/{id:path}/retry", self.retry, methods=["POST"]),
            Route("/dead-letter/{id:path}", self.get, methods=["GET"]),
            Route("/dead-letter/{id:path}", self.delete, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        """Answer with a page of letters."""
        query = query_of(request, *KIND, *PAGE)
        return Answer(await run_in_threadpool(self._list, query, kind_of(query)))

    def _list(self, query: dict[str, str], kind: Kind) -> dict[str, Any]:
        def read(limit: int, cursor: str | None) -> Page:
            return self._letters.list(limit=limit, cursor=cursor, **kind)

        page, told = page_of(read, query, skips="text" not in kind)
        total = None if "cursor" in query else self._total(kind, page, told["offset"])
        return {
            "jobs": [letter.to_ojs() for letter in page.letters],
            "pagination": {"total": total, **told},
        }

    def _total(self, kind: Kind, page: Page, offset: int) -> int | None:
        """Return how many there are, None when only counting them would tell."""
        if page.next_cursor is None and (page.letters or not offset):
            return offset + len(page.letters)
        return self._counts.of(kind)

    async def get(self, request: Request) -> Response:
        """Answer with one letter, its whole history and the delays that its policy asks for."""
        query_of(request)
        letter = await self._letter(request)
        return Answer({**letter.to_ojs(), "schedule": _schedule(letter)})

    async def stats(self, request: Request) -> Response:
        """Answer with the counts."""
        query_of(request)
        return Answer((await run_in_threadpool(self._counts.get)).to_ojs())

    async def timeline(self, request: Request) -> Response:
        """Answer with how many died in each step of time; a text is not looked for."""
        kind = kind_of(query_of(request, *KIND))
        found = await run_in_threadpool(self._letters.timeline, **kind)
        since, step = format_time(found.since), found.step.total_seconds()
        return Answer({"since": since, "step_seconds": step, "counts": found.counts})

    async def retry(self, request: Request) -> Response:
        """Replay a letter, with what the body overrides."""
        query_of(request)
        told = await json_of(request, "override")
        override = _override(told.get("override", {}))
        letter = await self._letter(request)
        try:
            job = await run_in_threadpool(self._letters.retry, letter.id, **override)
        except LetterNotFound as error:
            raise held(error) from None
        finally:
            self._counts.forget()
        return Answer({"job": {**_replayed(letter, job), "re_enqueued_at": format_time(self._now())}})

    async def delete(self, request: Request) -> Response:
        """Delete a letter."""
        query_of(request)
        await json_of(request)
        letter = await self._letter(request)
        try:
            await run_in_threadpool(self._letters.delete, letter.id)
        except LetterNotFound as error:
            raise held(error) from None
        finally:
            self._counts.forget()
        return Answer({"deleted": True, "job_id": letter.id})

    async def retry_all(self, request: Request) -> Response:
        """Replay all letters of a kind; without `confirm` refuse, and tell how many there are."""
        query_of(request)
        kind, confirm, told = _bulk(await json_of(request, "filter", "confirm", "rate"))
        rate = _rate(told.get("rate"))
        if not confirm:
            raise _unconfirmed(await self._bulks.run(lambda: self._letters.retry_all(**kind)))
        return await self._bulks.answer(
            request,
            "retry",
            lambda progress: self._letters.retry_all(confirm=True, rate=rate, progress=progress, **kind),
        )

    async def purge(self, request: Request) -> Response:
        """Delete all letters of a kind; without `confirm` refuse, and tell how many there are."""
        query = query_of(request, *KIND, "confirm")
        told = await json_of(request, "filter", "confirm")
        if query and told:
            raise invalid("filters and confirm go into the query or into the body, not into both")
        kind, confirm, _ = _bulk(told) if told else (kind_of(query), flag_of(query, "confirm"), {})
        if not confirm:
            raise _unconfirmed(await self._bulks.run(lambda: self._letters.purge(**kind)))
        return await self._bulks.answer(
            request, "purge", lambda progress: self._letters.purge(confirm=True, progress=progress, **kind)
        )

    async def _letter(self, request: Request) -> Letter:
        letter_id = request.path_params["id"]
        try:
            return await run_in_threadpool(self._letters.get, letter_id)
        except LetterNotFound:
            raise not_found("dead_letter_job", letter_id) from None


def _schedule(letter: Letter) -> list[float]:
    """Return the seconds before each retry of a letter's policy, jitter left out, fifty at most."""
    policy = RetryPolicy.merge(letter.policy, {"jitter": False})
    retries = range(1, min(policy.runs, SCHEDULED + 1)) if letter.policy else ()
    return [policy.delay(n) for n in retries]


def _override(told: object) -> dict[str, Any]:
    override = an_object("override", told, *OVERRIDES)
    if not isinstance(override.get("retry", {}), dict):
        raise invalid("retry: must be an object of retry policy fields")
    try:
        overrides_of(override)
    except InvalidRetryPolicy:
        raise
    except ValueError as error:
        raise invalid(str(error)) from None
    return override


def _rate(told: object) -> float | None:
    if told is None:
        return None
    if isinstance(told, bool) or not (isinstance(told, int | float) and SLOWEST <= told <= FASTEST):
        raise invalid(f"rate: must be a number of jobs a second from {SLOWEST} to {FASTEST}")
    return told


def _bulk(told: dict[str, Any]) -> tuple[Kind, bool, dict[str, Any]]:
    """Return which letters a body means, whether it confirms that, and what else it says."""
    confirm = told.get("confirm", False)
    if not isinstance(confirm, bool):
        raise invalid("confirm: must be true or false")
    return kind_of(an_object("filter", told.get("filter", {}), *KIND)), confirm, told


def _unconfirmed(found: Bulk) -> Refusal:
    told = f"confirm: must be true; {found.matched} dead letters are matched"
    return invalid(told, matched=found.matched)


def _replayed(letter: Letter, job: Job) -> dict[str, Any]:
    return {
        "id": letter.id,
        "type": letter.type,
        "state": "available",
        "queue": job.queue,
        "attempt": 0,
        "max_attempts": (job.retry or {}).get("max_attempts", letter.max_attempts),
        "retry": job.retry,
        "metadata": {"framework": letter.framework, "ojs.replay_count": job.replay_count},
    }
