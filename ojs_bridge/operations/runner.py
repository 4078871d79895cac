"""A bulk operation as a process carries it out: its pages, its progress, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from ..engine.runs import Override
from ..errors import NotResumable, StoreError, Unreachable
from ..rules.job import Job
from .audit import Audit, uninterrupted
from .dead_letters import DeadLetters
from .operation import Ledger, Operation, State
from .replaying import MAX_ERRORS, Bulk
from .waiting import Waiting

#: The seconds between two writings of the progress, and between two looks for jobs that have failed.
SAVED, LOOKED = 1.0, 2.0
#: The newest jobs with an outcome that are looked at, and the fewest from which a share is taken.
WATCHED, ENOUGH = 200, 20


class _Stopped(Exception):
    """The operation ends before its end."""


class Runner:
    """One operation as this process carries it out; it writes its progress and looks for a stop."""

    def __init__(
        self,
        operation: Operation,
        ledger: Ledger,
        audit: Audit,
        letters: DeadLetters,
        waiting: Waiting,
        progress: Callable[[Operation], object] | None,
    ) -> None:
        self._ledger, self._audit, self._letters, self._waiting = ledger, audit, letters, waiting
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
            deletion = None if asked.forever else asked.id
            self._letters.purge_pages(self._pages(self._letters), self._note, deletion)
        elif asked.action == "replay":
            override = Override.of(asked.override)
            replayer = self._letters.replayer(self._sent, asked.id)
            replayer.many(self._pages(self._letters), override, rate=asked.rate, progress=self._note)
        else:
            due = asked.began_at if asked.action == "run" else asked.at
            pages = self._pages(self._waiting)
            if asked.at and asked.ids is None:
                # What was moved comes again on a later page.
                pages = ([each for each in page if each.next_retry_at != due] for page in pages)
            self._waiting.change_pages(pages, due, self._note)

    def _pages(self, source: DeadLetters | Waiting) -> Iterator[Sequence[Any]]:
        """Yield pages of letters or jobs from the cursor on; the cursor moves when a page is done."""
        asked = self._now
        if asked.ids is None:
            pages = source.pages(asked.where, asked.cursor)
        else:
            ids, cursor = self._ledger.ids_of(asked), asked.cursor
            if asked.limit is None:
                pages = source.pages_of_ids(ids, cursor)
            else:
                # A job that has died again since is sent by none but an operator.
                pages = self._letters.pages_of_ids(ids, cursor, asked.where)
        for entries, cursor in pages:
            yield entries
            # The last page has no cursor after it, and none means the first page.
            if cursor is not None:
                self._now = self._page = replace(self._now, cursor=cursor)
                self._save_now_and_then()

    def _note(self, bulk: Bulk) -> None:
        before = self._before
        self._now = replace(
            self._now,
            matched=before.matched + bulk.matched,
            succeeded=before.succeeded + bulk.succeeded,
            failed=before.failed + bulk.failed,
            errors=(*before.errors, *bulk.errors)[:MAX_ERRORS],
        )
        if self._progress is not None:
            self._progress(self._now)
        self._look_for_failures()
        self._save_now_and_then()

    def _sent(self, _job: Job) -> None:
        # A batch that is broken off is not counted, but its jobs were sent.
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
        stored = self._ledger.get(operation.id)
        if stored.state != "stopping":
            raise NotResumable(f"operation {operation.id!r} was taken up by another process")
        self._now = replace(self._now, revision=stored.revision)
        raise _Stopped("an operator stopped it")

    def _resumable(self, operation: Operation) -> Operation:
        """Return an operation without the counts of entries that it meets again from its cursor on."""
        if operation.state == "done":
            return operation
        page, succeeded = self._page, operation.succeeded
        if operation.action == "run" or (operation.at and operation.ids is not None):
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
        rest = self._now.rest
        if self._now.limit is not None:
            with suppress(StoreError):
                rest = self._letters.replay_all(self._now.where).matched
        ended = self._resumable(replace(self._now, state=state, why=why, rest=rest))
        try:
            self._save(ended)
        except _Stopped:
            # The operation has ended by itself meanwhile.
            self._save(replace(ended, revision=self._now.revision))
        self._audit.end(self._now.record, state, self._now.succeeded - self._now.recorded)
        return self._now
