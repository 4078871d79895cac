"""Result backends that stop a job where its message asks for it, so that its worker can be killed there."""

from __future__ import annotations

import time
from typing import Any

from celery.backends.database import DatabaseBackend

from tests.contract.notes import Settings, client
from tests.contract.steps import sigkill
from tests.on_celery.polling import Polling


class Halting:
    """Stops before or after a success is stored, or after the chord has counted it; once for each job."""

    def mark_as_done(self, task_id: str, result: Any, request: Any = None, *rest: Any, **options: Any) -> Any:
        """Store a success, between two places to stop at."""
        halt(request, "before the result")
        super().mark_as_done(task_id, result, request, *rest, **options)  # type: ignore[misc]
        halt(request, "after the count")

    def store_result(self, *args: Any, request: Any = None, **options: Any) -> Any:
        """Store a result, and stop after it."""
        stored = super().store_result(*args, request=request, **options)  # type: ignore[misc]
        halt(request, "after the result")
        return stored


class OnRedis(Halting, Polling):
    """Results on Redis."""


class InDatabase(Halting, DatabaseBackend):
    """Results in a database."""


def halt(request: Any, place: str) -> None:
    """Note that a job has come to the place that its message names, and stop there, the first time."""
    if request is None or (getattr(request, "headers", None) or {}).get("halt") != place:
        return
    if request.task == "celery.chord_unlock":
        return  # Celery gives this job the headers of the chord's body.
    redis = client(Settings.from_env().backend)
    if redis.set(f"halted:{request.id}", 1, nx=True):
        if "dies" in request.headers:
            sigkill()
        redis.rpush("halts", request.id)
        time.sleep(120)


def halt_in_the_end(task: Any = None, **_: Any) -> None:
    """Stop once the bridge has settled the job, and before its message is acknowledged."""
    halt(getattr(task, "request", None), "before the acknowledgement")
