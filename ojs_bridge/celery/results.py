"""A job in the result backend: its retries, its chord, and a success whose worker died."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable
from datetime import datetime
from typing import Any
from weakref import WeakSet

from celery import Task, states
from celery.backends.base import DisabledBackend
from celery.exceptions import Retry
from celery.result import AsyncResult
from celery.states import RETRY

from . import compat
from .wire import known

logger = logging.getLogger("ojs_bridge")


def carried_on(task: Task, request: Any, since: datetime | None) -> bool:
    """Return whether the dead worker of a job had stored its success; if so, the job's chord counts it.

    Celery sends the chain and the links before it stores the success. A success from before `since`, when the
    worker began, is of an earlier job with the same id. Never raises.
    """
    if since is None or task.ignore_result or isinstance(task.backend, DisabledBackend):
        return False
    try:
        result = task.AsyncResult(request.id)
        if result.state != states.SUCCESS or not _is_after(since, result, task):
            return False
        found = result.result
    except Exception:
        logger.exception("job %s: whether it has succeeded cannot be found out", known(request))
        return False
    count_in_chord(task, request, found)
    return True


def count_in_chord(task: Task, request: Any, result: Any) -> None:
    """Have a job's chord count its success, perhaps a second time; never raises."""
    if not request.chord:
        return
    try:
        compat.on_chord_part_return(task.backend)(request, states.SUCCESS, result)
    except Exception:
        logger.exception("job %s: its chord cannot be told of its success", known(request))


def _is_after(since: datetime, result: AsyncResult, task: Task) -> bool:
    at: datetime | None = result.date_done
    if at is None:
        return False
    # A time without a zone is the app's, or the database server's: one in the future proves nothing.
    aware = at if at.tzinfo else at.replace(tzinfo=task.app.timezone)
    now: datetime = task.app.now()
    return since <= aware <= now


def reopen_chord(task: Task, request: Any) -> None:
    """Have a chord on Redis replace the failure of a replayed member by its success; never raises.

    A chord that has failed sends its body when no failure is left in it.
    """
    if not (request.chord and request.group and _is_redis(task.backend)):
        return
    try:
        _reopen(task.backend, request.id, request.group)
    except Exception:
        logger.exception("job %s: its chord cannot be told of the replay", known(request))


def _is_redis(backend: Any) -> bool:
    module = sys.modules.get("celery.backends.redis")
    return module is not None and isinstance(backend, module.RedisBackend)


def _reopen(backend: Any, job_id: str, group_id: str) -> None:
    # The state of a chord: its parts, what is added to its size, its size, and since Celery 5.7 the jobs that
    # are counted and the job that sends the body.
    key_of = compat.get_key_for_group(backend)
    parts, more, size, counted, claim = (key_of(group_id, f".{key}") for key in "jtsdc")
    redis, is_ordered = backend.client, compat.chord_zset(backend)
    found = redis.zrange(parts, 0, -1) if is_ordered else redis.lrange(parts, 0, -1)
    read = {part: backend.decode(part) for part in found}
    failed = {part: of for part, (_, of, state, _) in read.items() if state in states.EXCEPTION_STATES}
    own = [part for part, of in failed.items() if of == job_id]
    if not own:
        return
    known, extra = redis.get(size), int(redis.get(more) or 0)
    marks = [mark for mark in redis.smembers(counted) if mark.startswith(f"{job_id}:".encode())]
    with redis.pipeline() as pipe:
        for part in own:
            pipe.zrem(parts, part) if is_ordered else pipe.lrem(parts, 0, part)
        if marks:
            pipe.srem(counted, *marks)
        if known is None or len(found) >= int(known) + extra:
            # The chord has failed. Celery counts again if this was its last failure.
            pipe.delete(claim, size)
            if len(failed) == len(own):
                pipe.set(size, len(found) - extra, ex=backend.expires or None)
        pipe.execute()


def store_retry(task: Task, request: Any, signal: Retry) -> None:
    """Store the state RETRY of a job, if Celery would; Celery does not store it again. Never raises."""
    try:
        compat.handle_error_state_of(_EarlyRetry(RETRY, signal))(task, request)
    except Exception:
        logger.exception("job %s is sent on, though its state cannot be stored", known(request))


class _EarlyRetry(compat.TraceInfo):  # type: ignore[misc]
    """Celery's rule on which errors are stored, without its other steps of a retry."""

    __slots__ = ()

    def handle_retry(self, task: Task, req: Any, store_errors: bool = True, **_: Any) -> None:
        if not store_errors:
            return
        mark = compat.mark_as_retry_of(task.backend)
        if not isinstance(mark, _MarkOnce):
            mark = _MarkOnce(mark)
            setattr(task.backend, compat.mark_as_retry.name, mark)
        mark.store(req, self.retval)


class _MarkOnce:
    """A backend's `mark_as_retry`, which skips the requests whose retry is stored already."""

    def __init__(self, mark: Callable[..., Any]) -> None:
        self._mark = mark
        self._stored: WeakSet[Any] = WeakSet()

    def store(self, request: Any, signal: Retry) -> None:
        self._stored.add(request)
        shown = "".join(traceback.format_exception(signal))
        self._mark(request.id, signal.exc, shown, request=request)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return None if options.get("request") in self._stored else self._mark(*args, **options)
