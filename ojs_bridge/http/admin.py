"""The routes of the fleet, those of the admin API, and the manifest (spec adm 7 to 11, http 21)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from importlib import metadata
from typing import Annotated, Literal, cast, get_args

from pydantic import Field
from starlette.requests import Request
from typing_extensions import NotRequired, TypedDict

from ..bridge import Bridge
from ..operations.audit import Mark
from ..operations.letters import Whereabouts
from ..operations.rates import RateHistory
from ..store import EVERYTHING, STATES, Filter, Kind, Letter, Parked
from . import shapes
from .answers import VERSION, Refusal, invalid
from .guarding import ACTOR
from .letters import Letters, listed, page_after
from .requests import (
    AdminQuery,
    AuditQuery,
    JobsQuery,
    MarkBody,
    Numbered,
    RatesQuery,
    Since,
    Unknown,
)
from .routes import Operation, answers
from .shapes import Count

ADMIN: list[Operation] = []
#: The manifest's path has no version of the API before it.
MANIFEST: list[Operation] = []

#: The kinds of what waits, by the specification's words for its states.
_KINDS: Mapping[str, Kind] = {state: kind for kind, state in STATES.items()}
_FAILED = ("retried", "discarded", "dead_lettered")


class AdminPagination(TypedDict):
    """The place of a numbered page among all entries."""

    total: Count
    page: Annotated[int, Field(ge=1)]
    per_page: Annotated[int, Field(ge=1)]


class JobsPage(TypedDict):
    """A numbered page of jobs; `note` says why there are none in a state that the store does not know."""

    items: list[shapes.JobDetail]
    pagination: AdminPagination
    note: NotRequired[str]


class JobCounts(TypedDict):
    """The numbers of jobs by state (adm 10.1). What the store does not know is 0.

    `available` is what waits in the brokers, where this process can ask them, and `pending` is what is held.
    `completed` is the number of runs that succeeded in the last day.
    """

    available: Count
    active: Count
    pending: Count
    scheduled: Count
    retryable: Count
    completed: Count
    discarded: Count
    cancelled: Count


class Throughput(TypedDict):
    """The runs of the last hour, by the minute; `failed` ones are among the processed."""

    processed_per_minute: Annotated[float, Field(ge=0)]
    failed_per_minute: Annotated[float, Field(ge=0)]


class AdminStats(TypedDict):
    """The numbers of a fleet: the queues that its workers take, the living workers, jobs and runs."""

    queues: Count
    workers: Count
    jobs: JobCounts
    throughput: Throughput


class ListedQueue(TypedDict):
    """A queue that workers take, that has messages or dead letters, or that is paused (http 11.1)."""

    name: str
    status: Literal["active", "paused"]


class QueuesPlace(TypedDict):
    """The place of a list that is whole."""

    total: Count
    limit: Count
    offset: Literal[0]
    has_more: Literal[False]


class Queues(TypedDict):
    """The queues of a fleet, by name."""

    queues: list[ListedQueue]
    pagination: QueuesPlace


class AdminQueue(TypedDict):
    """A queue with the numbers of its jobs (adm 6.1)."""

    name: str
    state: Literal["active", "paused"]
    paused: bool
    counts: JobCounts


class QueuesPage(TypedDict):
    """A numbered page of queues, by name."""

    items: list[AdminQueue]
    pagination: AdminPagination


class Implementation(TypedDict):
    """The name and the version of this server."""

    name: str
    version: str
    language: str


class Manifest(TypedDict):
    """What this server supports (http 21). It claims no level and no extension: 0 is the lowest level.

    A capability that is not named is not there.
    """

    ojs_version: str
    specversion: str
    implementation: Implementation
    conformance_level: Literal[0]
    protocols: list[str]
    backend: str
    capabilities: dict[str, bool]
    extensions: list[str]


class Admin:
    """Serves the admin API of a bridge; what has the same shape there is served by the letters."""

    def __init__(self, bridge: Bridge, letters: Letters) -> None:
        self._bridge, self._letters = bridge, letters

    @answers(ADMIN, "GET", "/admin/dead-letter")
    def list(self, query: AdminQuery) -> JobsPage:
        """List dead letters by numbered pages, the newest first."""
        return self._page(query, query.where(), "discarded")

    @answers(ADMIN, "GET", "/admin/jobs")
    def jobs(self, query: JobsQuery) -> JobsPage:
        """List what waits, the next one due first, and dead letters after it, by numbered pages."""
        page = self._page(query, Filter(query.queue, query.type), query.state)
        if query.state in get_args(Unknown):
            page["note"] = f"the store knows no {query.state} jobs: it has what waits and what died"
        return page

    def _page(self, query: Numbered, where: Filter, state: str | None) -> JobsPage:
        bridge, total, jobs = self._bridge, 0, list[Parked | Letter]()
        if state in (None, *_KINDS):
            waits = replace(where, kind=_KINDS.get(state or ""))
            total = bridge.waiting.count(waits)
            if query.offset < total:
                read = partial(bridge.waiting.list, waits)
                jobs += page_after(read, query.offset, query.per_page).jobs
        if state in (None, "discarded"):
            skipped, left = max(query.offset - total, 0), query.per_page - len(jobs)
            page = page_after(partial(bridge.dead_letters.list, where), skipped, max(left, 1))
            jobs += page.letters[:left]
            is_last = page.next_cursor is None and (page.letters or not skipped)
            total += skipped + len(page.letters) if is_last else self._letters.counts.total(where)
        items = [cast(shapes.JobDetail, listed(Whereabouts(job).to_ojs())) for job in jobs]
        place: AdminPagination = {"total": total, "page": query.page, "per_page": query.per_page}
        return {"items": items, "pagination": place}

    @answers(ADMIN, "GET", "/admin/stats")
    def stats(self) -> AdminStats:
        """Count queues, workers, jobs and runs; a number that the store does not know is 0."""
        facts = {name: check.facts for name, check in self._bridge.health.check().checks.items()}
        day = _runs(self._bridge.rates())
        hour = _runs(self._bridge.rates(since=self._bridge.engine.now() - timedelta(hours=1)))
        failed = sum(hour[outcome] for outcome in _FAILED)
        return {
            "queues": len({row["queue"] for row in facts["workers"].get("queues", ())}),
            "workers": facts["workers"].get("seen", 0),
            "jobs": self._counts(facts["backlog"].get("depth", 0), day),
            "throughput": {
                "processed_per_minute": (hour["completed"] + failed) / 60,
                "failed_per_minute": failed / 60,
            },
        }

    @answers(ADMIN, "GET", "/queues")
    def queues(self) -> Queues:
        """List the queues that are known, and whether an operator has paused them."""
        names, paused, _ = self._queues()
        listed: list[ListedQueue] = [
            {"name": name, "status": "paused" if name in paused else "active"} for name in names
        ]
        place: QueuesPlace = {"total": len(names), "limit": len(names), "offset": 0, "has_more": False}
        return {"queues": listed, "pagination": place}

    @answers(ADMIN, "GET", "/admin/queues")
    def admin_queues(self, query: Numbered) -> QueuesPage:
        """List the queues that are known with the numbers of their jobs, by numbered pages."""
        names, paused, waiting = self._queues()
        place: AdminPagination = {"total": len(names), "page": query.page, "per_page": query.per_page}
        items: list[AdminQueue] = [
            {
                "name": name,
                "state": "paused" if name in paused else "active",
                "paused": name in paused,
                "counts": self._counts(waiting[name], _runs(self._bridge.rates(queue=name)), name),
            }
            for name in names[query.offset : query.offset + query.per_page]
        ]
        return {"items": items, "pagination": place}

    def _queues(self) -> tuple[Sequence[str], Collection[str], Counter[str]]:
        """Return the queues by name, those that are paused, and how many jobs wait in the broker for each."""
        checks, waiting = self._bridge.health.check().checks, Counter[str]()
        for row in checks["backlog"].facts.get("queues", ()):
            waiting[row["queue"]] += row["depth"]
        taken = {row["queue"] for row in checks["workers"].facts.get("queues", ())}
        paused = {
            shown.hold.queue
            for shown in self._bridge.holds.list()
            if shown.hold.queue and not (shown.hold.type or shown.hold.error_type or shown.hold.dependency)
        }
        return (
            sorted({*taken, *waiting, *paused, *self._letters.counts.get(EVERYTHING).by_queue}),
            paused,
            waiting,
        )

    def _counts(self, waiting: int, day: Counter[str], queue: str | None = None) -> JobCounts:
        states = self._bridge.counts(queue=queue)
        return {
            "available": waiting,
            "active": 0,
            "pending": states["pending"],
            "scheduled": states["scheduled"],
            "retryable": states["retryable"],
            "completed": day["completed"],
            "discarded": states["discarded"],
            "cancelled": 0,
        }

    @answers(MANIFEST, "GET", "/ojs/manifest")
    def manifest(self) -> Manifest:
        """Tell what this server supports."""
        return {
            "ojs_version": VERSION,
            "specversion": VERSION,
            "implementation": {
                "name": "ojs-bridge",
                "version": metadata.version("ojs-bridge"),
                "language": "python",
            },
            "conformance_level": 0,
            "protocols": ["http"],
            "backend": self._bridge.engine.context.store_for("the HTTP API").backend,
            "capabilities": {"dead_letter": True},
            "extensions": [],
        }


def _runs(history: RateHistory) -> Counter[str]:
    """Return the number of runs by outcome."""
    runs = Counter[str]()
    for outcomes in history.by_type.values():
        runs.update({outcome: sum(series) for outcome, series in outcomes.items()})
    return runs


FLEET: list[Operation] = []


class Fleet:
    """Serves what a bridge knows of its fleet and of its operators."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(FLEET, "GET", "/health")
    def health(self, request: Request) -> shapes.Health:
        """Tell the health of store, broker, workers and what waits; 503 if store or broker are away."""
        # Without a token a probe gets the status alone.
        health = self._bridge.health.check()
        answer: shapes.Health = {"status": health.status}
        if ACTOR in request.scope:
            answer = cast(shapes.Health, health.to_ojs())
        if health.status == "away":
            message = "the store or the broker is away"
            raise Refusal(503, "backend_error", message, retryable=True, details={**answer})
        return answer

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
        return {"records": page.records, "next_cursor": page.next_cursor}

    @answers(FLEET, "GET", "/marks")
    def marks(self, query: Since) -> shapes.Marks:
        """List the marks of the last 180 days, the newest first."""
        return {"marks": self._bridge.marks.list(since=query.since, limit=query.limit)}

    @answers(FLEET, "POST", "/marks")
    def mark(self, body: MarkBody) -> Mark:
        """Write a mark, such as a deploy, for now or for another time."""
        try:
            return self._bridge.marks.add(body.text, at=body.at)
        except ValueError as error:
            raise invalid(str(error)) from None
