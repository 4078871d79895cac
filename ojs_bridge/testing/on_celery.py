"""A Celery app under virtual time: its broker and its results are in memory, and a test is its worker.

Celery's own code sends and takes the messages, runs the tasks and stores the results.
"""

from __future__ import annotations

import logging
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from functools import partial
from types import SimpleNamespace
from typing import Any

from celery import Celery, Task, _state, signals
from celery.backends.cache import CacheBackend
from celery.concurrency.base import apply_target
from celery.exceptions import InvalidTaskError, TaskRevokedError
from celery.local import Proxy
from celery.worker import state
from celery.worker.consumer.consumer import Consumer
from kombu import pools
from kombu.connection import Connection
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.transport import memory, virtual
from kombu.utils.functional import LRUCache

from ..bridge import Bridge
from ..celery import compat
from ..celery.attach import (
    FRAMEWORK,
    attach,
    is_bridged,
    is_prepared,
    settle_success,
    task_policy,
)
from ..celery.outcomes import task_outcome
from ..engine.runs import Run, TaskPolicy
from ..errors import ConfigurationError
from ..spec.failures import Outcome
from .bridging import Clock, WorkerDied
from .working import Agenda, Handler

logger = logging.getLogger("ojs_bridge")

_TRACE, _RUN = "__trace__", "run"


TARGET = Celery


def current() -> Celery | None:
    """Return the current app if it has a bridge."""
    app = compat.current_apps(_state).current_app or _state.default_app
    return app if app is not None and is_prepared(app) else None


def itself(app: Any) -> Celery:
    """Return the app behind a proxy, such as `celery.current_app`."""
    found: Celery = compat.get_current_object(app)() if type(app) is Proxy else app
    return found


def bridge_of(app: Celery) -> Bridge:
    """Return an app's bridge; raises ConfigurationError."""
    app.finalize()
    if not is_prepared(app):
        raise ConfigurationError(
            f"the Celery app {app.main!r} has no bridge: call ojs_bridge.celery.install(app, bridge), or "
            "define its tasks with @ojs_task(app)"
        )
    return attach(app)


def settings_of(task: Any) -> tuple[TaskPolicy, Callable[[BaseException, Run], Outcome]] | None:
    """Return a task's settings, and the translation of its errors; None for anything but a task.

    Raises TypeError for a task that is not under the bridge.
    """
    if not isinstance(task, Task):
        return None
    task.app.finalize()
    if not is_bridged(task):
        raise TypeError(f"task {task.name} is not under the bridge: Celery itself retries it")
    zero = datetime.min.replace(tzinfo=timezone.utc)
    return task_policy(task.app, task), lambda error, run: task_outcome(task, error, None, run, zero)


@contextmanager
def worker_of(app: Celery, agenda: Agenda) -> Iterator[CeleryWorker]:
    """Keep all that an app sends in memory; yield the worker that takes it."""
    connection = Connection(transport=_transport())
    worker = CeleryWorker(app, connection, agenda)
    with ExitStack() as stack:
        stack.enter_context(_current(app))
        stack.enter_context(_in_memory(app, connection, agenda.clock))
        stack.enter_context(_traced_anew(app))
        if all(receiver is not settle_success for _, receiver in signals.task_postrun.receivers):
            # A bridge without a store of its own has not connected it.
            signals.task_postrun.connect(settle_success, weak=False)
            stack.callback(signals.task_postrun.disconnect, settle_success)
        stack.callback(worker.take_out)
        yield worker


