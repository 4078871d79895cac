"""The delivery of a request: its message, and the job that the message describes."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from celery import Task

from ..errors import InvalidState
from ..messages import CREATED, HEADER
from ..rules.job import Job, count_of, decoded
from . import wire as wires
from .holding import Unsettled
from .wire import KEY, OUTCOME, Carried, Wire


class Delivery:
    """One delivery of a task's message; an eagerly applied task gets the message that it would have had."""

    def __init__(self, task: Task, request: Any) -> None:
        self._task = task
        self._request = request
        #: The decision on a run that has ended, if it could not be carried out yet.
        self.unsettled: Unsettled | None = None
        self._parts = self._take_parts(request)
        #: The headers of the message.
        self.headers: Mapping[str, Any] = (request.headers or {}) if self._parts is None else self._parts[3]

    @property
    def publication(self) -> str:
        """The mark by which two messages of the job's first run differ; "" if the broker gives none."""
        return "" if self._parts is None else self._parts[4]

    @property
    def is_plain(self) -> bool:
        """Whether the message has no retry state."""
        return HEADER not in self.headers

    @property
    def returnable(self) -> bool:
        """Whether the broker still has the message, and takes it back."""
        return bool(self._task.acks_late and not self._request.is_eager)

    @functools.cached_property
    def wire(self) -> Wire:
        """The message."""
        app, request = self._task.app, self._request
        if self._parts is None:
            return wires.eager(app, self._task.name, request, self.headers)
        return wires.delivered(app, self._parts, request.properties or {}, request.delivery_info or {})

    def bare_job(self) -> Job:
        """Return the job as Celery alone describes it."""
        app, request = self._task.app, self._request
        if self._parts is None:
            headers: Mapping[str, Any] = self.wire.headers
            queue = self.wire.queue
        else:
            # The whole message takes time to make, and only a job that goes on needs it.
            headers, queue = self.headers, wires.queue_of(app, request.delivery_info or {})
        retries = count_of(request.retries) or 0
        return Job(
            # A producer may send an id of another type.
            id=str(request.id),
            type=self._task.name,
            queue=queue,
            attempt=1 + retries,
            fence=retries,
            created_at=wires.time_in(app, headers.get(CREATED)),
            expires=wires.expiry(app, headers),
            chain=wires.chain_of(headers),
        )

    def known_job(self) -> Job:
        """Return as much of the job as can be read; never raises."""
        try:
            bare = self.bare_job()
            job = self.job(bare)
        except Exception:  # noqa: BLE001 - anything may be wrong with the message
            return Job(str(self._request.id), str(self._task.name), "")
        return job if isinstance(job, Job) else bare

    def job(self, bare: Job) -> Job | InvalidState:
        """Return the job with the state in its message, or why the state cannot be read."""
        return decoded(self.headers.get(HEADER), bare, self._request.retries)

    def _take_parts(self, request: Any) -> Carried | None:
        """Return the message that a request carries, and hide the bridge's properties from the task."""
        properties = dict(request.properties or {})
        parts: Carried | None = properties.pop(KEY, None)
        self.unsettled = properties.pop(OUTCOME, None)
        request.properties = properties
        return parts
