"""The routes of dead letters, of their groups (spec dlq 10) and of what waits, and their pages."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeAlias, cast

from starlette.requests import Request
from starlette.responses import Response
from typing_extensions import TypedDict

from ..bridge import Bridge
from ..engine.runs import Override
from ..operations.letters import AnyPage
from ..operations.operation import Action
from ..operations.replaying import Bulk
from ..rules.job import format_time
from ..rules.notations import parse_duration
from ..rules.policy import RetryPolicy
from ..store import EVERYTHING, Filter, Letter, Page, Parked, ParkedPage, Stats, matches
from . import requests, shapes
from .answers import invalid
from .guarding import Role, check_replay
from .operations import Bulks, unconfirmed
from .requests import (
    EARLIEST,
    Asked,
    Counted,
    DeleteQuery,
    DueQuery,
    LettersQuery,
    Move,
    Older,
    OlderQuery,
    Paging,
    Purge,
    PurgeBody,
    PurgeQuery,
    Replay,
    ReplayOne,
    WaitingQuery,
)
from .routes import Operation, answers
from .shapes import Pagination

#: Reads a page: so many entries, its `limit`, after a `cursor`.
Read: TypeAlias = Callable[..., AnyPage]


#: The seconds for which counts are kept. A change through this API drops them at once.
FRESH = 5.0


def page_of(
    read: Read[AnyPage], query: Paging, count: Callable[[AnyPage], int | None]
) -> tuple[AnyPage, Pagination]:
    """Return the page that a query asks for, and its place among all entries; raises Refusal.

    The page begins after the cursor, and the offset skips entries from there. `count` is given the page, and
    returns the number of all entries.
    """
    try:
        page = page_after(read, query.offset, query.limit, query.cursor)
    except ValueError as error:
        raise invalid(str(error)) from None
    more = page.next_cursor
    return page, {
        "total": count(page),
        "limit": query.limit,
        "offset": query.offset,
        "has_more": more is not None,
        "next_cursor": more,
    }


def page_after(read: Read[AnyPage], offset: int, limit: int, cursor: str | None = None) -> AnyPage:
    """Return the page after a cursor and so many entries."""
    while offset:
        step = min(offset, 1000)
        skipped = read(limit=step, cursor=cursor)
        cursor, offset = skipped.next_cursor, offset - step
        if cursor is None:
            return type(skipped)((), None)
    return read(limit=limit, cursor=cursor)


@dataclass
class Counts:
    """The counts of a bridge's dead letters, kept for some seconds, because counting a million takes long."""

    bridge: Bridge
    #: The counts of each filter that was asked for, and the moment until which they hold.
    _kept: dict[Filter, tuple[Stats, float]] = field(default_factory=dict)

    def get(self, where: Filter) -> Stats:
        """Return the counts of a filter without a text; raises StoreError."""
        kept, now = self._kept, time.monotonic()
        stats, until = kept.get(where, (None, 0.0))
        if stats is not None:
            if now < until:
                return stats
            # Until these counts are taken anew, other requests get the last ones.
            kept[where] = stats, now + FRESH
        for old in [old for old, (_, until) in [*kept.items()] if now >= until]:
            kept.pop(old, None)
        stats = self.bridge.dead_letters.stats(where)
        # Where all counts were dropped meanwhile, these are too old: they go into the dictionary of before.
        kept[where] = stats, time.monotonic() + FRESH
        return stats

    def forget(self) -> None:
        """Drop the counts, because a request has changed the letters."""
        self._kept = {}

    def of(self, where: Filter) -> int | None:
        """Return the number of letters of a filter, or None if these counts do not have it."""
        stats = self.get(EVERYTHING)
        match [*where.to_json().items()]:
            case []:
                return stats.total
            case [("queue", str(queue))]:
                return stats.by_queue.get(queue, 0)
            case [("type", str(pattern))]:
                return _sum(stats.by_type, pattern)
            case [("error_type", str(pattern))]:
                return _sum(stats.by_error_type, pattern)
        return None

    def total(self, where: Filter) -> int:
        """Return the number of letters of a filter without a text, for which it may have to count them."""
        total = self.of(where)
        return self.get(where).total if total is None else total


def _sum(counts: Mapping[str, int], pattern: str) -> int:
    return sum(count for text, count in counts.items() if matches(text, pattern))


#: The most characters of arguments and meta that a list has; a single letter or job has all.
LISTED = 2_000


