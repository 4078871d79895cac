"""The admin API's routes of dead letters, and the manifest (spec adm 7 to 11, http 21)."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from importlib import metadata
from typing import Annotated, Any, Literal, cast

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from ..bridge import Bridge
from ..errors import RetryNotFound
from ..operations.rates import RateHistory
from ..store import Letter, Parked
from . import shapes
from .answers import VERSION, not_found
from .letters import Letters
from .requests import AdminQuery, LettersQuery
from .routes import Operation, answers
from .shapes import Count, Time

ADMIN: list[Operation] = []
#: The manifest's path has no version of the API before it.
MANIFEST: list[Operation] = []

_FAILED = ("retried", "discarded", "dead_lettered")


class AdminItem(shapes.Letter):
    """A dead letter as the admin API lists it."""

    created_at: Time | None


class AdminPagination(TypedDict):
    """The place of a numbered page among all entries."""

    total: Count
    page: Annotated[int, Field(ge=1)]
    per_page: Annotated[int, Field(ge=1)]


class AdminPage(TypedDict):
    """A numbered page of dead letters."""

    items: list[AdminItem]
    pagination: AdminPagination


class AdminJob(shapes.Job):
    """A dead letter or a parked retry as the admin API details it."""

    specversion: Literal["1.0"]
    state: Literal["discarded", "retryable"]
    created_at: Time | None
    discarded_at: NotRequired[Time]
    next_retry_at: NotRequired[Time]
    retry_policy: NotRequired[dict[str, Any]]
    metadata: dict[str, Any]


class JobCounts(TypedDict):
    """The numbers of jobs by state (adm 10.1). What the store does not know is 0.

    `available` is what waits in the brokers, where this process can ask them. `completed` is the number of
    runs that succeeded in the last day.
    """

    available: Count
    active: Count
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
    def list(self, query: AdminQuery) -> AdminPage:
        """List dead letters by numbered pages, the newest first."""
        asked = query.model_dump(exclude={"state", "page", "per_page"}, exclude_none=True)
        offset = (query.page - 1) * query.per_page
        found = self._letters.list(LettersQuery(**asked, limit=query.per_page, offset=offset))
        total = found["total"]
        if total is None:
            total = self._letters.counts.get(query.kind()).total
        items = [{**job, "created_at": job["metadata"]["created_at"]} for job in found["jobs"]]
        place: AdminPagination = {"total": total, "page": query.page, "per_page": query.per_page}
        return {"items": cast(list[AdminItem], items), "pagination": place}

    @answers(ADMIN, "GET", "/admin/jobs/{id}")
    def job(self, job_id: str) -> AdminJob:
        """Get a dead letter, or else a parked retry."""
        entry: Letter | Parked | None = self._bridge.dead_letters.find(job_id)
        if entry is None:
            try:
                entry = self._bridge.retries.get(job_id)
            except RetryNotFound:
                raise not_found("job", job_id) from None
        job = entry.to_ojs()
        policy = job.get("policy") or job.get("retry")
        job |= {"specversion": VERSION, "created_at": job["metadata"].get("created_at")}
        return cast(AdminJob, job | ({"retry_policy": policy} if policy else {}))

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
            "jobs": {
                "available": facts["backlog"].get("depth", 0),
                "active": 0,
                "scheduled": 0,
                "retryable": self._bridge.retries.count(),
                "completed": day["completed"],
                "discarded": self._letters.counts.get({}).total,
                "cancelled": 0,
            },
            "throughput": {
                "processed_per_minute": (hour["completed"] + failed) / 60,
                "failed_per_minute": failed / 60,
            },
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
            "backend": type(self._bridge.store).__name__.removesuffix("Store").lower(),
            "capabilities": {"dead_letter": True},
            "extensions": [],
        }


def _runs(history: RateHistory) -> Counter[str]:
    """Return the number of runs by outcome."""
    found = Counter[str]()
    for outcomes in history.by_type.values():
        found.update({outcome: sum(series) for outcome, series in outcomes.items()})
    return found
