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
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

from celery import Celery, Task, signals
from celery.backends.cache import CacheBackend
from celery.concurrency.base import apply_target
from celery.exceptions import InvalidTaskError, TaskRevokedError
from celery.worker import state
from celery.worker.consumer.consumer import Consumer
from kombu.common import Broadcast
from kombu.connection import Connection
from kombu.exceptions import ContentDisallowed, DecodeError
from kombu.pools import connections, producers
from kombu.transport import memory, virtual
from kombu.utils.functional import LRUCache

from ..celery import compat
from ..celery.delivery import task_outcome
from ..celery.installation import installation, is_bridged, task_policy
from ..celery.run import settle_success
from ..celery.wire import NAME
from ..engine.layers import TaskPolicy
from ..engine.runs import Run
from ..rules.failures import Outcome
from .parts import Agenda, Clock, Handler, WorkerDied

logger = logging.getLogger("ojs_bridge")


def current() -> Celery | None:
    """Return the current app if it has a bridge."""
    app = compat.current_apps.find().current_app or compat.default_app.find()
    return app if app is not None and installation(app).is_prepared else None


def _behind_proxy(app: Celery) -> Celery:
    """Return the app itself, also for a proxy such as `celery.current_app`."""
    itself: Celery = compat.get_current_object(app, lambda: app)()
    return itself


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
    return task_policy(task.app, task), lambda error, run: task_outcome(task, error, run, zero)


@contextmanager
def worker_of(app: Celery, agenda: Agenda) -> Iterator[CeleryWorker]:
    """Keep all that an app sends in memory; yield the worker that takes it."""
    app, apps = _behind_proxy(app), compat.current_apps.find()
    connection = Connection(transport=_transport())
    worker = CeleryWorker(app, connection, agenda)
    with ExitStack() as stack:
        stack.callback(setattr, apps, "current_app", apps.current_app)
        app.set_current()
        stack.enter_context(_in_memory(app, connection, agenda.clock))
        stack.enter_context(_traced_anew(app))
        if all(receiver is not settle_success for _, receiver in compat.receivers(signals.task_postrun)):
            # A bridge without a store of its own has not connected it.
            signals.task_postrun.connect(settle_success, weak=False)
            stack.callback(signals.task_postrun.disconnect, settle_success)
        stack.callback(worker.take_out)
        yield worker


class CeleryWorker:
    """Stands for Celery's worker, consumer, pool and timer; it runs one task at a time."""

    framework = NAME
    event_dispatcher = None
    connection_errors = channel_errors = ()
    disable_rate_limits = True
    hostname = f"ojs@{socket.gethostname()}"
    apply_eta_task = Consumer.apply_eta_task

    def __init__(self, app: Celery, connection: Connection, agenda: Agenda) -> None:
        self.app = app
        self.pool = self.timer = self.qos = self
        self.controller = SimpleNamespace(state=state)
        self.task_buckets = dict.fromkeys(app.tasks)
        self._channel: Any = connection.default_channel
        self._agenda = agenda
        self._handlers: dict[str, Any] = {}
        self._request: Any = None
        self._put_in: list[tuple[Any, str, Any]] = []
        compat.limit_task.set(self, None)
        compat.limit_post_eta.set(self, None)
        for queue in app.amqp.queues.values():
            if isinstance(queue, Broadcast):
                # A worker declares it, and no producer.
                queue(self._channel).declare()

    def deliver(self) -> bool:
        """Deliver the next message that waits; False if none does. Raises WorkerDied."""
        if self._agenda.do_next():
            return True
        if not self._channel.order:
            return False
        message = self._channel.basic_get(self._channel.order.popleft())
        if message is not None:
            self._handle(message)
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
        handler = self._handlers[name] = compat.start_strategy(self.app.tasks[name])(self.app, self)
        return handler

    def on_task_request(self, request: Any) -> None:
        """Run a task, as Celery's worker does."""
        self._request = request
        try:
            compat.execute_using_pool(request)(self)
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

    def replace(self) -> None:
        """Let the broker deliver the message of the dead worker again, unless it was acknowledged."""
        compat.task_ready(state)(self._request)
        if not self._request.acknowledged:
            self._request.message.requeue()

    def put_in(self, name: str, make: Callable[[Handler], Handler]) -> None:
        """Put a function in the place of a task's own, made of it; raises LookupError."""
        if name not in self.app.tasks:
            raise LookupError(f"no task of this app has the name {name!r}")
        task = self.app.tasks[name]
        # The wrapper of `autoretry_for` stays: it calls the function that it has put aside.
        own = compat.orig_run(task, task.run)
        made = wraps(own)(make(own))
        for place in ("run", compat.orig_run.name):
            if getattr(task, place, None) == own:
                self._put_in.append((task, place, vars(task).get(place)))
                setattr(task, place, made)
        # Celery's tracer has kept the function of a task that is not under the bridge.
        vars(task).pop(compat.tracer.name, None)

    def take_out(self) -> None:
        """Give all tasks back their own functions."""
        while self._put_in:
            task, place, before = self._put_in.pop()
            delattr(task, place)
            if before is not None:
                setattr(task, place, before)


