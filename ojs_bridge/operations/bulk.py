"""Bulk operations on many letters or parked retries, which any process may see, stop and resume.

An operation is a document in the store. The process that began it carries it out, and writes its progress
there. Another process may ask it to stop. An operation that its process has left is interrupted, and may be
resumed.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

from typing_extensions import Unpack

from ..engine.context import Context
from ..errors import NotResumable
from ..store import Letter
from .audit import Audit, Marks, some
from .dead_letters import DeadLetters
from .health import Probe
from .letters import Kind, kind_to_json, page_size
from .operation import ON_RETRIES, RECORDED, Action, Ledger, Operation, State, check
from .parked_retries import ParkedRetries, is_plain
from .replaying import changed
from .running import Running

#: More parked retries are not read for their job types.
MANY = 10_000


@dataclass(frozen=True, slots=True)
class Preview:
    """What an operation would reach: the number, that of each job type, and the filter as it is now."""

    matched: int
    by_type: Mapping[str, int] | None
    kind: Kind


class Operations:
    """The bulk operations of one bridge. Its methods raise StoreError; without a store ConfigurationError."""

    def __init__(self, context: Context, letters: DeadLetters, retries: ParkedRetries) -> None:
        self._context, self._ledger = context, Ledger(context)
        self.letters, self.retries = letters, retries
        self._audit = Audit(context)
        #: Aliases of `bridge.audit`, `bridge.marks` and `bridge.health`.
        self.audit, self.marks, self.health = self._audit, Marks(context), Probe(context)

    def begin(
        self,
        action: Action,
        *,
        ids: Sequence[str] | None = None,
        override: Mapping[str, Any] | None = None,
        rate: float | None = None,
        stop_if_failing: float | None = None,
        **kind: Unpack[Kind],
    ) -> Operation:
        """Write a new operation on the letters of a Kind, or of some ids; `run` carries it out.

        `override` and `rate` are as for `DeadLetters.retry_all`. `stop_if_failing` is a share from 0 to 1:
        the operation stops when more of the jobs whose outcome is newest have failed an attempt. Raises
        ValueError and InvalidRetryPolicy.
        """
        check(action, ids, override, rate, stop_if_failing, kind)
        now = self._ledger.now()
        if ids is None:
            total = self.count(action, **kind) if self._is_quick(action, kind) else None
            soon = now + timedelta(milliseconds=1)
            kind["until"] = min(kind.get("until") or soon, soon)
        else:
            ids = [*dict.fromkeys(ids)]
            total = len(ids)
        operation = Operation(
            f"op-{secrets.token_hex(6)}",
            action,
            "running",
            now,
            now,
            kind_to_json(kind),
            None if ids is None else len(ids),
            {name: value for name, value in (override or {}).items() if value is not None},
            rate,
            stop_if_failing,
            total,
        )
        return self._write(operation, ids)

    def _write(self, operation: Operation, ids: Sequence[str] | None) -> Operation:
        self._ledger.forget_older(operation)
        subject = {"filter": operation.kind} if ids is None else some(ids)
        subject |= {"operation": operation.id, "changes": changed(operation.override)}
        with self._audit.recording(RECORDED[operation.action], **subject) as entry:
            entry.outcome = operation.state
            operation = replace(operation, record=entry.id)
            if ids is not None:
                self._ledger.write_ids(operation, ids)
            self._ledger.save(operation)
        return operation

    def run(
        self, operation: Operation, *, progress: Callable[[Operation], object] | None = None
    ) -> Operation:
        """Carry an operation out, and return it as it ended; `progress` is called after each step.

        An operation whose broker is away ends as `failed`. So does one that meets any other error, and as
        `stopped` one that is interrupted; these errors are raised. Raises NotResumable when another process
        has taken the operation up.
        """
        running = Running(operation, self._ledger, self._audit, self.letters, self.retries, progress)
        return self._ledger.with_jobs([running.to_its_end()])[0]

    def get(self, operation_id: str) -> Operation:
        """Return an operation; raises OperationNotFound."""
        return self._ledger.get(operation_id)

    def list(self, *, limit: int = 50) -> Sequence[Operation]:
        """Return the newest operations; operations of the last 30 days are kept."""
        return self._ledger.newest(limit)

    def stop(self, operation_id: str) -> Operation:
        """Ask an operation to stop; it does so within seconds. An operation that has ended stays as it is."""
        found = self.get(operation_id)
        if found.has_ended and found.state != "interrupted":
            return found
        with self._audit.recording("operation.stop", operation=operation_id) as entry:
            found = self._stop(operation_id)
            entry.outcome = found.state
        return found

    def _stop(self, operation_id: str) -> Operation:
        while True:
            found = self.get(operation_id)
            if found.has_ended and found.state != "interrupted":
                return found
            state: State = "stopped" if found.state == "interrupted" else "stopping"
            asked = replace(found, state=state, revision=found.revision + 1)
            if self._ledger.save(asked):
                if state == "stopped":
                    # Nobody else ends the record of what its process has left.
                    self._audit.end(found.record, state, found.succeeded - found.recorded)
                return asked

    def resume(self, operation_id: str) -> Operation:
        """Take up an operation that was stopped, interrupted or failed; `run` carries out the rest of it.

        Raises OperationNotFound, and NotResumable for an operation that runs or is done.
        """
        found = self.get(operation_id)
        if found.state not in ("interrupted", "stopped", "failed"):
            raise NotResumable(f"operation {operation_id!r} is {found.state}, and cannot be resumed")
        now = self._ledger.now()
        resumed = replace(
            found,
            state="running",
            why="",
            updated_at=now,
            recorded=found.succeeded,
            revision=found.revision + 1,
        )
        with self._audit.recording("operation.resume", operation=operation_id) as entry:
            entry.outcome = resumed.state
            resumed = replace(resumed, record=entry.id)
            if not self._ledger.save(resumed):
                raise NotResumable(f"operation {operation_id!r} was resumed by another process")
        if found.state == "interrupted":
            self._audit.end(found.record, found.state, found.succeeded - found.recorded)
        return resumed

    def died_again(
        self, operation_id: str, *, limit: int = 50, cursor: str | None = None
    ) -> tuple[Sequence[Letter], str | None]:
        """Return dead letters of jobs that an operation has replayed, the newest death first, and a cursor.

        A letter that was replayed or deleted since is left out. Raises OperationNotFound, and ValueError for
        a limit outside 1 to 1000.
        """
        ids, more = self._ledger.dead(self.get(operation_id), page_size(limit), cursor)
        found = [letter for letter_id in ids if (letter := self.letters.find(letter_id)) is not None]
        return found, more

    def count(self, action: Action, **kind: Unpack[Kind]) -> int:
        """Count the letters or retries of a Kind that an action would reach; raises ValueError."""
        if action in ON_RETRIES:
            return self.retries.count(**kind)
        return self.letters.retry_all(**kind).matched

    def preview(self, action: Action, **kind: Unpack[Kind]) -> Preview:
        """Return what an action would reach now; what comes later is not in its filter. Raises ValueError.

        Dead letters with a text are read, and so are parked retries, unless they are more than ten thousand
        and chosen by queue and type alone: then `by_type` is None.
        """
        soon = self._ledger.now() + timedelta(milliseconds=1)
        until = min(kind.get("until") or soon, soon)
        now = Kind(**{**kind, "until": until})
        if action not in ON_RETRIES:
            found = self.letters.stats(**now)
            return Preview(found.total, found.by_type, now)
        total = self.retries.count(**kind) if is_plain(kind) else None
        if total is not None and total > MANY:
            return Preview(total, None, now)
        types = Counter(each.type for page, _ in self.retries.pages(now, None) for each in page)
        return Preview(types.total(), types, now)

    def _is_quick(self, action: Action, kind: Kind) -> bool:
        """Return whether the store itself can count."""
        return is_plain(kind) if action in ON_RETRIES else not kind.get("text")