def listed(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job as lists have it: without its arguments and its meta, if they are long."""
    size = len(json.dumps([job["args"], job["kwargs"], job["meta"]], default=repr))
    if size <= LISTED:
        return {**job}
    note = f"left out of the list: {size:,} characters"
    return {**job, "args": None, "kwargs": None, "meta": {}, "note": note}


#: The most retries of a policy that are shown.
SCHEDULED = 50


class ArgumentValue(TypedDict):
    """A value of an argument, and how many letters have it."""

    value: str | float | bool | None
    count: shapes.Count


class ArgumentValues(TypedDict):
    """An argument, its commonest values, and whether all counted letters have the same one.

    The fields of an object stand apart, as `order.country`. A list is told as a text.
    """

    name: str
    values: list[ArgumentValue]
    one_value: bool


class ByArgument(TypedDict):
    """The arguments of so many counted letters, of all that match; those with one value come first."""

    counted: shapes.Count
    of: shapes.Count
    arguments: list[ArgumentValues]


LETTERS: list[Operation] = []


class Letters:
    """Serves the dead letters of a bridge."""

    resource = "dead_letter_job"

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
        where = query.where()
        if query.text and query.offset:
            # Skipping letters with a text could read the whole store.
            raise invalid(f"offset: {query.offset}: does not go with a text; go on by next_cursor")

        def total(page: Page) -> int | None:
            if page.next_cursor is None and not query.cursor and (page.letters or not query.offset):
                return query.offset + len(page.letters)
            return None if query.cursor else self.counts.of(where)

        page, place = page_of(partial(self._bridge.dead_letters.list, where), query, total)
        jobs = [cast(shapes.Letter, listed(letter.to_ojs())) for letter in page.letters]
        return {"jobs": jobs, "total": place["total"], "pagination": place}

    @answers(LETTERS, "DELETE", "/dead-letter", many=True)
    async def purge(self, query: PurgeQuery, body: PurgeBody) -> Response:
        """Purge dead letters."""
        asked: PurgeQuery | PurgeBody = body if _by_body(query, body) else query
        purge = body if asked is body else Purge(filter=query, confirm=query.confirm is not None)
        act = partial(self._bridge.dead_letters.purge, forever=bool(asked.forever))
        return await self._many("purge", act, purge)

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
        where = None if until is None else requests.Filter(until=until)
        purge = Purge(filter=where, confirm=bool(asked.confirm) or is_chosen)
        act = partial(self._bridge.dead_letters.purge, forever=bool(asked.forever))
        return await self._many("purge", act, purge)

    @answers(LETTERS, "GET", "/admin/dead-letter/stats")
    @answers(LETTERS, "GET", "/dead-letter/stats")
    def stats(self, query: Counted) -> shapes.Stats:
        """Count dead letters."""
        counts = self.counts.get(query.where()).to_ojs()
        return cast(shapes.Stats, {**counts, "replayable": sorted(self._bridge.engine.context.publishers)})

    @answers(LETTERS, "GET", "/dead-letter/timeline")
    def timeline(self, query: Counted) -> shapes.Timeline:
        """Count deaths in steps of time."""
        timeline = self._bridge.dead_letters.timeline(query.where())
        since, step = format_time(timeline.since), timeline.step.total_seconds()
        return {"since": since, "step_seconds": step, "counts": [*timeline.counts]}

    @answers(LETTERS, "GET", "/dead-letter/by-argument")
    def by_argument(self, query: Counted) -> ByArgument:
        """Count which values the arguments have, in the newest 10,000 dead letters."""
        return cast(ByArgument, self._bridge.dead_letters.by_argument(query.where()).to_ojs())

    @answers(LETTERS, "POST", "/admin/dead-letter/retry", many=True, role="replayer")
    @answers(LETTERS, "POST", "/dead-letter/retry", many=True, role="replayer")
    async def replay_all(self, body: Replay) -> Response:
        """Replay dead letters."""
        act = partial(self._bridge.dead_letters.replay_all, rate=body.rate)
        return await self._many("replay", act, body)

    async def _many(self, action: Action, act: Callable[..., Bulk], asked: Purge) -> Response:
        """Change all letters of a filter; without `confirm` refuse, and tell their number."""
        act = partial(act, asked.where())
        if not asked.confirm:
            preview = partial(self._bridge.operations.preview, action, asked.where())
            raise unconfirmed(action, await self._bulks.run(preview))
        return await self._bulks.answer(action, partial(act, confirm=True))

    @answers(LETTERS, "POST", "/admin/jobs/{id}/retry", role="replayer")
    @answers(LETTERS, "POST", "/admin/dead-letter/{id}/retry", role="replayer")
    @answers(LETTERS, "POST", "/dead-letter/{id}/retry", role="replayer")
    def replay(self, job_id: str, body: ReplayOne, role: Role) -> shapes.ReplayedJob:
        """Replay a dead letter."""
        override = body.override.changes() if body.override else Override()
        if role != "operator":
            check_replay(role, "replay", override.to_ojs())
        try:
            letter, job = self._bridge.dead_letters.replay_with(job_id, override)
        finally:
            self.changed()
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
        letter = self._bridge.dead_letters.get(job_id)
        return cast(shapes.LetterDetail, {**letter.to_ojs(), "schedule": _schedule(letter)})

    @answers(LETTERS, "DELETE", "/admin/dead-letter/{id}", empty=True)
    @answers(LETTERS, "DELETE", "/dead-letter/{id}")
    def delete(self, job_id: str, query: DeleteQuery) -> shapes.Deleted:
        """Delete a dead letter."""
        try:
            letter = self._bridge.dead_letters.delete(job_id, forever=query.forever is not None)
        finally:
            self.changed()
        return {"deleted": True, "job_id": letter.id}


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


WAITING: list[Operation] = []


class Waiting:
    """Serves the jobs of a bridge: those that wait in the store, and the place of any job."""

    resource = "job"

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(WAITING, "GET", "/waiting")
    def list(self, query: WaitingQuery) -> shapes.WaitingPage:
        """List parked retries and scheduled jobs, the next one due first."""
        where = query.where()
        if query.offset and not where.is_plain:
            raise invalid(f"offset: {query.offset}: goes with queue, type and kind; go on by next_cursor")

        def total(_page: ParkedPage) -> int | None:
            return self._bridge.waiting.count(where) if where == Filter(kind=where.kind) else None

        page, place = page_of(partial(self._bridge.waiting.list, where), query, total)
        jobs = [cast(shapes.Waiting, listed(parked.to_ojs())) for parked in page.jobs]
        short = self._bridge.waiting.in_broker(where)
        return {"jobs": jobs, "total": place["total"], "in_broker": short, "pagination": place}

    @answers(WAITING, "GET", "/waiting/due")
    def due(self, query: DueQuery) -> shapes.Ahead:
        """Count what falls due in the next hour, day or week, retries in the broker with it."""
        within = parse_duration(query.within)
        ahead = self._bridge.waiting.due(within, queue=query.queue, type=query.type, kind=query.kind)
        return cast(shapes.Ahead, ahead.to_ojs())

    @answers(WAITING, "POST", "/waiting/{id}/run")
    def run(self, job_id: str) -> shapes.WaitingJob:
        """Make a waiting job due now; a worker's scheduler publishes it."""
        parked = self._bridge.waiting.get(job_id)
        self._bridge.waiting.run(parked.id)
        return _due(parked, self._bridge.engine.now())

    @answers(WAITING, "POST", "/waiting/{id}/move")
    def move(self, job_id: str, body: Move) -> shapes.WaitingJob:
        """Make a waiting job due at another time; one in the past is now."""
        parked = self._bridge.waiting.get(job_id)
        self._bridge.waiting.move(parked.id, body.at)
        return _due(parked, max(body.at, self._bridge.engine.now()))

    @answers(WAITING, "POST", "/admin/jobs/{id}/cancel")
    @answers(WAITING, "DELETE", "/jobs/{id}")
    def cancel(self, job_id: str) -> shapes.CancelledJob:
        """Cancel a job that waits in the store: it never runs again."""
        parked = self._bridge.waiting.get(job_id)
        self._bridge.waiting.cancel(parked.id)
        at = format_time(self._bridge.engine.now())
        return {"job": cast(shapes.Cancelled, {**parked.to_ojs(), "state": "cancelled", "cancelled_at": at})}

    @answers(WAITING, "GET", "/jobs/{id}")
    def info(self, job_id: str) -> shapes.JobInfo:
        """Tell where a job is: its dead letter, or the job as it waits in the store."""
        return {"job": self.get(job_id)}

    @answers(WAITING, "GET", "/admin/jobs/{id}")
    def get(self, job_id: str) -> shapes.JobDetail:
        """Tell where a job is: its dead letter, or the job as it waits in the store."""
        return cast(shapes.JobDetail, self._bridge.jobs.get(job_id).to_ojs())


def _due(parked: Parked, at: datetime) -> shapes.WaitingJob:
    return {"job": cast(shapes.Waiting, replace(parked, next_retry_at=at).to_ojs())}
