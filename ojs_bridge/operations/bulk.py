"""Bulk operations on many letters or waiting jobs, which any process may see, stop and resume.

An operation is a document in the store. The process that began it carries it out, and writes its progress
there. Another process may ask it to stop. An operation that its process has left is interrupted, and may be
resumed.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.runs import Override
from ..errors import NothingMatched, NotResumable, StoreError, Unreachable
from ..rules.job import Job, format_time
from ..store import EVERYTHING, Fields, Filter, Letter
from .audit import Audit, uninterrupted
from .dead_letters import DeadLetters
from .letters import page_size
from .operation import (
    ENTRIES,
    KIND,
    ON_WAITING,
    RECORDED,
    Action,
    Ledger,
    Operation,
    State,
    check,
    check_probe,
)
from .replaying import MAX_ERRORS, Bulk
from .waiting import Waiting, due_from

#: More waiting jobs are not read for their job types.
MANY = 10_000
#: The seconds between two writings of the progress, and between two looks for jobs that have failed.
SAVED, LOOKED = 1.0, 2.0
#: The newest jobs with an outcome that are looked at, and the fewest from which a share is taken.
WATCHED, ENOUGH = 200, 20


@dataclass(frozen=True, slots=True)
class Preview:
    """What an operation would reach: the number, that of each job type, and the filter as it is now."""

    matched: int
    by_type: Mapping[str, int] | None
    where: Filter


class Operations:
    """The bulk operations of one bridge. Its methods raise StoreError; without a store ConfigurationError."""

    def __init__(self, context: Context, letters: DeadLetters, waiting: Waiting, audit: Audit) -> None:
        self._context, self._ledger = context, Ledger(context)
        self.letters, self.waiting = letters, waiting
        letters.carry_out = self._to_its_end
        self._audit = audit

    def begin(
        self,
        action: Action,
        where: Filter = EVERYTHING,
        *,
        ids: Sequence[str] | None = None,
        override: Mapping[str, Any] | None = None,
        rate: float | None = None,
        stop_if_failing: float | None = None,
        at: datetime | None = None,
        limit: int | None = None,
        newest: bool = False,
        **fields: Unpack[Fields],
    ) -> Operation:
        """Write a new operation on the letters or jobs of a filter, or of some ids; `run` carries it out.

        `override` and `rate` are as for `DeadLetters.replay_all`. `stop_if_failing` is a share from 0 to 1:
        the operation stops when a larger share of the newest jobs has failed an attempt; jobs without an
        outcome do not count. `at` is as for `Waiting.move`. A replay with a `limit` is a probe: it sends so
        many letters of the filter, the oldest, or the `newest`; `rest` sends the others later. Raises
        ValueError and InvalidRetryPolicy, and NothingMatched for a filter that has nothing now.
        """
        where = replace(where, **fields)
        check(action, ids, override, rate, stop_if_failing, at, where)
        check_probe(action, ids, limit, newest=newest)
        now = self._ledger.now()
        if ids is None:
            total, where = self._matched(action, where), where.until_now(now)
            if limit is not None:
                ids = self.letters.first_of(where, limit, newest=newest)
        if ids is not None:
            ids = [*dict.fromkeys(ids)]
            total = len(ids)
        operation = Operation(
            f"op-{secrets.token_hex(6)}",
            action,
            "running",
            now,
            now,
            where.to_json(),
            None if ids is None else len(ids),
            Override.of(override).to_ojs(),
            rate,
            stop_if_failing,
            at and max(due_from(at), now),
            total,
            limit=limit,
            newest=newest,
        )
        return self._write(operation, ids)

    def _matched(self, action: Action, where: Filter) -> int | None:
        """Return how many a filter has, None where that would read them; raises NothingMatched for none."""
        is_quick = where.is_plain if action in ON_WAITING else where.text is None
        total = self.count(action, where) if is_quick else None
        source: DeadLetters | Waiting = self.waiting if action in ON_WAITING else self.letters
        now = where.until_now(self._ledger.now())
        if total == 0 or (total is None and not any(page for page, _ in source.pages(now, None))):
            raise NothingMatched(f"no {ENTRIES[action in ON_WAITING]} match, so nothing was begun")
        return total

    def rest(self, operation_id: str) -> Operation:
        """Write an operation on the letters that a probe has left; `run` carries it out, as the probe was.

        It has the changes, the rate and the `stop_if_failing` of the probe. A letter that died after the
        probe began is not among them. Raises OperationNotFound; NotResumable for a probe that has not ended,
        for what is no probe, and for a rest that was begun before; and NothingMatched.
        """
        probe = self.get(operation_id)
        if probe.limit is None:
            raise NotResumable(f"operation {operation_id!r} is no probe, and has no rest")
        if probe.state not in ("done", "stopped", "failed"):
            raise NotResumable(f"operation {operation_id!r} is {probe.state}; its rest goes after its end")
        # Of two that ask, one writes.
        rest_id = f"op-{sha256(f'rest of {probe.id}'.encode()).hexdigest()[:12]}"
        if probe.rest_operation or self._ledger.documents.get(KIND, rest_id):
            raise NotResumable(f"the rest of operation {operation_id!r} was begun before, as {rest_id!r}")
        now = self._ledger.now()
        rest = Operation(
            rest_id,
            "replay",
            "running",
            now,
            now,
            probe.kind,
            None,
            probe.override,
            probe.rate,
            probe.stop_if_failing,
            None,
            self._matched("replay", probe.where),
            rest_of=probe.id,
        )
        self._write(rest, None)
        self._ledger.save(replace(probe, rest_operation=rest_id, revision=probe.revision + 1))
        return self.get(rest_id)

    def _write(self, operation: Operation, ids: Sequence[str] | None) -> Operation:
        self._ledger.forget_older(operation)
        is_chosen = ids is not None and operation.limit is None
        subject: dict[str, Any] = {"ids": ids} if is_chosen else {"filter": operation.kind}
        subject |= {"operation": operation.id, "changes": sorted(operation.override)}
        subject |= {"limit": operation.limit, "rest_of": operation.rest_of or None}
        if operation.at:
            subject["at"] = format_time(operation.at)
        with self._audit.recording(RECORDED[operation.action], **subject) as entry:
            entry.outcome = operation.state
            operation = replace(operation, record=entry.id)
            if ids is not None:
                self._ledger.write_ids(operation, ids)
            if not self._ledger.save(operation):
                raise NotResumable(f"operation {operation.id!r} was begun by another process")
        return operation

    def run(
        self, operation: Operation, *, progress: Callable[[Operation], object] | None = None
    ) -> Operation:
        """Carry an operation out, and return it as it ended; `progress` is called after each step.

        An operation whose broker is away ends as `failed`. So does one that meets another error, which is
        raised. One that is interrupted ends as `stopped`. Raises NotResumable when another process has taken
        the operation up.
        """
        running = Running(operation, self._ledger, self._audit, self.letters, self.waiting, progress)
        return self._ledger.with_jobs([running.to_its_end()])[0]

    def _to_its_end(
        self, action: Action, where: Filter, progress: Callable[[int], object] | None, **how: Any
    ) -> Bulk:
        """Begin an operation and carry it out; raises Unreachable if its broker is away: resume it then."""
        try:
            begun = self.begin(action, where, **how)
        except NothingMatched:
            return Bulk(0)
        ended = self.run(begun, progress=(lambda now: progress(now.matched)) if progress else None)
        if ended.state == "failed":
            raise Unreachable(ended.why)
        errors = tuple((letter_id, why) for letter_id, why in ended.errors)
        return Bulk(ended.matched, ended.succeeded, ended.failed, errors)

    def get(self, operation_id: str) -> Operation:
        """Return an operation; raises OperationNotFound."""
        return self._ledger.get(operation_id)

    def list(self, *, limit: int = 50) -> Sequence[Operation]:
        """Return the newest operations; operations of the last 30 days are kept."""
        return self._ledger.newest(limit)

    def stop(self, operation_id: str) -> Operation:
        """Ask an operation to stop; it does so within seconds. An operation that has ended stays as it is."""
        operation = self.get(operation_id)
        if operation.has_ended and operation.state != "interrupted":
            return operation
        with self._audit.recording("operation.stop", operation=operation_id) as entry:
            operation = self._stop(operation_id)
            entry.outcome = operation.state
        return operation

    def _stop(self, operation_id: str) -> Operation:
        while True:
            operation = self.get(operation_id)
            if operation.has_ended and operation.state != "interrupted":
                return operation
            state: State = "stopped" if operation.state == "interrupted" else "stopping"
            asked = replace(operation, state=state, revision=operation.revision + 1)
            if self._ledger.save(asked):
                if state == "stopped":
                    # Nobody else ends the record of what its process has left.
                    self._audit.end(operation.record, state, operation.succeeded - operation.recorded)
                return asked

    def resume(self, operation_id: str) -> Operation:
        """Take up an operation that was stopped, interrupted or failed; `run` carries out the rest of it.

        Raises OperationNotFound, and NotResumable for an operation that runs or is done.
        """
        operation = self.get(operation_id)
        if operation.state not in ("interrupted", "stopped", "failed"):
            raise NotResumable(f"operation {operation_id!r} is {operation.state}, and cannot be resumed")
        now = self._ledger.now()
        resumed = replace(
            operation,
            state="running",
            why="",
            updated_at=now,
            recorded=operation.succeeded,
            revision=operation.revision + 1,
        )
        with self._audit.recording("operation.resume", operation=operation_id) as entry:
            entry.outcome = resumed.state
            resumed = replace(resumed, record=entry.id)
            if not self._ledger.save(resumed):
                raise NotResumable(f"operation {operation_id!r} was resumed by another process")
        if operation.state == "interrupted":
            self._audit.end(operation.record, operation.state, operation.succeeded - operation.recorded)
        return resumed

    def died_again(
        self, operation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[Sequence[Letter], str | None]:
        """Return dead letters of jobs that an operation has replayed, the newest death first, and a cursor.

        A letter that was replayed or deleted since is left out. Raises OperationNotFound, and ValueError for
        a limit outside 1 to 1000.
        """
        ids, more = self._ledger.dead(self.get(operation_id), page_size(limit), cursor)
        letters = [letter for letter_id in ids if (letter := self.letters.find(letter_id)) is not None]
        return letters, more

    def count(self, action: Action, where: Filter = EVERYTHING, **fields: Unpack[Fields]) -> int:
        """Count the letters or jobs of a filter that an action would reach; raises ValueError."""
        where = replace(where, **fields)
        return self.waiting.count(where) if action in ON_WAITING else self.letters.replay_all(where).matched

    def preview(self, action: Action, where: Filter = EVERYTHING, **fields: Unpack[Fields]) -> Preview:
        """Return what an action would reach now, with a filter that leaves out what comes later.

        `by_type` is None for more than ten thousand waiting jobs that are chosen by queue, type and kind
        alone: they are not read. Dead letters with a text, and other waiting jobs, are. Raises ValueError.
        """
        where = replace(where, **fields)
        now = where.until_now(self._ledger.now())
        if action not in ON_WAITING:
            stats = self.letters.stats(now)
            return Preview(stats.total, stats.by_type, now)
        total = self.waiting.count(where) if where.is_plain else None
        if total is not None and total > MANY:
            return Preview(total, None, now)
        types = Counter(each.type for page, _ in self.waiting.pages(now, None) for each in page)
        return Preview(types.total(), types, now)


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
            self._letters.purge_pages(self._pages(self._letters), self._note)
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
