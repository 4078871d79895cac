"""The receipt of messages: the canary leaves some to Celery, and one that no worker can handle is kept.

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

from ..adapters import parameters_of
from ..adapters.terms import Canary
from ..engine.events import harmless
from ..engine.storage_retry import at_once, is_of_process
from ..engine.threads import AGAIN
from ..messages import HEADER
from ..rules.failures import MAX_MESSAGE, cut, nests_deeper, safe_repr
from ..rules.job import MAX_DEPTH, Job, count_of, decoded
from . import compat
from . import wire as wires
from .installation import attach, installation
from .native import of
from .wire import NAME

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


def receiver(task: Task, consumer: Any, handler: Handler, natively: Callable[[], Handler]) -> Handler:
    """Return a task's message handler, which keeps a message that it cannot handle.

    A broadcast goes to Celery's own handler: each worker has a copy under the same id, a store would let one
    of them run, and what the bridge sends on would go to every worker.
    """
    errors = (*consumer.connection_errors, *consumer.channel_errors, MemoryError)
    # Kombu's Redis counts KeyError among them, which a message without an id raises.
    out_of_reach = tuple(error for error in errors if not issubclass(error, LookupError))

    delays = installation(task.app).delays

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
            if delays and delays.take_over(message):
                message.ack()
                return None
            return handler(message, *rest, **options)
        except out_of_reach:
            raise
        except Exception as error:
            # A green pool takes nothing while a signal is handled: the message goes back as the worker stops.
            if message.acknowledged or type(error).__module__.startswith(compat.GREEN):
                raise
            _free_place(consumer.controller, error)
            again = functools.partial(receive, message, *rest, **options)
            if _waits(task, consumer, message, error, again) or not _is_kept(task, message, error):
                return None
            if isinstance(error, _DROPPED):
                raise
            raise InvalidTaskError(repr(error)) from error

    return receive


def _waits(task: Task, consumer: Any, message: Any, error: Exception, receive: Callable[[], Any]) -> bool:
    """Let a message be received once more in a second, if the error says nothing of it; else return False."""
    body = message.body if isinstance(message.body, bytes) else str(message.body).encode()
    if not is_of_process(error, message.headers, body):
        return False

    def again() -> None:
        # On another connection the broker has given it to a worker anew.
        if message.channel is consumer.task_consumer.channel:
            try:
                receive()
            except _DROPPED as dropped:
                consumer.on_invalid_task(None, message, dropped)

    logger.error("a message of %s waits in this worker: %r", task.name, error)
    consumer.timer.call_after(AGAIN, again)
    return True


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
        refused = engine.refuse(_job_of(task, wire), error)
        with at_once():
            # A dead letter is found by its id.
            letter = wires.Outgoing(wire, parameters=parameters_of(task.run)) if refused.job.id else None
            ended = engine.carrying.after(refused.job, refused.decision)
            if not engine.storing.is_buried(refused, ended, refused.decision, NAME, letter):
                installation(app).broker.is_buried(engine, wire, {}, can_wait=True)
        engine.settling.settle(refused, refused.decision)
        harmless(refused.job, task.backend.mark_as_failure, refused.job.id, error)
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


class Outside:
    """The jobs of an installed task that the canary leaves to Celery."""

    def __init__(self, canary: Canary, task: Task) -> None:
        self._canary = canary
        self._task = task

    def has(self, headers: Mapping[str, Any]) -> bool:
        """Return whether a job is outside, by the headers that it came with.

        A job that brings its own policy is not. Nor is a job with an unreadable header, which may hold a
        policy, nor a job that comes before its time, which the bridge sends on.
        """
        job_id, name = str(headers.get("id")), self._task.name
        if self._canary.covers(name, job_id):
            return False
        job = decoded(headers.get(HEADER), Job(job_id, name, "", 1 + (count_of(headers.get("retries")) or 0)))
        return isinstance(job, Job) and not job.retry and not self._is_early(job, headers.get("eta"))

    def _is_early(self, job: Job, eta: object) -> bool:
        """Return whether a job comes before its time; its worker keeps it until its `eta`."""
        due, app = job.next_retry_at, self._task.app
        if due is None:
            return False
        now = attach(app).engine.now()
        return due > max(now, wires.time_in(app, eta) or now)

    def apart(self, inside: Callable[..., Any], outside: Callable[..., Any]) -> Callable[..., Any]:
        """Return the message handler of a task, made of a handler for each side.

        It decides once for each message, in the worker's main process.
        """

        @functools.wraps(inside)
        def receive(message: Any, *rest: Any, **options: Any) -> Any:
            headers, payload = message.headers, message.payload
            if isinstance(payload, dict):
                # The first version of Celery's protocol has its headers in the body.
                headers = {**payload, **headers}
            return (outside if self.has(headers) else inside)(message, *rest, **options)

        return receive


def outside_of(task: Task) -> Outside | None:
    """Return the jobs of a task that are outside its app's canary; None where all are under the bridge."""
    canary = installation(task.app).terms.canary
    return None if canary.covers_all(task.name) else Outside(canary, task)


def check_canary(app: Celery) -> None:
    """Say in the log which jobs are under the bridge already; ConfigurationError for what names no task."""
    canary = installation(app).terms.canary
    installed = [task for task in app.tasks.values() if of(task).taken_from]
    canary.check([task.name for task in installed], f"installed task of the app {app.main!r}")
    if any(task.ojs_outside for task in installed):
        logger.warning("canary: under the bridge are %s; Celery itself runs the other jobs", canary)
