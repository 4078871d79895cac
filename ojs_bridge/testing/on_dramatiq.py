"""A Dramatiq broker under virtual time: its queues and its results are in memory, and a test is its worker.

Dramatiq's own code runs the actors, with all middleware of the broker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime, timedelta
from functools import partial
from queue import Empty, PriorityQueue
from typing import Any
from uuid import uuid4

from dramatiq import Actor, Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name, q_name
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import StubBackend as Limits
from dramatiq.results import Results
from dramatiq.results.backends import StubBackend
from dramatiq.worker import ConsumerThread, Worker, WorkerThread

from ..dramatiq import OJSRetries, compat
from ..dramatiq.brokers import KIND
from ..dramatiq.delivery import listening
from ..dramatiq.middleware import bridge_of
from ..dramatiq.publishing import sending_on
from ..dramatiq.translate import NAME, outcome
from ..engine.layers import TaskPolicy
from ..engine.runs import Run
from ..messages import HEADER
from ..rules.failures import Outcome
from ..rules.job import parse_time
from .parts import Agenda, Handler, VirtualEngine, WorkerDied

#: Dramatiq adds up to so much to a delay, because brokers cut off the fraction of a millisecond.
_ADDED = timedelta(milliseconds=2)
#: More messages than a worker has at once.
_MANY = 1_000_000


def current() -> Broker | None:
    """Return the global broker if it has a bridge."""
    # `get_broker` would make a broker if there is none.
    broker: Broker | None = compat.global_broker.find()
    has_bridge = broker is not None and any(isinstance(m, OJSRetries) for m in broker.middleware)
    return broker if has_bridge else None


def settings_of(actor: Any) -> tuple[TaskPolicy, Callable[[BaseException, Run], Outcome]] | None:
    """Return an actor's settings, and the translation of its errors; None for anything but an actor.

    Raises TypeError for an actor that is not under the bridge.
    """
    if not isinstance(actor, Actor):
        return None
    bridged = [m for m in actor.broker.middleware if isinstance(m, OJSRetries)]
    task = bridged[0].actors.tasks.get(actor.actor_name) if bridged else None
    if task is None:
        raise TypeError(f"actor {actor.actor_name} is not under the bridge: Dramatiq itself retries it")
    message = Message[Any](actor.queue_name, actor.actor_name, (), {}, {})
    return task, lambda error, run: outcome(
        message, actor.options, error, task.errors, run.task.layers.retries
    )


class MemoryBroker(StubBroker):
    """The class of a broker under virtual time."""

    ojs_agenda: Agenda
    ojs_engine: VirtualEngine
    ojs_order: deque[str]

    def enqueue(self, message: Message[Any], *, delay: int | None = None) -> Message[Any]:
        """Enqueue a message, or keep it until its time has come."""
        if delay is None:
            # As on Redis: by it the bridge knows a message that is delivered a second time.
            sent = super().enqueue(message.copy(options={compat.REDIS_ID: str(uuid4())}))
            self.ojs_order.append(message.queue_name)
            return sent
        due = self.ojs_agenda.clock() + timedelta(milliseconds=delay)
        eta = int(due.timestamp() * 1000)
        message = message.copy(queue_name=dq_name(message.queue_name), options={"eta": eta})
        self.emit_before("enqueue", message, delay)
        encoded = message.encode()
        self.ojs_agenda.at(_exactly(due, message), lambda: self._come_due(Message.decode(encoded)))
        self.emit_after("enqueue", message, delay)
        return message

    def _come_due(self, message: Message[Any]) -> None:
        """Enqueue a message whose time has come, as Dramatiq's consumer thread does."""
        self.emit_before("delay_message", MessageProxy(message))
        message = message.copy(queue_name=q_name(message.queue_name))
        del message.options["eta"]
        with sending_on():
            self.enqueue(message)

    def emit_after(self, signal: str, *args: Any, **kwargs: Any) -> None:
        """Tell the middleware, unless the worker is dead."""
        if not self.ojs_engine.is_dead:
            super().emit_after(signal, *args, **kwargs)


def _exactly(due: datetime, message: Message[Any]) -> datetime:
    """Return the time for which the bridge has sent a message on, or else when its delay ends."""
    with suppress(KeyError, TypeError, ValueError):
        at = parse_time(message.options[HEADER]["next_retry_at"])
        if due - _ADDED <= at <= due:
            return at
    return due


@contextmanager
def worker_of(broker: Broker, agenda: Agenda) -> Iterator[DramatiqWorker]:
    """Keep all that a broker sends in memory; yield the worker that takes it."""
    with _in_memory(broker, agenda) as queues, _results_in_memory(broker):
        worker = DramatiqWorker(queues)
        broker.emit_before("worker_boot", worker.worker)
        try:
            yield worker
        finally:
            worker.take_out()
            broker.emit_before("worker_shutdown", worker.worker)
            broker.emit_after("worker_shutdown", worker.worker)


