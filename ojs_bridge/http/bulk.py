"""Replays and purges of many letters: few run at a time, and a client may get their progress in lines."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, TypeVar

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..operations.bulk import Preview
from ..operations.letters import kind_to_json
from ..operations.operation import ON_RETRIES, Action
from ..operations.replaying import Bulk
from .answers import REQUEST_ID, Answer, Refusal, invalid, refusal_of, too_many, written
from .shapes import Result

LINES = "application/x-ndjson"
#: The most changes that run at a time: each holds a thread until it has ended.
MAX_RUNNING = 4

#: The number of letters done so far, and at last the result or an error.
Line: TypeAlias = Mapping[str, object]
Progress: TypeAlias = Callable[[int], object]
Work: TypeAlias = Callable[[Progress], Bulk]


Done = TypeVar("Done")


def unconfirmed(action: Action, found: Preview) -> Refusal:
    """Return the refusal of a change without consent; its details have the number, the types, the filter."""
    what = "parked retries" if action in ON_RETRIES else "dead letters"
    return invalid(
        f"confirm: must be true; {found.matched} {what} are matched",
        matched=found.matched,
        by_type=found.by_type and dict(found.by_type),
        filter=kind_to_json(found.kind),
    )


class Bulks:
    """Runs changes of many letters, and calls `changed` after each change."""

    def __init__(self, changed: Callable[[], object]) -> None:
        self._running = 0
        self._changed = changed

    async def answer(self, request: Request, action: Action, work: Work) -> Response:
        """Do the work, and answer with its result; a client that accepts lines gets the progress, too."""
        self._check()
        if LINES in request.headers.get("accept", ""):
            return _Lines(lambda told: self._run(action, work, told))
        return Answer(await self._run(action, work, lambda _line: None))

    async def _run(self, action: Action, work: Work, told: Callable[[Line], object]) -> Result:
        # When the client has gone away, the line cannot be sent: its error ends the work after a batch.
        done = await self.run(lambda: work(lambda n: anyio.from_thread.run_sync(told, {"done": n})))
        return _result_of(action, done)

    async def run(self, work: Callable[[], Done]) -> Done:
        """Do long work in one of a few threads; raises Refusal when no thread is free."""
        self._check()
        self._running += 1
        try:
            return await run_in_threadpool(work)
        finally:
            self._running -= 1
            self._changed()

    def _check(self) -> None:
        if self._running >= MAX_RUNNING:
            raise too_many(f"{MAX_RUNNING} replays, purges or counts are running", 10)


def _result_of(action: Action, done: Bulk) -> Result:
    """Return the result of a change of many letters in the spec's form (adm 6.5)."""
    found: Result = {
        "action": action,
        "matched": done.matched,
        "succeeded": done.succeeded,
        "failed": done.failed,
        "errors": [{"job_id": letter_id, "error": why} for letter_id, why in done.errors],
    }
    if action == "purge":
        found["deleted"] = done.succeeded
    return found


class _Lines(Response):
    """An answer in lines of JSON: the number of letters done so far, and at last the result or an error.

    The work ends when the client goes away. The other letters stay.
    """

    media_type = LINES

    def __init__(self, run: Callable[[Callable[[Line], object]], Any]) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the lines as they come."""
        lines, heard = anyio.create_memory_object_stream[Line](math.inf)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_close_when_gone, receive, heard)
            tasks.start_soon(self._work, lines, scope[REQUEST_ID])
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            with suppress(anyio.ClosedResourceError):
                async for line in heard:
                    body = f"{written(line)}\n".encode("ascii")
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            tasks.cancel_scope.cancel()

    async def _work(self, lines: MemoryObjectSendStream[Line], request_id: str) -> None:
        with lines, suppress(anyio.BrokenResourceError):
            try:
                lines.send_nowait(await self._run(lines.send_nowait))
            except anyio.BrokenResourceError:
                return
            except Exception as error:  # noqa: BLE001 - the last line tells it
                lines.send_nowait(refusal_of(error, request_id).to_ojs(request_id))


async def _close_when_gone(receive: Receive, heard: MemoryObjectReceiveStream[Line]) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    heard.close()
