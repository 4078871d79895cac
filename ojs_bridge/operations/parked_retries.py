"""The operator's view of parked retries: list, get, run now, cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.events import cancelled
from ..engine.keeping import job_of_parked
from ..engine.redaction import without
from ..errors import RetryNotFound
from ..rules.patterns import check_pattern, matches
from ..store import Parked, ParkedFilter, ParkedPage, Store
from .audit import Audit, some, uninterrupted
from .draining import Drained, Draining
from .letters import LOOK_THROUGH, Kind, every_page, folded, needed, only_id, page_size, wanted
from .replaying import MAX_TOLD, READ, Bulk

#: So many retries are changed between two looks at the progress.
LOT = 100


class ParkedRetries:
    """The parked retries of a bridge. Every method raises ConfigurationError when the bridge has no store."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._audit = Audit(context)

    def list(self, *, limit: int = 50, cursor: str | None = None, **kind: Unpack[Kind]) -> ParkedPage:
        """Return a page of the retries of a Kind, the next one due first; its times are those of the parking.

        For anything but a queue and a type, a page searches 2,000 retries: it may have few, or none, and
        still a cursor. Raises ValueError for a limit outside 1 to 1000, for a cursor that no page has
        returned, for a time without a zone, and for a group.
        """
        where, is_wanted, size = *self._wanted(kind), page_size(limit)
        step, looked, found = min(size, READ), 0, list[Parked]()
        while True:
            page = self._store.list_parked(where, limit=step, cursor=cursor)
            found += filter(is_wanted, page.retries)
            cursor, looked = page.next_cursor, looked + step
            if cursor is None or len(found) + step > size or looked >= LOOK_THROUGH:
                return ParkedPage(tuple(map(self._shown, found)), cursor)

    def get(self, job_id: str) -> Parked:
        """Return a job's parked retry; raises RetryNotFound."""
        return self._shown(self._get(job_id))

    def id_of(self, text: str) -> str:
        """Return the id of a parked job that is this text, or else the only one, as for dead letters."""
        return text if self._store.get_parked(text) else only_id(text, self._store.parked_beginning)

    @uninterrupted()
    def run(self, job_id: str) -> None:
        """Make a job's parked retry due now: a worker publishes it; raises RetryNotFound."""
        parked = self._get(job_id)
        with self._audit.recording("retry.run", **some([job_id])):
            if not self._store.reschedule(parked, self._context.clock()):
                raise _gone(job_id)

    @uninterrupted()
    def cancel(self, job_id: str) -> None:
        """Delete a job's parked retry: the job never runs again; raises RetryNotFound."""
        parked = self._get(job_id)
        with self._audit.recording("retry.cancel", **some([job_id])):
            if not self._change(parked, None):
                raise _gone(job_id)

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
        _check(tasks)
        with self._audit.recording("retry.drain", tasks=[*tasks]) as entry:
            entry.add(0)

            def told(published: int) -> None:
                entry.count = published
                progress(published)

            return Draining(self._context, self._store, tasks, told).run()

    def drainable(self, tasks: Sequence[str] = ()) -> Iterator[Parked]:
        """Return the retries that `drain` would publish, in the order of their time; raises as `drain`."""
        _check(tasks)
        return map(self._shown, Draining(self._context, self._store, tasks).retries())

    def count(self, **kind: Unpack[Kind]) -> int:
        """Count the parked retries of a Kind; for anything but a queue and a type it reads them all."""
        where, is_wanted = self._wanted(kind)
        if is_plain(kind):
            return self._store.count_parked(where)
        return sum(sum(map(is_wanted, page.retries)) for page in self._pages(where, None))

    def pages(self, kind: Kind, cursor: str | None) -> Iterator[tuple[Sequence[Parked], str | None]]:
        """Yield pages of retries as they are stored, the next due first, each with the cursor after it."""
        where, is_wanted = self._wanted(kind)
        for page in self._pages(where, cursor):
            yield [*filter(is_wanted, page.retries)], page.next_cursor

    def pages_of_ids(
        self, ids: Sequence[str], cursor: str | None
    ) -> Iterator[tuple[Sequence[Parked], str | None]]:
        """Yield the retries of some jobs as they are stored, each page with the cursor after it."""
        for start in range(int(cursor or 0), len(ids), READ):
            found = (self._store.get_parked(job_id) for job_id in ids[start : start + READ])
            yield [parked for parked in found if parked is not None], str(start + READ)

    def change_pages(
        self,
        pages: Iterable[Sequence[Parked]],
        due: datetime | None,
        told: Callable[[Bulk], object],
    ) -> None:
        """Make pages of retries due, or cancel them for None; `told` is called with the outcome so far.

        With a time that is the same for all, no retry comes a second time on a later page.
        """
        done = Bulk(0)
        for lot in (page[at : at + LOT] for page in pages for at in range(0, len(page), LOT)):
            with uninterrupted():
                wrong = [(it.id, str(_gone(it.id))) for it in lot if not self._change(it, due)]
                done = Bulk(
                    done.matched + len(lot),
                    done.succeeded + len(lot) - len(wrong),
                    done.failed + len(wrong),
                    (*done.errors, *wrong)[:MAX_TOLD],
                )
                told(done)

    def _change(self, parked: Parked, due: datetime | None) -> bool:
        if due is not None:
            return parked.next_retry_at <= due or self._store.reschedule(parked, due)
        if not self._store.cancel_parked(parked):
            return False
        self._context.emit(cancelled(job_of_parked(parked), self._context.clock()))
        return True

    def _pages(self, where: ParkedFilter, cursor: str | None) -> Iterator[ParkedPage]:
        return every_page(lambda after: self._store.list_parked(where, limit=READ, cursor=after or cursor))

    def _wanted(self, kind: Kind) -> tuple[ParkedFilter, Callable[[Parked], bool]]:
        """Return the filter for the store, and a function that says whether a retry is of the Kind."""
        _, text = wanted(kind)
        if kind.get("group"):
            raise ValueError("group: parked retries have none")
        error_type, since, until = kind.get("error_type"), kind.get("since"), kind.get("until")

        def is_wanted(parked: Parked) -> bool:
            return (
                (error_type is None or matches(_error_type(parked), error_type))
                and (since is None or parked.parked_at >= since)
                and (until is None or parked.parked_at < until)
                and (text is None or _says(self._shown(parked), text))
            )

        return ParkedFilter(kind.get("queue"), kind.get("type")), is_wanted

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


def is_plain(kind: Kind) -> bool:
    """Return whether a Kind has no filter but a queue and a type, which the store itself knows."""
    return not any(value for name, value in kind.items() if name not in ("queue", "type"))


def _error_type(parked: Parked) -> str:
    errors: Sequence[Mapping[str, Any]] = parked.state.get("errors") or ({},)
    return str(errors[-1].get("type") or "Unknown")


def _says(parked: Parked, text: str) -> bool:
    """Return whether the arguments, the error messages or the reason of a retry have a text."""
    messages = [entry.get("message") for entry in parked.state.get("errors", ())]
    words = [parked.reading.args, parked.reading.kwargs, messages, parked.reason]
    return text.casefold() in folded(words)


def _check(tasks: Sequence[str]) -> None:
    for pattern in tasks:
        check_pattern("tasks", pattern)


def _gone(job_id: str) -> RetryNotFound:
    return RetryNotFound(f"the parked retry of job {job_id!r} is being published, or is gone")
