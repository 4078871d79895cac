"""The routes of dead letters and their groups: list, get, replay, delete, mute, stats (spec dlq 10)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from ..bridge import Bridge
from ..engine.ports import Override
from ..operations.letters import Kind
from ..operations.operation import Action
from ..operations.replaying import Bulk
from ..rules.fingerprint import is_fingerprint
from ..rules.job import format_time
from ..rules.policy import RetryPolicy
from ..store import Letter, Page
from . import shapes
from .answers import found, invalid, not_found
from .bulk import Bulks, unconfirmed
from .paging import Counts, listed, page_of
from .requests import (
    EARLIEST,
    Asked,
    Counted,
    Filter,
    GroupsQuery,
    LettersQuery,
    MuteBody,
    Older,
    OlderQuery,
    Purge,
    PurgeQuery,
    Replay,
    ReplayOne,
)
from .routes import Operation, answers

#: The most retries of a policy that are shown.
SCHEDULED = 50

LETTERS: list[Operation] = []


class Letters:
    """Serves the dead letters of a bridge."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        #: The numbers of the letters.
        self.counts = Counts(bridge)
        #: Forgets the counts after a change.
        self.changed = self.counts.forget
        self._bulks = Bulks(self.changed)

    @answers(LETTERS, "GET", "/dead-letter")
    def list(self, query: LettersQuery) -> shapes.Page:
        """List dead letters, the newest first."""
        kind = query.kind()
        if query.text and query.offset:
            # Skipping letters with a text could read the whole store.
            raise invalid(f"offset: {query.offset}: does not go with a text; go on by next_cursor")

        def read(limit: int, cursor: str | None) -> Page:
            return self._bridge.dead_letters.list(limit=limit, cursor=cursor, **kind)

        def total(page: Page) -> int | None:
            return None if query.cursor else self._total(kind, page, query.offset)

        page, place = page_of(read, query, total)
        jobs = [cast(shapes.Letter, listed(letter.to_ojs())) for letter in page.letters]
        return {"jobs": jobs, "total": place["total"], "pagination": place}

    def _total(self, kind: Kind, page: Page, offset: int) -> int | None:
        """Return the number of letters of a kind, or None if it would take a count of its own."""
        if page.next_cursor is None and (page.letters or not offset):
            return offset + len(page.letters)
        return self.counts.of(kind)

    @answers(LETTERS, "DELETE", "/dead-letter", many=True)
    async def purge(self, request: Request, query: PurgeQuery, body: Purge) -> Response:
        """Purge dead letters."""
        asked = body if _by_body(query, body) else Purge(filter=query, confirm=query.confirm is not None)
        return await self._many(request, "purge", self._bridge.dead_letters.purge, asked)

    @answers(LETTERS, "DELETE", "/admin/dead-letter", many=True)
    @answers(LETTERS, "POST", "/dead-letter/purge", many=True)
    async def purge_older(self, request: Request, query: OlderQuery, body: Older) -> Response:
        """Purge dead letters by their age; a POST that names an age needs no confirm."""
        asked = body if _by_body(query, body) else query
        until, now = asked.older_than, self._bridge.engine.now()
        if isinstance(until, timedelta):
            until = now - min(until, now - EARLIEST)
        # An age that leaves out no letter is no choice.
        is_chosen = request.method == "POST" and until is not None and until < now
        where = None if until is None else Filter(until=until)
        purge = Purge(filter=where, confirm=bool(asked.confirm) or is_chosen)
        return await self._many(request, "purge", self._bridge.dead_letters.purge, purge)

    @answers(LETTERS, "GET", "/admin/dead-letter/stats")
    @answers(LETTERS, "GET", "/dead-letter/stats")
    def stats(self, query: Counted) -> shapes.Stats:
        """Count dead letters."""
        counts = self.counts.get(query.kind()).to_ojs()
        return cast(shapes.Stats, {**counts, "replayable": sorted(self._bridge.engine.context.publishers)})

    @answers(LETTERS, "GET", "/dead-letter/timeline")
    def timeline(self, query: Counted) -> shapes.Timeline:
        """Count deaths in steps of time."""
        found = self._bridge.dead_letters.timeline(**query.kind())
        since, step = format_time(found.since), found.step.total_seconds()
        return {"since": since, "step_seconds": step, "counts": [*found.counts]}

    @answers(LETTERS, "POST", "/admin/dead-letter/retry", many=True)
    @answers(LETTERS, "POST", "/dead-letter/retry", many=True)
    async def retry_all(self, request: Request, body: Replay) -> Response:
        """Replay dead letters."""
        act = partial(self._bridge.dead_letters.retry_all, rate=body.rate)
        return await self._many(request, "retry", act, body)

    async def _many(
        self, request: Request, action: Action, act: Callable[..., Bulk], asked: Purge
    ) -> Response:
        """Change all letters of a kind; without `confirm` refuse, and tell their number."""
        kind = (asked.filter or Filter()).kind()
        act = partial(act, **kind)
        if not asked.confirm:
            preview = partial(self._bridge.operations.preview, action, **kind)
            raise unconfirmed(action, await self._bulks.run(preview))
        return await self._bulks.answer(
            request, action, lambda progress: act(confirm=True, progress=progress)
        )

    @answers(LETTERS, "GET", "/dead-letter/groups")
    def groups(self, query: GroupsQuery) -> shapes.Groups:
        """List dead letters by their faults."""
        start, limit = int(query.cursor or 0), query.limit
        choice = {"order": query.order, "muted": query.muted, "limit": limit + 1, "offset": start}
        found = self._bridge.dead_letters.groups.list(**choice, **query.kind())  # type: ignore[arg-type]
        groups = [cast(shapes.Group, group.to_ojs()) for group in found[:limit]]
        return {"groups": groups, "next_cursor": str(start + limit) if len(found) > limit else None}

    @answers(LETTERS, "POST", "/dead-letter/groups/{id}/mute")
    def mute(self, job_id: str, body: MuteBody) -> shapes.Mute:
        """Leave a group out of the list, until it has twice as many deaths; its letters stay."""
        mute = self._bridge.dead_letters.groups.mute(_checked(job_id), until=body.until)
        return cast(shapes.Mute, mute.to_ojs())

    @answers(LETTERS, "DELETE", "/dead-letter/groups/{id}/mute")
    def unmute(self, job_id: str) -> shapes.Unmuted:
        """Take a mute back."""
        self._bridge.dead_letters.groups.unmute(_checked(job_id))
        return {"muted": False, "fingerprint": job_id}

    @answers(LETTERS, "POST", "/admin/jobs/{id}/retry")
    @answers(LETTERS, "POST", "/admin/dead-letter/{id}/retry")
    @answers(LETTERS, "POST", "/dead-letter/{id}/retry")
    def replay(self, job_id: str, body: ReplayOne) -> shapes.ReplayedJob:
        """Replay a dead letter."""
        override = body.override.changes() if body.override else Override()
        with self._changing(job_id):
            letter, job = self._bridge.dead_letters.replay_with(job_id, override)
        replayed: shapes.Replayed = {
            "id": job.id,
            "type": letter.type,
            "state": "available",
            "queue": job.queue,
            "attempt": 0,
            "max_attempts": (job.retry or {}).get("max_attempts", letter.max_attempts),
            "retry": None if job.retry is None else dict(job.retry),
            "metadata": {"framework": letter.framework, "ojs.replay_count": job.replay_count},
            "re_enqueued_at": format_time(self._bridge.engine.now()),
        }
        return {"job": replayed}

    @answers(LETTERS, "GET", "/dead-letter/{id}")
    def get(self, job_id: str) -> shapes.LetterDetail:
        """Get a dead letter, its whole history and the delays that its policy asks for."""
        with found("dead_letter_job", job_id, self._bridge.dead_letters.get):
            letter = self._bridge.dead_letters.get(job_id)
        return cast(shapes.LetterDetail, {**letter.to_ojs(), "schedule": _schedule(letter)})

    @answers(LETTERS, "DELETE", "/admin/dead-letter/{id}", empty=True)
    @answers(LETTERS, "DELETE", "/dead-letter/{id}")
    def delete(self, job_id: str) -> shapes.Deleted:
        """Delete a dead letter."""
        with self._changing(job_id):
            letter = self._bridge.dead_letters.delete(job_id)
        return {"deleted": True, "job_id": letter.id}

    @contextmanager
    def _changing(self, letter_id: str) -> Iterator[None]:
        """Refuse a letter that is not there, or is claimed, and forget the counts after a change."""
        try:
            with found("dead_letter_job", letter_id, self._bridge.dead_letters.get):
                yield
        finally:
            self.counts.forget()


def _by_body(query: Asked, body: Purge | Older) -> bool:
    by_body = body.model_fields_set - {"reason"}
    if query.model_fields_set and by_body:
        raise invalid("filters and confirm go into the query or into the body, not into both")
    return bool(by_body)


def _schedule(letter: Letter) -> list[float]:
    """Return the seconds before each retry of a letter's policy, without jitter, fifty at most."""
    policy = RetryPolicy.merge(letter.policy, {"jitter": False})
    retries = range(1, min(policy.runs, SCHEDULED + 1)) if letter.policy else ()
    return [policy.delay(n) for n in retries]


def _checked(fingerprint: str) -> str:
    if not is_fingerprint(fingerprint):
        raise not_found("group", fingerprint)
    return fingerprint