class DramatiqWorker:
    """Dramatiq's own worker, whose threads never start: the thread of the test does their work."""

    framework = NAME

    def __init__(self, broker: MemoryBroker) -> None:
        self.worker = Worker(broker, worker_timeout=0, worker_threads=1)
        self._broker = broker
        self._consumers: dict[str, Any] = {}
        self._work: PriorityQueue[Any] = PriorityQueue()
        self._runner: Any = WorkerThread(
            broker=broker, consumers=self._consumers, work_queue=self._work, worker_timeout=0
        )
        self._held: bytes = b""
        self._put_in: list[tuple[Any, Any]] = []

    def deliver(self) -> bool:
        """Deliver the next message that waits; False if none does. Raises WorkerDied."""
        broker = self._broker
        if broker.ojs_agenda.do_next():
            return True
        if not broker.ojs_order:
            return False
        thread = self._consumer(broker.ojs_order.popleft())
        message = next(iter(thread.consumer), None)
        if message is not None:
            self._held = compat.message_in(message).encode()
            thread.handle_message(message)
            self._run()
        return True

    def _run(self) -> None:
        try:
            item = self._work.get_nowait()
        except Empty:
            # Dramatiq knows no such actor, and has put the message away.
            return
        # Dramatiq 2.0 has pairs of a priority and a message there.
        self._runner.process_message(item[1] if isinstance(item, tuple) else item.message)
        if self._broker.ojs_engine.is_dead:
            raise WorkerDied

    def _consumer(self, queue_name: str) -> Any:
        thread = self._consumers.get(queue_name)
        if thread is None:
            thread = self._consumers[queue_name] = _Consumer(
                broker=self._broker,
                queue_name=queue_name,
                prefetch=_MANY,
                work_queue=self._work,
                worker_timeout=0,
            )
            thread.consumer = self._broker.consume(queue_name=queue_name, prefetch=_MANY, timeout=0)
        return thread

    def replace(self) -> None:
        """Let the broker deliver the message of the dead worker again."""
        name = Message.decode(self._held).queue_name
        self._broker.queues[name].put(self._held)
        self._broker.ojs_order.append(name)

    def put_in(self, name: str, make: Callable[[Handler], Handler]) -> None:
        """Put a function in the place of an actor's own, made of it; raises LookupError."""
        if name not in self._broker.actors:
            raise LookupError(f"no actor of this broker has the name {name!r}")
        actor = self._broker.actors[name]
        self._put_in.append((actor, actor.fn))
        actor.fn = listening(name, make(actor.fn))

    def take_out(self) -> None:
        """Give all actors back their own functions."""
        while self._put_in:
            actor, own = self._put_in.pop()
            actor.fn = own


class _Consumer(ConsumerThread):
    """A consumer thread that acknowledges nothing when its worker is dead."""

    def post_process_message(self, message: MessageProxy) -> None:
        """Acknowledge a message, or move it to the dead queue."""
        if not self.broker.ojs_engine.is_dead:  # type: ignore[attr-defined]
            super().post_process_message(message)


@contextmanager
def _in_memory(broker: Any, agenda: Agenda) -> Iterator[MemoryBroker]:
    """Turn a broker into one in memory; it keeps its actors, its middleware and what a user has added."""
    bridge = bridge_of(broker)
    cls, before = type(broker), vars(broker)
    fresh = MemoryBroker(middleware=[])
    own = {name for name in before if name == KIND or callable(getattr(StubBroker, name, None))}
    kept = {name: value for name, value in before.items() if name not in own}
    queues = {"queues": fresh.queues, "delay_queues": fresh.delay_queues}
    ours = {"ojs_agenda": agenda, "ojs_engine": bridge.engine, "ojs_order": deque()}
    declared = [name for name in before["queues"] if name not in before["delay_queues"]]
    _turn(broker, MemoryBroker, {**vars(fresh), **kept, **queues, **ours})
    try:
        for name in declared:
            broker.declare_queue(name)
        yield broker
    finally:
        new = [name for name in broker.queues if name not in broker.delay_queues and name not in declared]
        _turn(broker, cls, before)
        for name in new:
            broker.declare_queue(name)


def _turn(one: Any, cls: type, state: dict[str, Any]) -> None:
    """Give an object a class and a state."""
    try:
        one.__class__ = cls
    except TypeError:
        # The object's own class has another layout, as with ABC or Generic first among its bases. A class on
        # top of it has its layout, and looks for its methods in `cls` alone.
        own = type(one)
        meta = type(cls.__name__, (type(own),), {"mro": lambda made: [made, *cls.__mro__]})
        one.__class__ = meta(cls.__name__, (own,), {"__module__": cls.__module__})
    one.__dict__ = state


@contextmanager
def _results_in_memory(broker: Broker) -> Iterator[None]:
    """Keep results, and the counts of groups, in memory."""
    with ExitStack() as stack:
        for middleware in broker.middleware:
            if isinstance(middleware, (Results, GroupCallbacks)):
                stack.callback(partial(setattr, middleware, "__dict__", vars(middleware)))
                middleware.__dict__ = dict(vars(middleware))
            if isinstance(middleware, Results):
                middleware.backend = StubBackend()
            elif isinstance(middleware, GroupCallbacks):
                compat.rate_limiter_backend.set(middleware, Limits())
        yield
