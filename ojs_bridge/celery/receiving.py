"""The receipt of messages: a message that no worker can handle is kept.

Celery drops what it cannot decode. A message with a part of another type ends the worker's main process, and
the next worker gets the same message.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from celery import Task
from celery.exceptions import InvalidTaskError
from kombu.exceptions import ContentDisallowed, DecodeError

from ..engine.harmless import Harmless
from ..engine.storage_retry import at_once
from ..messages import HEADER, parameters_of
from ..rules.failures import MAX_MESSAGE, cut, nests_deeper, safe_repr
from ..rules.job import MAX_DEPTH, Job, count_of, decoded
from . import compat, sending
from . import wire as wires
from .attach import FRAMEWORK, attach

logger = logging.getLogger("ojs_bridge")

Handler = Callable[..., Any]

#: The errors that Celery itself handles: it logs them, sends its signal and drops the message.
_DROPPED = (InvalidTaskError, ContentDisallowed, DecodeError)
_NO_LIMITS: tuple[Any, ...] = (None, [None, None], (None, None))
#: The attributes of a request that the third part of a message would overwrite.
_NOT_EMBEDDED = frozenset(
    {
        "args",
        "called_directly",
        "delivery_info",
        "headers",
        "id",
        "is_eager",
        "kwargs",
        "properties",
        "retries",
    }
)


def keeping(task: Task, consumer: Any, handler: Handler, natively: Callable[[], Handler]) -> Handler:
    """Return a task's message handler, which keeps a message that it cannot handle.

    A broadcast goes to Celery's own handler: each worker has a copy under the same id, a store would let one
    of them run, and what the bridge sends on would go to every worker.
    """
    errors = (*consumer.connection_errors, *consumer.channel_errors, MemoryError)
    # Kombu's Redis counts KeyError among them, which a message without an id raises.
    out_of_reach = tuple(error for error in errors if not issubclass(error, LookupError))

    @functools.cache
    def say_native() -> None:
        logger.warning("task %s: its broadcasts stay native, since each worker runs a copy", task.name)

    @functools.wraps(handler)
    def receive(message: Any, *rest: Any, **options: Any) -> Any:
        if wires.is_broadcast(task.app, message.delivery_info):
            say_native()
            return natively()(message, *rest, **options)
        try:
            _check(message.headers, message.payload)
            return handler(message, *rest, **options)
        except out_of_reach:
            raise
        except Exception as error:
            if message.acknowledged:
                raise
            _free_place(consumer.controller, error)
            if not _is_kept(task, message, error):
                return None
            if isinstance(error, _DROPPED):
                raise
            raise InvalidTaskError(repr(error)) from error

    return receive


def _free_place(controller: Any, error: Exception) -> None:
    """Free the place in the pool of a message that could not be handed to the pool."""
    semaphore, trace = compat.semaphore(controller, None), error.__traceback__
    while semaphore is not None and trace is not None:
        if trace.tb_frame.f_code.co_name == compat.execute_using_pool.name:
            semaphore.release()
            return
        trace = trace.tb_next


def _check(headers: Mapping[str, Any], payload: Any) -> None:
    """Raise InvalidTaskError for a message that would fail later, in the worker's timer or in its pool."""
    if headers.get("timelimit") not in _NO_LIMITS:
        _check_limits(headers["timelimit"])
    if headers.get("stamped_headers"):
        _check_stamps(headers["stamped_headers"], headers.get("stamps"))
    if isinstance(payload, dict):
        # The first version of Celery's protocol, whose form is its own.
        return
    args, kwargs, embed = payload
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict):
        raise InvalidTaskError("the message's arguments must be a list and an object")
    if embed and not (isinstance(embed, dict) and _NOT_EMBEDDED.isdisjoint(embed)):
        raise InvalidTaskError("the message's third part must be an object of callbacks, a chain and a chord")


def _check_limits(limits: Any) -> None:
    hard, soft = limits
    for limit in (hard, soft):
        if limit is not None and type(limit) not in (int, float):
            raise InvalidTaskError(f"timelimit: {limit!r} is no number of seconds")


def _check_stamps(names: Any, stamps: Any) -> None:
    if not (isinstance(names, (list, tuple)) and all(isinstance(name, str) for name in names)):
        raise InvalidTaskError(f"stamped_headers: {names!r} must be a list of names")
    if not isinstance(stamps or {}, dict):
        raise InvalidTaskError(f"stamps: {stamps!r} must be an object")


def _is_kept(task: Task, message: Any, error: Exception) -> bool:
    """Keep a message as a dead letter, or as it is in its queue's dead queue; False if both fail.

    The message then stays in the worker's main process, unacknowledged: its queue would send it back at once.
    """
    app, engine = task.app, attach(task.app).engine
    try:
        parts = wires.carried(message, message.body, None, app)
        wire = wires.delivered(app, parts, message.properties or {}, message.delivery_info or {})
        wire = replace(wire, headers={name: _flat(value) for name, value in wire.headers.items()})
        refused = engine.unbegun(_job_of(task, wire), error)
        with at_once():
            # A dead letter is found by its id.
            letter = sending.Outgoing(wire, parameters=parameters_of(task.run)) if refused.job.id else None
            ended = engine.carrying.after(refused.job, refused.decision)
            if not engine.keeping.is_buried(refused, ended, refused.decision, FRAMEWORK, letter):
                sending.is_buried(engine, app, wire, {}, can_wait=True)
        engine.settling.settle(refused, refused.decision)
        with Harmless(refused.job):
            task.backend.mark_as_failure(refused.job.id, error)
    except Exception:
        logger.critical("a message of %s stays unacknowledged: it cannot be kept", task.name, exc_info=True)
        return False
    return True


def _job_of(task: Task, wire: wires.Wire) -> Job:
    """Return as much of the job as can be read; without an id it has none."""
    headers = wire.headers
    said, retries = headers.get("id"), count_of(headers.get("retries")) or 0
    bare = Job("" if said is None else str(said), task.name, wire.queue, 1 + retries, fence=retries)
    job = decoded(headers.get(HEADER), bare, headers.get("retries"))
    return job if isinstance(job, Job) else bare


def _flat(value: Any) -> Any:
    """Return a header's value that can be written again: its repr where it is nested too deep."""
    return cut(safe_repr(value), MAX_MESSAGE) if nests_deeper(value, MAX_DEPTH) else value
