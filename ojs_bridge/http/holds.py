"""The routes of holds and limits (pauses of queues: spec http 11.3, adm 6.3; limits: rl 10)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from typing_extensions import TypedDict

from ..bridge import Bridge
from ..errors import ConfigurationError, HoldNotFound
from ..operations.holds import Shown
from ..rules.job import format_time
from . import shapes
from .admin import AdminPagination
from .answers import invalid, not_found
from .requests import LimitBody, Numbered, Pause, PauseQueue, Resume
from .routes import Operation, answers

HOLDS: list[Operation] = []
LIMITS: list[Operation] = []


class Slots(TypedDict):
    """How many jobs may run at a time, and do, and how many more may: null where each value has its own."""

    limit: shapes.Count
    active: shapes.Count
    available: shapes.Count | None


class RateState(TypedDict):
    """So many jobs begin in a period, evenly spaced. Turns are given out until `next_allowed_at`."""

    limit: shapes.Count
    period: str
    next_allowed_at: shapes.Time | None


class Override(TypedDict):
    """The limit of an operator: who has set it, why, and until when; `resume` of its `id` takes it back."""

    id: str
    by: str
    why: str
    since: shapes.Time
    expires_at: shapes.Time | None


class RateLimit(TypedDict):
    """The limit of a dependency as it is now (rl 10.1), and how many held jobs need it.

    With an `argument` each value of it has this limit. `override` says that it is an operator's.
    """

    key: str
    concurrency: Slots | None
    rate: RateState | None
    argument: str | None
    waiting_count: shapes.Count
    override: Override | None


class RateLimitsPage(TypedDict):
    """A numbered page of limits."""

    items: list[RateLimit]
    pagination: AdminPagination


class Holds:
    """Serves the holds of a bridge."""

    resource = "hold"

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(HOLDS, "GET", "/holds")
    def list(self) -> shapes.Holds:
        """List the holds that are on, the oldest first."""
        return {"holds": [_shown(hold) for hold in self._bridge.holds.list()]}

    @answers(HOLDS, "POST", "/holds")
    def pause(self, body: Pause) -> shapes.Hold:
        """Hold jobs in the store: they do not begin, and use no attempt."""
        with _refused():
            hold = self._bridge.pause(
                body.type,
                queue=body.queue,
                error_type=body.error_type,
                dependency=body.dependency,
                until=body.until,
            )
        return _shown(self._bridge.holds.shown(hold))

    @answers(HOLDS, "POST", "/holds/{id}/resume")
    def resume(self, job_id: str, body: Resume) -> shapes.Hold:
        """End a pause: its jobs go on, in their order, no faster than a rate."""
        hold = self._bridge.resume(id=job_id, rate=body.rate)
        return _shown(self._bridge.holds.shown(hold))

    @answers(HOLDS, "GET", "/holds/{id}")
    def get(self, job_id: str) -> shapes.Hold:
        """Get a hold that is on, and how many jobs it holds."""
        return _shown(self._bridge.holds.get(job_id))

    @answers(HOLDS, "POST", "/admin/queues/{id}/pause")
    @answers(HOLDS, "POST", "/queues/{id}/pause")
    def pause_queue(self, job_id: str, body: PauseQueue) -> shapes.Queue:
        """Pause a queue: its jobs do not begin; jobs that run, run on."""
        with _refused():
            hold = self._bridge.pause(queue=job_id, until=body.until)
        return {
            "queue": {"name": job_id, "paused": True},
            "name": job_id,
            "status": "paused",
            "paused": True,
            "paused_at": format_time(hold.since),
        }

    @answers(HOLDS, "POST", "/admin/queues/{id}/resume")
    @answers(HOLDS, "POST", "/queues/{id}/resume")
    def resume_queue(self, job_id: str, body: Resume) -> shapes.Queue:
        """Resume a paused queue: its jobs go on, in their order, no faster than a rate."""
        try:
            hold = self._bridge.resume(queue=job_id, rate=body.rate)
        except HoldNotFound:
            raise not_found("paused_queue", job_id) from None
        return {
            "queue": {"name": job_id, "paused": False},
            "name": job_id,
            "status": "active",
            "paused": False,
            "resumed_at": format_time(hold.ended_at or hold.since),
        }


class RateLimits:
    """Serves the limits of a bridge."""

    resource = "rate_limit"

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge

    @answers(LIMITS, "GET", "/rate-limits")
    def all(self, query: Numbered) -> RateLimitsPage:
        """List the limits of dependencies."""
        found = self._bridge.limits.list()
        page = found[query.offset : query.offset + query.per_page]
        pagination: AdminPagination = {"total": len(found), "page": query.page, "per_page": query.per_page}
        return {"items": [cast(RateLimit, one.to_ojs()) for one in page], "pagination": pagination}

    @answers(LIMITS, "GET", "/rate-limits/{id}")
    def get(self, job_id: str) -> RateLimit:
        """Get the limit of a dependency, or by name:value that of a value of its argument."""
        return cast(RateLimit, self._bridge.limits.get(job_id).to_ojs())

    @answers(LIMITS, "PUT", "/rate-limits/{id}")
    def set(self, job_id: str, body: LimitBody) -> RateLimit:
        """Limit the jobs of a dependency until a time; a concurrency of 0 holds them."""
        with _refused(until="expires_at"):
            self._bridge.limit(
                job_id, rate=body.per_second, concurrency=body.concurrency, until=body.expires_at
            )
        return self.get(job_id)


def _shown(hold: Shown) -> shapes.Hold:
    return cast(shapes.Hold, hold.to_ojs())


@contextmanager
def _refused(until: str = "until") -> Iterator[None]:
    """Refuse what is no pause, and no limit: its field, the value and the rule.

    The field `until` may have another name.
    """
    try:
        yield
    except (ValueError, ConfigurationError) as error:
        raise invalid(str(error).replace("until:", f"{until}:", 1)) from None
