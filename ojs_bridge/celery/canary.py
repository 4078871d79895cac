"""The canary: jobs of an installed task that Celery runs as it does without the bridge."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery import Celery, Task

from ..engine.canary import Canary
from ..messages import HEADER
from ..rules.job import Job, count_of, decoded
from .attach import attach
from .wire import time_in

logger = logging.getLogger("ojs_bridge")

#: Where an app keeps `install`'s canary.
CANARY = "_ojs_canary"


class Outside:
    """The jobs of an installed task that the canary leaves to Celery."""

    def __init__(self, canary: Canary, task: Task) -> None:
        self._canary = canary
        self._task = task

    def has(self, headers: Mapping[str, Any]) -> bool:
        """Return whether a job is outside, by the headers that it came with.

        A job that brings its own policy is not. Nor is a job with an unreadable header, which may hold a
        policy, nor a job that comes before its time, which the bridge sends on.
        """
        job_id, name = str(headers.get("id")), self._task.name
        if self._canary.covers(name, job_id):
            return False
        job = decoded(headers.get(HEADER), Job(job_id, name, "", 1 + (count_of(headers.get("retries")) or 0)))
        return isinstance(job, Job) and not job.retry and not self._is_early(job, headers.get("eta"))

    def _is_early(self, job: Job, eta: object) -> bool:
        """Return whether a job comes before its time; its worker holds it until its `eta`."""
        due, app = job.next_retry_at, self._task.app
        if due is None:
            return False
        now = attach(app).engine.now()
        return due > max(now, time_in(app, eta) or now)

    def apart(self, inside: Callable[..., Any], outside: Callable[..., Any]) -> Callable[..., Any]:
        """Return the message handler of a task, made of a handler for each side.

        It decides once for each message, in the worker's main process.
        """

        @functools.wraps(inside)
        def receive(message: Any, *rest: Any, **options: Any) -> Any:
            headers, payload = message.headers, message.payload
            if isinstance(payload, dict):
                # The first version of Celery's protocol has its headers in the body.
                headers = {**payload, **headers}
            return (outside if self.has(headers) else inside)(message, *rest, **options)

        return receive


def outside_of(task: Task) -> Outside | None:
    """Return the jobs of a task that are outside its app's canary; None where all are under the bridge."""
    canary: Canary = getattr(task.app, CANARY)
    return None if canary.covers_all(task.name) else Outside(canary, task)


def check_canary(app: Celery) -> None:
    """Say in the log which jobs are under the bridge already; ConfigurationError for what names no task."""
    canary: Canary | None = getattr(app, CANARY, None)
    if canary is None:
        return
    installed = [task for task in app.tasks.values() if "ojs_outside" in vars(type(task))]
    canary.check([task.name for task in installed], f"installed task of the app {app.main!r}")
    if any(task.ojs_outside for task in installed):
        logger.warning("canary: under the bridge are %s; Celery itself runs the other jobs", canary)
