"""Bulk operations: their routes, and changes of many letters within a request."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar, cast

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from ..bridge import Bridge
from ..errors import NotFound, NothingMatched, NotResumable, NotUndoable, OperationNotFound, StoreError
from ..operations.bulk import Preview
from ..operations.operation import (
    ON_WAITING,
    Action,
    Operation,
    action_from_json,
    action_to_json,
    with_changes,
)
from ..operations.replaying import Bulk
from ..rules.job import format_time
from ..store import EVERYTHING
from . import shapes
from .answers import Answer, Refusal, invalid, not_found, too_many
from .bulk import Begin, Edited
from .guarding import Role, check_replay
from .requests import DiedQuery, Limited
from .routes import Operation as Route
from .routes import answers

logger = logging.getLogger("ojs_bridge")

#: A server that ends waits so many seconds for each operation to stop; a slow replay pauses for ten.
CLOSE_SECONDS = 20

OPERATIONS: list[Route] = []

#: The most changes that run at a time: each holds a thread until it has ended.
MAX_RUNNING = 4

Done = TypeVar("Done")


class Operations:
    """Serves the bulk operations of a bridge, and calls `changed` after each that was carried out here.

    An operation goes on when its client goes away. The server carries a few out at a time, each in a thread.
    """

    resource = "operation"

    def __init__(self, bridge: Bridge, changed: Callable[[], object]) -> None:
        self._bridge = bridge
        self._changed = changed
        self._places = threading.BoundedSemaphore(MAX_RUNNING)
        self._threads: dict[str, threading.Thread] = {}

    def close(self) -> None:
        """Stop the operations that are carried out here: a letter whose job was sent must not stay."""
        running = [*self._threads.items()]
        for operation_id, _ in running:
            with suppress(StoreError, OperationNotFound):
                self._bridge.operations.stop(operation_id)
        for _, thread in running:
            thread.join(CLOSE_SECONDS)

    @answers(OPERATIONS, "GET", "/operations")
    def list(self, query: Limited) -> shapes.BulkOperations:
        """List the bulk operations of the last 30 days, the newest first."""
        return {"operations": [_shown(each) for each in self._bridge.operations.list(limit=query.limit)]}

    @answers(OPERATIONS, "POST", "/operations", role="replayer")
    def begin(self, body: Begin, role: Role) -> shapes.BulkOperation:
        """Begin a bulk operation; it goes on when the client goes away."""
        action = action_from_json(body.action)
        override = body.override.changes().to_ojs() if body.override else {}
        check_replay(role, action, with_changes(override, body.edits()))
        if not body.confirm:
            if body.ids:
                raise invalid(f"confirm: must be true; {len(body.ids)} ids are named", matched=len(body.ids))
            raise unconfirmed(action, self._bridge.operations.preview(action, body.where()))

        def begin() -> Operation:
            return self._bridge.operations.begin(
                action,
                body.where(),
                ids=body.ids,
                override=dict(body.override or ()),
                rate=body.rate,
                stop_if_failing=body.stop_if_failing,
                at=body.at,
                limit=body.limit,
                newest=body.newest,
                forever=body.forever,
                changes=body.edits(),
            )

        try:
            return self._carried_out(begin)
        except NothingMatched as error:
            raise Refusal(404, "not_found", str(error), details={"matched": 0}) from None

    @answers(OPERATIONS, "POST", "/operations/preview")
    def preview(self, body: Edited) -> shapes.Edited:
        """Show ten dead letters before and after changes of their arguments; nothing is sent."""
        where = body.filter.where() if body.filter else EVERYTHING
        try:
            letters = self._bridge.dead_letters.preview(
                where, body.changes.changes(), ids=body.ids, newest=body.newest
            )
        except ValueError as error:
            raise invalid(f"changes: {error}") from None
        return {"letters": [cast(shapes.EditedLetter, letter.to_ojs()) for letter in letters]}

    @answers(OPERATIONS, "POST", "/operations/{id}/resume", role="replayer")
    def resume(self, job_id: str, role: Role) -> shapes.BulkOperation:
        """Resume an operation that was stopped, interrupted or failed."""
        self._check(job_id, role)
        try:
            return self._carried_out(lambda: self._bridge.operations.resume(job_id))
        except NotResumable as error:
            raise Refusal(409, "x_conflict", str(error)) from None

    @answers(OPERATIONS, "POST", "/operations/{id}/rest", role="replayer")
    def rest(self, job_id: str, role: Role) -> shapes.BulkOperation:
        """Send the letters that a probe has left, as the probe was sent; it goes once."""
        self._check(job_id, role)
        try:
            return self._carried_out(lambda: self._bridge.operations.rest(job_id))
        except (NotResumable, NothingMatched) as error:
            raise Refusal(409, "x_conflict", str(error)) from None

    @answers(OPERATIONS, "POST", "/audit/{id}/undo")
    @answers(OPERATIONS, "POST", "/operations/{id}/undo")
    def undo(self, job_id: str) -> shapes.Undone:
        """Bring the dead letters of a deletion back, within an hour; by its record, or its operation."""
        try:
            return cast(shapes.Undone, self._bridge.operations.undo(job_id).to_ojs())
        except NotFound:
            raise not_found("deletion", job_id) from None
        except NotUndoable as error:
            raise Refusal(409, "x_conflict", str(error)) from None
        finally:
            self._changed()

    @answers(OPERATIONS, "GET", "/operations/{id}/dead-letters")
    def died_again(self, job_id: str, query: DiedQuery) -> shapes.DiedAgain:
        """List the dead letters of jobs that a replay has sent, the newest death first."""
        try:
            letters, more = self._bridge.operations.died_again(job_id, limit=query.limit, cursor=query.cursor)
        except ValueError as error:
            raise invalid(str(error)) from None
        jobs: list[shapes.Dead] = [
            {
                "id": letter.id,
                "type": letter.type,
                "queue": letter.queue,
                "error_type": letter.error_type,
                "discarded_at": format_time(letter.discarded_at),
            }
            for letter in letters
        ]
        return {"jobs": jobs, "next_cursor": more}

    @answers(OPERATIONS, "GET", "/operations/{id}")
    def get(self, job_id: str) -> shapes.BulkOperation:
        """Get a bulk operation and its progress."""
        return _shown(self._bridge.operations.get(job_id))

    @answers(OPERATIONS, "DELETE", "/operations/{id}", role="replayer")
    def stop(self, job_id: str, role: Role) -> shapes.BulkOperation:
        """Ask an operation to stop; its letters that are not done stay."""
        self._check(job_id, role)
        return _shown(self._bridge.operations.stop(job_id))

    def _check(self, operation_id: str, role: Role) -> None:
        """Refuse a role an operation that it could not have begun, by its action and its changes."""
        if role != "operator":
            operation = self._bridge.operations.get(operation_id)
            check_replay(role, operation.action, operation.override)

    def _carried_out(self, begin: Callable[[], Operation]) -> shapes.BulkOperation:
        """Begin an operation, and have a thread carry it out; raises Refusal when no thread is free."""
        if not self._places.acquire(blocking=False):
            raise too_many(f"{MAX_RUNNING} bulk operations are running", 10)
        try:
            begun = begin()
        except BaseException:
            self._places.release()
            raise
        thread = threading.Thread(target=self._carry_out, args=(begun,), name=begun.id, daemon=True)
        self._threads[begun.id] = thread
        thread.start()
        return _shown(begun)

    def _carry_out(self, operation: Operation) -> None:
        try:
            self._bridge.operations.run(operation)
        except Exception:
            logger.exception("bulk operation %s has failed", operation.id)
        finally:
            self._threads.pop(operation.id, None)
            self._places.release()
            self._changed()


def _shown(operation: Operation) -> shapes.BulkOperation:
    return cast(shapes.BulkOperation, operation.to_ojs())


def unconfirmed(action: Action, preview: Preview) -> Refusal:
    """Return the refusal of a change without consent; its details have the number, the types, the filter."""
    what = "waiting jobs" if action in ON_WAITING else "dead letters"
    return invalid(
        f"confirm: must be true; {preview.matched} {what} are matched",
        matched=preview.matched,
        by_type=preview.by_type and dict(preview.by_type),
        filter=preview.where.to_json(),
    )


class Bulks:
    """Runs changes of many letters, and calls `changed` after each change."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self._running = 0
        self._changed = changed

    async def answer(self, action: Action, work: Callable[[], Bulk]) -> Response:
        """Do the work, and answer with its result."""
        return Answer(_result_of(action, await self.run(work)))

    async def run(self, work: Callable[[], Done]) -> Done:
        """Do long work in one of a few threads; raises Refusal when no thread is free."""
        if self._running >= MAX_RUNNING:
            raise too_many(f"{MAX_RUNNING} replays, purges or counts are running", 10)
        self._running += 1
        try:
            return await run_in_threadpool(work)
        finally:
            self._running -= 1
            self._changed()


def _result_of(action: Action, done: Bulk) -> shapes.Result:
    """Return the result of a change of many letters in the spec's form (adm 6.5)."""
    result: shapes.Result = {
        "action": action_to_json(action),
        "matched": done.matched,
        "succeeded": done.succeeded,
        "failed": done.failed,
        "errors": [{"job_id": letter_id, "error": why} for letter_id, why in done.errors],
    }
    if action == "purge":
        result["deleted"] = done.succeeded
    return result