class _Channel(memory.Channel):
    """A channel to queues in memory, which notes the order of the messages."""

    order: deque[str]

    def ojs_put(self, queue: str, message: Any, **options: Any) -> None:
        """Put a message into a queue."""
        compat.put(super())(queue, message, **options)
        self.order.append(queue)

    def ojs_put_fanout(self, exchange: str, message: Any, routing_key: Any = None, **options: Any) -> None:
        """Put a message into all queues of an exchange."""
        for queue in compat.lookup(self)(exchange, routing_key):
            self.ojs_put(queue, message, **options)


def _transport() -> type[virtual.Transport]:
    """Return a transport with queues of its own."""
    members = {
        "queues": {},
        "events": defaultdict(set),
        "order": deque(),
        compat.put.name: _Channel.ojs_put,
        compat.put_fanout.name: _Channel.ojs_put_fanout,
    }
    own = {"Channel": type("Channel", (_Channel,), members), "global_state": virtual.BrokerState()}
    return type("Transport", (memory.Transport,), own)


@contextmanager
def _in_memory(app: Celery, connection: Connection, clock: Clock) -> Iterator[None]:
    """Connect an app to queues in memory. Give it the virtual clock, and keep its results in memory."""
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
    pools = ((compat.app_pool, app), (compat.producer_pool, app.amqp))
    before, brokers = [name(owner) for name, owner in pools], installation(app).__dict__
    found = {role: brokers.pop(role, None) for role in ("broker", "source")}
    for name, owner in pools:
        name.set(owner, None)
    app.__class__ = type(cls.__name__, (cls,), {"__module__": cls.__module__, **attributes})
    app.conf.task_always_eager = False
    try:
        yield
    finally:
        app.conf.task_always_eager = eager
        app.__class__ = cls
        for role, broker in found.items():
            brokers.pop(role, None)
            if broker is not None:
                brokers[role] = broker
        for (name, owner), pool in zip(pools, before, strict=True):
            name.set(owner, pool)
        for group in (producers, connections):
            for key in [key for key in group if connection.transport_cls in key]:
                group.pop(key).force_close_all()
        connection.release()


@contextmanager
def _traced_anew(app: Celery) -> Iterator[None]:
    """Take Celery's tracers away, which know the result backend, and give them back at the end.

    A worker in the process has Celery take it for granted that each task has a tracer.
    """
    trace, fast = compat.tracer, app.use_fast_trace_task
    before = {task: vars(task).pop(trace.name) for task in app.tasks.values() if trace.name in vars(task)}
    app.use_fast_trace_task = False
    try:
        yield
    finally:
        app.use_fast_trace_task = fast
        for task in app.tasks.values():
            vars(task).pop(trace.name, None)
        for task, tracer in before.items():
            trace.set(task, tracer)
