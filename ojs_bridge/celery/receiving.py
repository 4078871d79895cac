"""Receipt of a message: a message that no worker can carry out is kept, and neither dropped nor deadly.

Celery drops what it cannot decode. A message with a part of another type ends the worker's main process, and
the next worker gets the same message.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from celery import Celery, Task
from celery.exceptions import InvalidTaskError
from kombu.exceptions import ContentDisallowed, DecodeError

from ..engine.events import Harmless
from ..messages import parameters_of
from ..spec.depth import nests_deeper
from ..spec.failures import MAX_MESSAGE, cut, safe_repr
from ..spec.job import MAX_DEPTH, Job, count_of, decoded
from . import compat, sending
from . import wire as wires
from .attach import FRAMEWORK, attach
from .wire import HEADER

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


def keeping(task: Task, app: Celery, consumer: Any, handler: Handler) -> Handler:
    """Return a task's message handler that keeps what it cannot handle."""
    errors = (*consumer.connection_errors, *consumer.channel_errors, MemoryError)
    # Kombu's Redis counts KeyError among them, which a message without an id raises.
    out_of_reach = tuple(error for error in errors if not issubclass(error, LookupError))

    @functools.wraps(handler)
    def receive(message: Any, *rest: Any, **options: Any) -> Any:
        try:
            _check(message.headers, message.payload)
            return handler(message, *rest, **options)
        except out_of_reach:
            raise
        except Exception as error:
            if message.acknowledged:
                raise
            _free_place(consumer.controller, error)
            if not _kept(app, task, message, error):
                return None
            if isinstance(error, _DROPPED):
                raise
            raise InvalidTaskError(repr(error)) from error

    return receive


def _free_place(controller: Any, error: Exception) -> None:
    """Free the place in the pool that a message was given which could not be handed to it."""
    semaphore, trace = compat.semaphore(controller, None), error.__traceback__
    while semaphore is not None and trace is not None:
        if trace.tb_frame.f_code.co_name == compat.execute_using_pool.name:
            semaphore.release()
            return
        trace = trace.tb_next


def _check(headers: Mapping[str, Any], payload: Any) -> None:
    """Raise InvalidTaskError for what would fail later, in the worker's timer or before the task is begun."""
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


def _kept(app: Celery, task: Task, message: Any, error: Exception) -> bool:
    """Keep a message as a dead letter, or as it is in its queue's dead queue; False when it stays here.

    Celery's main process then has it, unacknowledged: to give it back would bring it here again at once.
    """
    try:
        _keep(app, task, message, error)
    except Exception:
        logger.critical("a message of %s stays unacknowledged: it cannot be kept", task.name, exc_info=True)
        return False
    return True


def _keep(app: Celery, task: Task, message: Any, error: Exception) -> None:
    parts = wires.carried(message, message.body, None, app)
    wire = wires.delivered(app, parts, message.properties or {}, message.delivery_info or {})
    wire = replace(wire, headers={name: _flat(value) for name, value in wire.headers.items()})
    job = _job(task.name, wire)
    engine = attach(app).engine
    refused = engine.unbegun(job, error)
    with engine.at_once():
        try:
            # A dead letter is found, and sent again, by its id.
            kept = {**wires.to_json(wire), "parameters": [*parameters_of(task.run)]} if job.id else None
            if engine.store is None or kept is None:
                raise LookupError("there is no store, or the message has no id")
            ended = engine.after(job, refused.decision)
            engine.bury(refused, ended, refused.decision, FRAMEWORK, kept)
        except Exception:  # noqa: BLE001 - whatever it is, the broker is the next place
            sending.bury(app, wire, {})
            logger.error("job %s: kept in the broker's dead queue as it came: %r", job.id, error)
    engine.settle(refused, refused.decision)
    with Harmless(job):
        task.backend.mark_as_failure(job.id, error)


def _flat(value: Any) -> Any:
    """Return a header's value that can be written again: its repr where it is nested too deep."""
    return cut(safe_repr(value), MAX_MESSAGE) if nests_deeper(value, MAX_DEPTH) else value


def _job(name: str, wire: wires.Wire) -> Job:
    """Return as much of the job as can be read; without an id it has none."""
    headers = wire.headers
    said, retries = headers.get("id"), count_of(headers.get("retries")) or 0
    bare = Job("" if said is None else str(said), name, wire.queue, 1 + retries, fence=retries)
    job = decoded(headers.get(HEADER), bare, headers.get("retries"))
    return job if isinstance(job, Job) else bare