class CeleryWorker:
    """All that Celery's code asks of a worker and its consumer to handle a message; it has one place."""

    framework = FRAMEWORK
    event_dispatcher = None
    connection_errors = channel_errors = ()
    disable_rate_limits = True
    hostname = f"ojs@{socket.gethostname()}"
    apply_eta_task = Consumer.apply_eta_task
    _limit_task = _limit_post_eta = None

    def __init__(self, app: Celery, connection: Connection, agenda: Agenda) -> None:
        self.app = app
        self.pool = self.timer = self.qos = self
        self.controller = SimpleNamespace(state=state)
        self.task_buckets = dict.fromkeys(app.tasks)
        self._channel: Any = connection.default_channel
        self._agenda = agenda
        self._handlers: dict[str, Any] = {}
        self._request: Any = None
        self._put_in: list[tuple[Any, dict[str, Any]]] = []

    def deliver(self) -> bool:
        """Deliver the next message that waits; False if none does. Raises WorkerDied."""
        if self._agenda.do_next():
            return True
        if not self._channel.order:
            return False
        found = self._channel.basic_get(self._channel.order.popleft())
        if found is not None:
            self._handle(self._channel.message_to_python(found))
        return True

    def _handle(self, message: Any) -> None:
        name = message.headers.get("task") or message.payload["task"]
        handler = self._handlers.get(name) or self._handler(name)
        if handler is None:
            logger.warning("job %s: no task of this app has the name %s", message.headers.get("id"), name)
            message.ack()
            return
        try:
            handler(message, None, message.ack_log_error, message.reject_log_error, None)
        except (InvalidTaskError, ContentDisallowed, DecodeError):
            # The bridge has kept the message.
            message.reject_log_error(logger, self.connection_errors)

    def _handler(self, name: str) -> Any:
        if name not in self.app.tasks:
            # A worker imports the modules of the tasks when it starts.
            self.app.loader.import_default_modules()
        if name not in self.app.tasks:
            return None
        self.task_buckets[name] = None
        handler = self._handlers[name] = self.app.tasks[name].start_strategy(self.app, self)
        return handler

    def on_task_request(self, request: Any) -> None:
        """Run a task, as Celery's worker does."""
        self._request = request
        try:
            request.execute_using_pool(self)
        except TaskRevokedError:
            logger.info("job %s was revoked", request.id)

    def apply_async(
        self, target: Any, args: Any = (), accept_callback: Any = None, callback: Any = None, **_: Any
    ) -> None:
        """Run a task in the place of a pool; raises WorkerDied."""
        run = partial(target, app=self.app)
        apply_target(run, args, {}, callback, accept_callback, propagate=(WorkerDied,))

    def call_at(self, _eta: float, callback: Any, args: Any, **_: Any) -> Any:
        """Call something when a request is due by the clock, in the place of a worker's timer."""
        self._agenda.at(args[0].eta, partial(callback, *args))
        return SimpleNamespace(cancel=lambda: None)

    def increment_eventually(self) -> None:
        """Take one more message: there is no limit."""

    decrement_eventually = increment_eventually

    def replace(self) -> bool:
        """Have the broker deliver the message of the dead worker again; False if it was acknowledged."""
        request = self._request
        compat.task_ready(state)(request)
        if request.acknowledged:
            return False
        request.message.requeue()
        return True

    def put_in(self, task: Any, make: Callable[[Handler], Handler]) -> str:
        """Put a function in the place of a task's own, made of it; return the task's name."""
        name = getattr(task, "name", task)
        if name not in self.app.tasks:
            raise LookupError(f"no task of this app has the name {name!r}")
        found = self.app.tasks[name]
        own = vars(found)
        self._put_in.append((found, {_RUN: own[_RUN]} if _RUN in own else {}))
        found.run = make(found.run)
        # Celery's tracer has kept the function of a task that is not under the bridge.
        own.pop(_TRACE, None)
        return str(name)

    def take_out(self) -> None:
        """Give all tasks back their own functions."""
        while self._put_in:
            task, own = self._put_in.pop()
            del task.run
            vars(task).update(own)


class _Channel(memory.Channel):
    """A channel to queues in memory, which notes the order of the messages."""

    order: deque[str]

    def _put(self, queue: str, message: Any, **options: Any) -> None:
        super()._put(queue, message, **options)
        self.order.append(queue)


def _transport() -> type[virtual.Transport]:
    """Return a transport with queues of its own."""
    queues: dict[str, Any] = {"queues": {}, "events": defaultdict(set), "order": deque()}
    own = {"Channel": type("Channel", (_Channel,), queues), "global_state": virtual.BrokerState()}
    return type("Transport", (memory.Transport,), own)


@contextmanager
def _in_memory(app: Celery, connection: Connection, clock: Clock) -> Iterator[None]:
    """Have an app connect to memory, read the clock, and keep results, if it has any, in memory."""
    results = CacheBackend(app, url="memory://") if app.conf.result_backend or app.backend_cls else None
    if results:
        # Otherwise all such backends share their results.
        results.client.cache = LRUCache()
    attributes = {
        "connection_for_read": lambda *_, **__: connection.clone(),
        "connection_for_write": lambda *_, **__: connection.clone(),
        "now": lambda app: clock().astimezone(app.timezone),
        "use_fast_trace_task": False,
        **({"backend": results} if results else {}),
    }
    cls, eager = type(app), app.conf.task_always_eager
    leading = [(name, owner, name(owner)) for name, owner in _leading(app)]
    for name, owner, _ in leading:
        name.set(owner, None)
    app.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **attributes})
    app.conf.task_always_eager = False
    try:
        yield
    finally:
        app.conf.task_always_eager = eager
        app.__class__ = cls
        for name, owner, before in leading:
            name.set(owner, before)
        _forget(connection)


def _leading(app: Celery) -> Iterator[tuple[Any, Any]]:
    """Yield the names of what leads to the broker, and the objects that have them."""
    yield compat.app_pool, app
    yield compat.producer_pool, app.amqp


def _forget(connection: Connection) -> None:
    """Close the pools of a connection, and have kombu forget them."""
    for group in (pools.producers, pools.connections):
        for key in [key for key in group if key[0] is connection.transport_cls]:
            group.pop(key).force_close_all()
    connection.release()


@contextmanager
def _traced_anew(app: Celery) -> Iterator[None]:
    """Have Celery forget its tracers, which know the result backend, and have them back at the end."""
    before = {task: vars(task).pop(_TRACE, None) for task in app.tasks.values()}
    try:
        yield
    finally:
        for task in app.tasks.values():
            vars(task).pop(_TRACE, None)
            if before.get(task):
                setattr(task, _TRACE, before[task])


@contextmanager
def _current(app: Celery) -> Iterator[None]:
    """Have an app be the current one, as in its worker."""
    apps = compat.current_apps(_state)
    before = apps.current_app
    app.set_current()
    try:
        yield
    finally:
        apps.current_app = before
