"""The carrying out of a bulk operation by the process that began or resumed it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, TypeVar, cast

from ..errors import NotResumable, StoreError, Unreachable
from ..rules.job import Job, parse_time
from .audit import Audit, uninterrupted
from .dead_letters import DeadLetters
from .letters import Kind
from .operation import Ledger, Operation, State
from .parked_retries import ParkedRetries
from .replaying import MAX_TOLD, Bulk, override_of

#: The seconds between two writings of the progress, and between two looks for jobs that have failed.
SAVED, LOOKED = 1.0, 2.0
#: The newest jobs with an outcome that are looked at, and the fewest from which a share is taken.
WATCHED, ENOUGH = 200, 20
Entries_co = TypeVar("Entries_co", covariant=True)


class _Paged(Protocol[Entries_co]):
    """Dead letters, or parked retries, in pages that each have the cursor after them."""

    def pages(self, kind: Kind, cursor: str | None) -> Iterator[tuple[Entries_co, str | None]]: ...

    def pages_of_ids(
        self, ids: Sequence[str], cursor: str | None
    ) -> Iterator[tuple[Entries_co, str | None]]: ...


class _Stopped(Exception):
    """The operation ends before its end."""


class Running:
    """One operation as this process carries it out; it writes its progress and looks for a stop."""

    def __init__(
        self,
        operation: Operation,
        ledger: Ledger,
        audit: Audit,
        letters: DeadLetters,
        retries: ParkedRetries,
        progress: Callable[[Operation], object] | None,
    ) -> None:
        self._ledger, self._audit, self._letters, self._retries = ledger, audit, letters, retries
        self._before = self._now = self._page = operation
        self._progress = progress
        self._saved_at = self._looked_at = time.monotonic()

    def to_its_end(self) -> Operation:
        """Carry the operation out, as `Operations.run` says."""
        try:
            return self._ended()
        except KeyboardInterrupt:
            self._end_if_possible("stopped", "its process was interrupted")
            raise

    def _ended(self) -> Operation:
        try:
            self._carry_out()
        except _Stopped as stopped:
            return self._end("stopped", str(stopped))
        except Unreachable as error:
            return self._end("failed", str(error))
        except Exception as error:
            self._end_if_possible("failed", str(error))
            raise
        return self._end("done", "")

    def _carry_out(self) -> None:
        asked = self._now
        if asked.action == "purge":
            self._letters.purge_pages(self._pages(self._letters), self._told)
        elif asked.action == "retry":
            override = override_of(asked.override)
            replayer = self._letters.replayer(self._sent, asked.id)
            replayer.many(self._pages(self._letters), override, rate=asked.rate, told=self._told)
        else:
            due = asked.began_at if asked.action == "run" else None
            self._retries.change_pages(self._pages(self._retries), due, self._told)

    def _pages(self, source: _Paged[Entries_co]) -> Iterator[Entries_co]:
        """Yield pages of letters or retries from the cursor on; the cursor moves when a page is done."""
        asked = self._now
        if asked.ids is None:
            times = {n: parse_time(asked.kind[n]) for n in ("since", "until") if n in asked.kind}
            pages = source.pages(cast(Kind, {**asked.kind, **times}), asked.cursor)
        else:
            pages = source.pages_of_ids(self._ledger.ids_of(asked), asked.cursor)
        for entries, cursor in pages:
            yield entries
            # The last page has no cursor after it, and none means the first page.
            if cursor is not None:
                self._now = self._page = replace(self._now, cursor=cursor)
                self._save_now_and_then()

    def _told(self, bulk: Bulk) -> None:
        before = self._before
        self._now = replace(
            self._now,
            matched=before.matched + bulk.matched,
            succeeded=before.succeeded + bulk.succeeded,
            failed=before.failed + bulk.failed,
            errors=(*before.errors, *bulk.errors)[:MAX_TOLD],
        )
        if self._progress is not None:
            self._progress(self._now)
        self._look_for_failures()
        self._save_now_and_then()

    def _sent(self, _job: Job) -> None:
        # A batch that is broken off is not told of, but its jobs were sent.
        self._now = replace(self._now, matched=self._now.matched + 1, succeeded=self._now.succeeded + 1)

    def _look_for_failures(self) -> None:
        """Stop if too many of the newest jobs that had their time have failed, or have failed an attempt."""
        limit = self._now.stop_if_failing
        if limit is None or time.monotonic() < self._looked_at + LOOKED:
            return
        self._looked_at = time.monotonic()
        newest = self._ledger.newest_fates(self._now, ("failed", "succeeded"), WATCHED)
        failed = sum(fate == "failed" for fate in newest)
        if len(newest) >= ENOUGH and failed > limit * len(newest):
            raise _Stopped(f"{failed} of the last {len(newest)} replayed jobs that have run have failed")

    def _save_now_and_then(self) -> None:
        if time.monotonic() >= self._saved_at + SAVED:
            self._save(self._now)

    def _save(self, operation: Operation) -> None:
        """Write the progress; raises _Stopped when an operator wants it, and NotResumable."""
        operation = replace(operation, updated_at=self._ledger.now())
        saved = replace(self._resumable(operation), revision=operation.revision + 1)
        with uninterrupted():
            if self._ledger.save(saved):
                self._now, self._saved_at = replace(operation, revision=saved.revision), time.monotonic()
                return
        found = self._ledger.get(operation.id)
        if found.state != "stopping":
            raise NotResumable(f"operation {operation.id!r} was taken up by another process")
        self._now = replace(self._now, revision=found.revision)
        raise _Stopped("an operator stopped it")

    def _resumable(self, operation: Operation) -> Operation:
        """Return an operation without the counts of entries that `run` meets again from its cursor on."""
        if operation.state == "done":
            return operation
        page, succeeded = self._page, operation.succeeded
        if operation.action == "run":
            succeeded = page.succeeded
        matched = page.matched + succeeded - page.succeeded
        return replace(
            operation, matched=matched, succeeded=succeeded, failed=page.failed, errors=page.errors
        )

    def _end_if_possible(self, state: State, why: str) -> None:
        if not self._now.has_ended:
            with suppress(StoreError, NotResumable):
                self._end(state, why)

    @uninterrupted()
    def _end(self, state: State, why: str) -> Operation:
        ended = self._resumable(replace(self._now, state=state, why=why))
        try:
            self._save(ended)
        except _Stopped:
            # The operation has ended by itself meanwhile.
            self._save(replace(ended, revision=self._now.revision))
        self._audit.end(self._now.record, state, self._now.succeeded - self._now.recorded)
        return self._now
