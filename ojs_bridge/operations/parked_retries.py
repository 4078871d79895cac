"""The operator's view of parked retries: list, get, run now, cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from ..engine.publishing import Publisher
from ..errors import InvalidState, RetryNotFound
from ..spec.job import Job, decode
from ..spec.patterns import check_pattern
from ..store import Parked, ParkedFilter, ParkedPage, Store
from .draining import Drained, Draining, Insist
from .letters import needed, page_size
from .redaction import Redactor, without


class ParkedRetries:
    """Parked retries of one bridge. Every method raises ConfigurationError when the bridge has no store."""

    def __init__(
        self,
        store: Store | None,
        publishers: Mapping[str, Publisher],
        *,
        insist: Insist,
        clock: Callable[[], datetime],
        cancelled: Callable[[Parked], None],
        redactor: Redactor,
    ) -> None:
        self._maybe_store = store
        self._publishers = publishers
        self._insist = insist
        self._clock = clock
        self._cancelled = cancelled
        self._redactor = redactor

    def list(
        self,
        *,
        queue: str | None = None,
        type: str | None = None,  # noqa: A002 - the spec's word
        limit: int = 50,
        cursor: str | None = None,
    ) -> ParkedPage:
        """Return a page, the next one due first; `type` takes `prefix.*`.

        Raises ValueError for a limit outside 1 to 1000 and for a cursor that no page gave out.
        """
        check_pattern("type", type)
        page = self._store.list_parked(ParkedFilter(queue, type), limit=page_size(limit), cursor=cursor)
        return ParkedPage(tuple(map(self._shown, page.retries)), page.next_cursor)

    def get(self, job_id: str) -> Parked:
        """Return a job's parked retry; raises RetryNotFound."""
        return self._shown(self._get(job_id))

    def run(self, job_id: str) -> None:
        """Have a job's parked retry published now; raises RetryNotFound."""
        if not self._store.reschedule(self._get(job_id), self._clock()):
            raise RetryNotFound(f"the parked retry of job {job_id!r} is being published, or is gone")

    def cancel(self, job_id: str) -> None:
        """Delete a job's parked retry: it never runs again; raises RetryNotFound."""
        parked = self._get(job_id)
        if not self._store.cancel_parked(parked):
            raise RetryNotFound(f"the parked retry of job {job_id!r} is being published, or is gone")
        self._cancelled(parked)

    def drain(
        self,
        tasks: Sequence[str] = (),
        *,
        progress: Callable[[int], object] = lambda _: None,
    ) -> Drained:
        """Publish parked retries now, delayed by their framework until they are due: nobody needs the store.

        Of the job types that `tasks`, patterns such as `billing.*`, name; none is all. Those that arrive
        meanwhile too. `progress` is called with how many are published. Raises StoreError and Unreachable.
        """
        return self._draining(tasks, progress).run()

    def drainable(self, tasks: Sequence[str] = ()) -> Iterator[Parked]:
        """Yield what `drain` would publish, the next one due first; raises StoreError."""
        return map(self._shown, self._draining(tasks).retries())

    def _draining(self, tasks: Sequence[str], progress: Callable[[int], object] = lambda _: None) -> Draining:
        return Draining(
            self._store, self._publishers, tasks, clock=self._clock, insist=self._insist, progress=progress
        )

    def count(self, *, queue: str | None = None, type: str | None = None) -> int:  # noqa: A002
        """Count the parked retries; `type` takes `prefix.*`; raises ValueError for another pattern."""
        check_pattern("type", type)
        return self._store.count_parked(ParkedFilter(queue, type))

    def _get(self, job_id: str) -> Parked:
        parked = self._store.get_parked(job_id)
        if parked is None:
            raise RetryNotFound(f"there is no parked retry of job {job_id!r}")
        return parked

    def _shown(self, parked: Parked) -> Parked:
        """Return what the redaction leaves of a parked retry."""
        if not self._redactor:
            return parked
        message, secrets = self._redactor.message(parked.message)
        state, reason = without(parked.state, secrets), without(parked.reason, secrets)
        return replace(parked, message=message, state=state, reason=reason)

    @property
    def _store(self) -> Store:
        return needed(self._maybe_store, "parked retries")


def parked_of(
    job: Job,
    at: datetime,
    reason: str,
    framework: str,
    message: Mapping[str, Any],
    state: Mapping[str, Any],
    max_attempts: int,
    *,
    parked_at: datetime,
) -> Parked:
    """Return a job's retry as the store keeps it until a time."""
    return Parked(
        id=job.id,
        key=job.key,
        fence=job.fence,
        type=job.type,
        queue=job.queue,
        framework=framework,
        attempt=job.attempt,
        max_attempts=max_attempts,
        next_retry_at=at,
        parked_at=parked_at,
        reason=reason,
        state=state,
        message=message,
    )


def job_of(parked: Parked) -> Job:
    """Return the job of a parked retry; of one whose state cannot be read, what the store says of it."""
    bare = Job(parked.id, parked.type, parked.queue, parked.attempt, fence=parked.fence)
    try:
        return decode(dict(parked.state), bare)
    except InvalidState:
        return bare
