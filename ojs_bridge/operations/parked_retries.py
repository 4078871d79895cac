"""The operator's view of parked retries: list, get, run now, cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ..engine.context import Context
from ..engine.events import cancelled
from ..engine.keeping import job_of_parked
from ..engine.redaction import without
from ..errors import RetryNotFound
from ..spec.patterns import check_pattern
from ..store import Parked, ParkedFilter, ParkedPage, Store
from .audit import Audit, some
from .draining import Drained, Draining
from .letters import needed, only_id, page_size


class ParkedRetries:
    """The parked retries of a bridge. Every method raises ConfigurationError when the bridge has no store."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._audit = Audit(context)

    def list(
        self,
        *,
        queue: str | None = None,
        type: str | None = None,  # noqa: A002 - the spec's word
        limit: int = 50,
        cursor: str | None = None,
    ) -> ParkedPage:
        """Return a page, the next retry due first; `type` is a type, or a pattern such as `billing.*`.

        Raises ValueError for a limit outside 1 to 1000, and for a cursor that no page has returned.
        """
        check_pattern("type", type)
        page = self._store.list_parked(ParkedFilter(queue, type), limit=page_size(limit), cursor=cursor)
        return ParkedPage(tuple(map(self._shown, page.retries)), page.next_cursor)

    def get(self, job_id: str) -> Parked:
        """Return a job's parked retry; raises RetryNotFound."""
        return self._shown(self._get(job_id))

    def id_of(self, text: str) -> str:
        """Return the id of a parked job that is this text, or else the only one, as for dead letters."""
        return text if self._store.get_parked(text) else only_id(text, self._store.parked_beginning)

    def run(self, job_id: str) -> None:
        """Make a job's parked retry due now: a worker publishes it; raises RetryNotFound."""
        parked = self._get(job_id)
        with self._audit.recording("retry.run", **some([job_id])):
            if not self._store.reschedule(parked, self._context.clock()):
                raise _gone(job_id)

    def cancel(self, job_id: str) -> None:
        """Delete a job's parked retry: the job never runs again; raises RetryNotFound."""
        parked = self._get(job_id)
        with self._audit.recording("retry.cancel", **some([job_id])):
            if not self._store.cancel_parked(parked):
                raise _gone(job_id)
        self._context.emit(cancelled(job_of_parked(parked), self._context.clock()))

    def drain(
        self,
        tasks: Sequence[str] = (),
        *,
        progress: Callable[[int], object] = lambda _: None,
    ) -> Drained:
        """Publish parked retries now, delayed by their framework until they are due: the store is not needed.

        `tasks` are patterns of job types, such as `billing.*`; without them all retries are published.
        Retries that are parked meanwhile are published, too. `progress` is called with the number published
        so far. Raises StoreError and Unreachable, and ValueError for an invalid pattern.
        """
        draining = self._draining(tasks, progress)
        with self._audit.recording("retry.drain", tasks=[*tasks]) as entry:
            drained = draining.run()
            entry.count = drained.published
        return drained

    def drainable(self, tasks: Sequence[str] = ()) -> Iterator[Parked]:
        """Return the retries that `drain` would publish, in the order of their time; raises as `drain`."""
        return map(self._shown, self._draining(tasks).retries())

    def _draining(self, tasks: Sequence[str], progress: Callable[[int], object] = lambda _: None) -> Draining:
        for pattern in tasks:
            check_pattern("tasks", pattern)
        return Draining(self._context, self._store, tasks, progress)

    def count(self, *, queue: str | None = None, type: str | None = None) -> int:  # noqa: A002
        """Count the parked retries of a queue, and of a type or pattern; raises ValueError."""
        check_pattern("type", type)
        return self._store.count_parked(ParkedFilter(queue, type))

    def _get(self, job_id: str) -> Parked:
        parked = self._store.get_parked(job_id)
        if parked is None:
            raise RetryNotFound(f"there is no parked retry of job {job_id!r}")
        return parked

    def _shown(self, parked: Parked) -> Parked:
        """Return the redacted retry."""
        if not self._context.redactor:
            return parked
        message, secrets = self._context.redactor.message(parked.message)
        state, reason = without(parked.state, secrets), without(parked.reason, secrets)
        return replace(parked, message=message, state=state, reason=reason)

    @property
    def _store(self) -> Store:
        return needed(self._context.store, "parked retries")


def _gone(job_id: str) -> RetryNotFound:
    return RetryNotFound(f"the parked retry of job {job_id!r} is being published, or is gone")
