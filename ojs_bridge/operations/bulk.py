"""Bulk operations on many letters or waiting jobs, which any process may see, stop and resume.

An operation is a document in the store. The process that began it carries it out, and writes its progress
there. Another process may ask it to stop. An operation that its process has left is interrupted, and may be
resumed.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from hashlib import sha256
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..engine.runs import Override
from ..errors import NothingMatched, NotResumable, NotUndoable, OperationNotFound, Unreachable
from ..rules.edits import Edits, words_of
from ..rules.job import format_time
from ..store import EVERYTHING, Fields, Filter, Letter
from .audit import Audit
from .dead_letters import DeadLetters
from .editing import check_edits
from .letters import only_id, page_size
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
    check_forever,
    check_probe,
    with_changes,
)
from .replaying import Bulk
from .runner import Runner
from .undoing import Undone, undo_until
from .waiting import Waiting, due_from

#: More waiting jobs are not read for their job types.
MANY = 10_000


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
        forever: bool = False,
        changes: Edits | None = None,
        **fields: Unpack[Fields],
    ) -> Operation:
        """Write a new operation on the letters or jobs of a filter, or of some ids; `run` carries it out.

        `override` and `rate` are as for `DeadLetters.replay_all`. `changes` of a replay set, rename or remove
        arguments of each job. A letter that cannot be changed stays. `stop_if_failing` is a share from 0 to
        1: the operation stops when a larger share of the newest jobs has failed an attempt; jobs without an
        outcome do not count. `at` is as for `Waiting.move`. A replay with a `limit` is a probe: it sends so
        many letters of the filter, the oldest, or the `newest`; `rest` sends the others later. For an hour
        `undo` brings back what a purge has deleted, unless it is `forever`. Raises ValueError and
        InvalidRetryPolicy, and NothingMatched for a filter that has nothing now.
        """
        where, override = replace(where, **fields), with_changes(override, changes)
        check(action, ids, override, rate, stop_if_failing, at, where)
        if edits := Override.of(override).edits:
            check_edits(edits, self._context.redactor)
        check_probe(action, ids, limit, newest=newest)
        check_forever(action, forever=forever)
        now = self._ledger.now()
        if ids is None:
            total, where = self._matched(action, where), where.until_now(now)
            if limit is not None:
                ids = [letter.id for letter in self.letters.first_of(where, limit, newest=newest)]
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
            forever=forever,
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
        subject |= {"operation": operation.id, "changes": words_of(operation.override)}
        subject |= {"limit": operation.limit, "rest_of": operation.rest_of or None}
        if operation.action == "purge":
            until = {"undo_until": undo_until(operation.began_at)}
            subject |= {"forever": True} if operation.forever else until
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
        runner = Runner(operation, self._ledger, self._audit, self.letters, self.waiting, progress)
        return self._ledger.with_jobs([runner.to_its_end()])[0]

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

    def id_of(self, text: str) -> str:
        """Return the id that is this text, or else the only one that begins with it, as for dead letters."""
        return only_id(text, self._ledger.ids_beginning)

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

    def undo(self, deletion: str) -> Undone:
        """Bring the letters of a deletion back: a purge that has ended, or the record of a single deletion.

        A letter whose job has gone on since stays in the bin: the Undone says why. Raises NotFound, and
        NotUndoable.
        """
        try:
            operation = self.get(deletion)
        except OperationNotFound:
            record = self._audit.get(deletion)
            its = record.subject.get("operation") if record.action == RECORDED["purge"] else None
            return self.undo(str(its)) if its else self._audit.undo(deletion)
        if operation.action != "purge":
            raise NotUndoable(f"operation {deletion!r} is a {operation.action}, which has no undo")
        if not operation.has_ended:
            raise NotUndoable(f"operation {deletion!r} is {operation.state}: stop it first")
        return self._audit.bring_back(deletion)

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
