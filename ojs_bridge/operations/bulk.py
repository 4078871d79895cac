"""Bulk operations on many letters or parked retries, which any process may see, stop and resume.

An operation is a document in the store. The process that began it carries it out, and writes its progress
there. Another process may ask it to stop. An operation that its process has left is interrupted, and may be
resumed.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import Unpack

from ..engine.context import Context
from ..errors import NotResumable, OperationNotFound, StoreError, Unreachable
from ..spec.job import Job, format_time, parse_time
from ..store import Document, Store, from_ms, to_ms
from .audit import Audit, some
from .dead_letters import DeadLetters
from .health import Probe
from .letters import Kind, kind_to_json, needed
from .marks import Marks
from .operation import ON_RETRIES, RECORDED, Action, Operation, State, check
from .parked_retries import ParkedRetries, is_plain
from .replaying import MAX_TOLD, Bulk, changed, override_of

#: The ids of an operation are a document of their own, so that the progress is short.
KIND, IDS = "operation", "operation-ids"
#: An operation whose progress is older was left by its process. A batch may wait long for its broker.
STALE = timedelta(minutes=5)
#: How long the store keeps operations.
KEPT = timedelta(days=30)
#: The seconds between two writings of the progress, and between two looks for jobs that died again.
SAVED, LOOKED = 1.0, 2.0
#: The newest replayed jobs that are watched, and the fewest from which a share is taken.
WATCHED, ENOUGH = 200, 20


class Operations:
    """The bulk operations of one bridge. Its methods raise StoreError; without a store ConfigurationError."""

    def __init__(self, context: Context, letters: DeadLetters, retries: ParkedRetries) -> None:
        self._context = context
        self.letters, self.retries = letters, retries
        #: The records of who did what.
        self.audit = Audit(context)
        #: Moments such as deploys.
        self.marks = Marks(context)
        #: The health of the fleet.
        self.health = Probe(context)

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
        the operation stops when more of the jobs that it replayed last have died again. Raises ValueError
        and InvalidRetryPolicy.
        """
        check(action, ids, override, rate, stop_if_failing, kind)
        now = self.now()
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
        for kept in (KIND, IDS):
            self._store.forget_documents(kept, before=operation.began_at - KEPT)
        subject = {"filter": operation.kind} if ids is None else some(ids)
        subject |= {"operation": operation.id, "changes": changed(operation.override)}
        with self.audit.recording(RECORDED[operation.action], **subject) as entry:
            entry.count, entry.outcome = operation.total, operation.state
            operation = replace(operation, record=entry.id)
            if ids is not None:
                self._store.write_document(Document(IDS, operation.id, operation.began_at, {"ids": ids}))
            self.save(operation)
        return operation

    def run(
        self, operation: Operation, *, progress: Callable[[Operation], object] | None = None
    ) -> Operation:
        """Carry an operation out, and return it as it ended; `progress` is called after each step.

        An operation whose broker is away ends as `failed`. So does one that meets any other error, and as
        `stopped` one that is interrupted; these errors are raised. Raises NotResumable when another process
        has taken the operation up.
        """
        return _Run(self, self._context, operation, progress).to_its_end()

    def get(self, operation_id: str) -> Operation:
        """Return an operation; raises OperationNotFound."""
        found = self._store.get_document(KIND, operation_id)
        if found is None:
            raise OperationNotFound(f"there is no operation {operation_id!r}")
        return self._read(found)

    def list(self, *, limit: int = 50) -> Sequence[Operation]:
        """Return the newest operations; operations of the last 30 days are kept."""
        found = self._store.list_documents(KIND, limit=limit, cursor=None).documents
        return tuple(map(self._read, found))

    def stop(self, operation_id: str) -> Operation:
        """Ask an operation to stop; it does so within seconds. An operation that has ended stays as it is."""
        found = self.get(operation_id)
        if found.has_ended and found.state != "interrupted":
            return found
        with self.audit.recording("operation.stop", operation=operation_id) as entry:
            found = self._stop(operation_id)
            entry.count, entry.outcome = found.succeeded, found.state
        return found

    def _stop(self, operation_id: str) -> Operation:
        while True:
            found = self.get(operation_id)
            if found.has_ended and found.state != "interrupted":
                return found
            state: State = "stopped" if found.state == "interrupted" else "stopping"
            asked = replace(found, state=state, revision=found.revision + 1)
            if self.save(asked):
                return asked

    def resume(self, operation_id: str) -> Operation:
        """Take up an operation that was stopped, interrupted or failed; `run` carries out the rest of it.

        Raises OperationNotFound, and NotResumable for an operation that runs or is done.
        """
        found = self.get(operation_id)
        if found.state not in ("interrupted", "stopped", "failed"):
            raise NotResumable(f"operation {operation_id!r} is {found.state}, and cannot be resumed")
        now = self.now()
        resumed = replace(found, state="running", why="", updated_at=now, revision=found.revision + 1)
        with self.audit.recording("operation.resume", operation=operation_id) as entry:
            entry.count, entry.outcome = found.succeeded, resumed.state
            resumed = replace(resumed, record=entry.id)
            if not self.save(resumed):
                raise NotResumable(f"operation {operation_id!r} was resumed by another process")
        return resumed

    def save(self, operation: Operation) -> bool:
        """Write the next revision of an operation; False when another process has written one."""
        body = {**asdict(operation), "updated_at": format_time(operation.updated_at)}
        del body["revision"], body["began_at"]
        document = Document(KIND, operation.id, operation.began_at, body, operation.revision)
        return self._store.write_document(document)

    def ids_of(self, operation: Operation) -> Sequence[str]:
        """Return the ids that an operation was begun with; raises OperationNotFound when they are gone."""
        found = self._store.get_document(IDS, operation.id)
        if found is None:
            raise OperationNotFound(f"the ids of operation {operation.id!r} are gone")
        return tuple(found.body["ids"])

    def now(self) -> datetime:
        """Return the time, in whole milliseconds, as the store keeps it."""
        return from_ms(to_ms(self._context.clock()))

    def _read(self, document: Document) -> Operation:
        known = {name: value for name, value in document.body.items() if name in Operation.__slots__}
        known["updated_at"] = parse_time(known["updated_at"])
        known["errors"] = tuple(map(tuple, known["errors"]))
        found = Operation(**known, began_at=document.at, revision=document.revision)
        pace = timedelta(seconds=1 // found.rate if found.rate else 0)
        if not found.has_ended and found.updated_at < self.now() - STALE - pace:
            return replace(found, state="interrupted")
        return found

    def count(self, action: Action, **kind: Unpack[Kind]) -> int:
        """Count the letters or retries of a Kind that an action would reach; raises ValueError."""
        if action in ON_RETRIES:
            return self.retries.count(**kind)
        return self.letters.retry_all(**kind).matched

    def _is_quick(self, action: Action, kind: Kind) -> bool:
        """Return whether the store itself can count."""
        return is_plain(kind) if action in ON_RETRIES else not kind.get("text")

    @property
    def _store(self) -> Store:
        return needed(self._context.store, "bulk operations")


Entries_co = TypeVar("Entries_co", covariant=True)


class _Paged(Protocol[Entries_co]):
    """Dead letters, or parked retries, in pages that each have the cursor after them."""

    def pages(self, kind: Kind, cursor: str | None) -> Iterator[tuple[Entries_co, str | None]]: ...

    def pages_of_ids(
        self, ids: Sequence[str], cursor: str | None
    ) -> Iterator[tuple[Entries_co, str | None]]: ...


class _Stopped(Exception):
    """The operation ends before its end."""


class _Run:
    """The carrying out of an operation by this process."""

    def __init__(
        self,
        operations: Operations,
        context: Context,
        operation: Operation,
        progress: Callable[[Operation], object] | None,
    ) -> None:
        self._operations, self._letters, self._retries = operations, operations.letters, operations.retries
        self._store = needed(context.store, "bulk operations")
        self._before = self._now = self._page = operation
        self._progress = progress
        self._saved_at = self._looked_at = time.monotonic()
        self._watched: deque[str] = deque(maxlen=WATCHED)

    def to_its_end(self) -> Operation:
        """Carry the operation out, as `Operations.run` says."""
        try:
            self._carry_out()
        except _Stopped as stopped:
            return self._end("stopped", str(stopped))
        except Unreachable as error:
            return self._end("failed", str(error))
        except KeyboardInterrupt:
            self._end_if_possible("stopped", "its process was interrupted")
            raise
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
            replayer = self._letters.replayer(self._sent)
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
            pages = source.pages_of_ids(self._operations.ids_of(asked), asked.cursor)
        for entries, cursor in pages:
            yield entries
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
        self._look_for_deaths()
        self._save_now_and_then()

    def _sent(self, job: Job) -> None:
        # A batch that is broken off is not told of, but its jobs were sent.
        self._now = replace(self._now, matched=self._now.matched + 1, succeeded=self._now.succeeded + 1)
        self._watched.append(job.id)

    def _look_for_deaths(self) -> None:
        limit, watched = self._now.stop_if_failing, len(self._watched)
        if limit is None or watched < ENOUGH or time.monotonic() < self._looked_at + LOOKED:
            return
        again = sum(self._store.get(job_id) is not None for job_id in self._watched)
        self._now = replace(self._now, died_again=again)
        self._looked_at = time.monotonic()
        if again > limit * watched:
            raise _Stopped(f"{again} of the last {watched} replayed jobs have died again")

    def _save_now_and_then(self) -> None:
        if time.monotonic() >= self._saved_at + SAVED:
            self._save(self._now)

    def _save(self, operation: Operation) -> None:
        """Write the progress; raises _Stopped when an operator wants it, and NotResumable."""
        operation = replace(operation, updated_at=self._operations.now())
        saved = replace(self._resumable(operation), revision=operation.revision + 1)
        if self._operations.save(saved):
            self._now, self._saved_at = replace(operation, revision=saved.revision), time.monotonic()
            return
        found = self._operations.get(operation.id)
        if found.state != "stopping":
            raise NotResumable(f"operation {operation.id!r} was taken up by another process")
        self._now = replace(operation, revision=found.revision)
        raise _Stopped("an operator stopped it")

    def _resumable(self, operation: Operation) -> Operation:
        """Return an operation without the counts of entries that `run` meets again from its cursor on."""
        page, succeeded = self._page, operation.succeeded
        if operation.action == "run":
            succeeded = page.succeeded
        matched = page.matched + succeeded - page.succeeded
        return replace(
            operation, matched=matched, succeeded=succeeded, failed=page.failed, errors=page.errors
        )

    def _end_if_possible(self, state: State, why: str) -> None:
        with suppress(StoreError, NotResumable):
            self._end(state, why)

    def _end(self, state: State, why: str) -> Operation:
        self._now = self._resumable(self._now)
        try:
            self._save(replace(self._now, state=state, why=why))
        except _Stopped:
            # The operation has ended by itself meanwhile.
            self._save(replace(self._now, state=state, why=why))
        self._operations.audit.end(self._now.record, state, self._now.succeeded)
        return self._now
