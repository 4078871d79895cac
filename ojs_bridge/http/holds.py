"""The routes of holds: pauses of job types, queues and error types (a queue: spec http 11.3, adm 6.3)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from ..bridge import Bridge
from ..errors import HoldNotFound
from ..operations.holds import Shown
from ..rules.job import format_time
from . import shapes
from .answers import invalid, not_found
from .requests import Pause, PauseQueue, Resume
from .routes import Operation, answers

HOLDS: list[Operation] = []


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


def _shown(hold: Shown) -> shapes.Hold:
    return cast(shapes.Hold, hold.to_ojs())


@contextmanager
def _refused() -> Iterator[None]:
    """Refuse what is no pause: its field, the value and the rule."""
    try:
        yield
    except ValueError as error:
        raise invalid(str(error)) from None
