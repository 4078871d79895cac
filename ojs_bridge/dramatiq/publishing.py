"""Messages on their way to the broker: their policies are checked, and kept messages are published."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import Any, TypeAlias

import dramatiq
from dramatiq.broker import Broker, MessageProxy
from dramatiq.common import dq_name

from ..adapters import parameters_of
from ..bridge import Bridge
from ..engine.engine import Engine
from ..engine.runs import Backlog, Override
from ..engine.storage_retry import is_of_process
from ..errors import Unpublishable, Unreachable, Unroutable
from ..messages import HEADER, RETRY_OPTION
from ..rules.job import VERSION, Header, Job
from ..store import Letter, Parked
from .brokers import kind_of
from .compat import REDIS_ID, ConsumerThread
from .translate import encodable, error_in_words, is_refusal, original, restored

logger = logging.getLogger("ojs_bridge")

#: Makes the header of a message with its own partial policy; raises InvalidRetryPolicy.
HeaderOf: TypeAlias = Callable[[dramatiq.Message[Any], Any], dict[str, Any]]

_NESTS = ("pipe_target", "group_completion_callbacks")
#: The options of a message that has a policy of its own, or carries messages that may have one.
WISHING = frozenset((RETRY_OPTION, *_NESTS))
#: The options of a message that was sent before: it goes on, or comes again.
SENT = frozenset((HEADER, "retries"))
#: The options that the bridge has to read before a job runs; a message without them is plain.
READ = frozenset((HEADER, *WISHING, "throws", "max_retries", "min_backoff", "max_backoff"))


class NotSent(Exception):
    """The broker did not take a message; its delivery is still there."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outgoing:
    """A message as it came, or as it goes on with changed `options`, due at a time."""

    message: Any
    broker: Broker
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    due: datetime | None = None

    def kept(self) -> dict[str, Any]:
        """Return the message as the store keeps it, with the names of its actor's parameters.

        The middleware is told of a message that goes on as the broker tells of a delayed message, and may
        change it.
        """
        message = self.message
        if self.due is not None:
            eta = int(self.due.timestamp() * 1000)
            delay = max(eta - int(time.time() * 1000), 1)
            told = message.copy(queue_name=dq_name(message.queue_name), options={"eta": eta})
            # A message without its state is no job that its user sends again.
            state = told.options.pop(HEADER, None)
            self.broker.emit_before("enqueue", told, delay)
            told.options[HEADER] = state
            self.broker.emit_after("enqueue", told, delay)
            options = {name: value for name, value in told.options.items() if name != "eta"}
            message = dataclasses.replace(message, options=options)
        actor = self.broker.actors.get(message.actor_name)
        return {**original(message), "parameters": [*parameters_of(actor.fn)] if actor else []}


@dataclasses.dataclass(frozen=True)
class DramatiqPublisher:
    """Publishes dead letters and parked jobs on their broker; raises the errors of the port."""

    _broker: Broker
    _bridge: Bridge

    @property
    def system(self) -> str:
        """The kind of the broker."""
        return kind_of(self._broker).system

    def knows(self, type_: str) -> bool:
        """Return whether there is such an actor, or no actor at all."""
        return type_ in self._broker.actors or not self._broker.actors

    def backlog(self, queues: Collection[str]) -> Sequence[Backlog] | None:
        """Ask the broker for the backlog of these queues and of those that it has declared; raises any error.

        Only Redis and RabbitMQ can be asked, and only Redis knows the oldest message.
        """
        return kind_of(self._broker).backlog(sorted({*queues, *self._broker.get_declared_queues()}))

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Enqueue the letter's message under its own id, with fresh attempts and a new timestamp."""
        message = restored(letter.message)
        spent = ("retries", "traceback", "requeue_timestamp", "eta", REDIS_ID, RETRY_OPTION)
        options = {**message.options, **(override.meta or {})}
        # First, because the message may fail again before this thread goes on.
        kind_of(self._broker).forget_shown(message.message_id)
        self._enqueue(
            dataclasses.replace(
                message,
                queue_name=override.queue or message.queue_name,
                args=message.args if override.args is None else tuple(override.args),
                kwargs=message.kwargs if override.kwargs is None else dict(override.kwargs),
                options={**{k: v for k, v in options.items() if k not in spent}, HEADER: header.state},
                message_timestamp=int(time.time() * 1000),
            )
        )

    def publish(self, parked: Parked, state: Mapping[str, Any], *, due: datetime | None = None) -> None:
        """Enqueue the message of a parked job, due now or delayed until a time."""
        message = restored(parked.message)
        options = {k: v for k, v in message.options.items() if k not in ("eta", REDIS_ID)}
        self._enqueue(dataclasses.replace(message, options={**options, HEADER: dict(state)}), due)

    def _enqueue(self, message: dramatiq.Message[Any], due: datetime | None = None) -> None:
        try:
            message.encode()
        except Exception as error:
            if is_of_process(error, message.args, message.kwargs, message.options):
                raise
            raise Unpublishable(error_in_words(error)) from error
        kind = kind_of(self._broker)
        kind.confirm()
        self._broker.declare_queue(message.queue_name)
        try:
            kind.have_queue(message.queue_name)
            with sending_on():
                wait = _milliseconds((due - self._bridge.engine.now()).total_seconds()) if due else None
                self._broker.enqueue(message, delay=wait)
        except kind.outages as error:
            raise (Unroutable if is_refusal(error) else Unreachable)(error_in_words(error)) from error


def add_headers(message: dramatiq.Message[Any], header_of: HeaderOf) -> None:
    """Turn the `ojs_retry` of a message, and of the messages that it carries, into headers: all or none."""
    asking = [m for m in (message, *_nested(message.options)) if RETRY_OPTION in m.options]
    wishes = [m.options[RETRY_OPTION] for m in asking]
    headers = [None if wish is None else header_of(m, wish) for m, wish in zip(asking, wishes, strict=True)]
    for each, header in zip(asking, headers, strict=True):
        del each.options[RETRY_OPTION]
        if header is not None:
            each.options[HEADER] = header


def carry_wishes(options: dict[str, Any]) -> None:
    """Turn the `ojs_retry` of a message, and of the messages that it carries, into headers, unchecked.

    The producer did not know the bridge. A message that was sent cannot be refused any more: its policy is
    checked when its job begins.
    """
    for each in (options, *[message.options for message in _nested(options)]):
        wish = each.pop(RETRY_OPTION, None)
        if wish is not None and HEADER not in each:
            each[HEADER] = {"v": VERSION, "attempt": 1, "retry": wish}


def can_carry(message: MessageProxy, job: Job) -> bool:
    """Return whether a message can carry the arguments as its actor has left them; else the log says why."""
    try:
        encodable(message)
    except Exception as error:  # noqa: BLE001 - the application's own encoder may raise anything
        logger.warning("job %s: its retry has the arguments as they came: %r", job, error)
        return False
    return True


def send_on(
    engine: Engine,
    broker: Broker,
    delivered: MessageProxy | None,
    message: dramatiq.Message[Any],
    at: datetime,
) -> None:
    """Enqueue the message that carries a job on, a delivered one perhaps, due at a time.

    Raises the broker's errors.
    """
    kind = kind_of(broker)

    def enqueue() -> None:
        # RabbitMQ takes a message back that a worker holds for too long: a long delay is several short ones.
        # The worker that gets a new job may have no bridge, and would run it after the first.
        seconds = (at - engine.now()).total_seconds()
        if delivered:
            seconds = min(seconds, kind.kept_at_most)
        kind.have_queue(message.queue_name)
        with sending_on():
            broker.enqueue(message, delay=_milliseconds(seconds))

    # A crash between two steps would leave two messages of one job, which only a store tells apart.
    with kind.swapping(delivered) if delivered and engine.store is None else nullcontext():
        engine.context.storage_retry.run(enqueue, retry_on=kind.outages)


def _milliseconds(seconds: float) -> int | None:
    """Return a delay for the broker; one more, because the broker cuts off the fraction of a millisecond."""
    return math.ceil(seconds * 1000) + 1 if seconds > 0 else None


class _Sending(threading.local):
    """Whether the message that this thread enqueues carries a job on, and is no new job."""

    on = False


_sending = _Sending()


@contextmanager
def sending_on() -> Iterator[None]:
    """Let the message that this thread enqueues carry its job on."""
    before, _sending.on = _sending.on, True
    try:
        yield
    finally:
        _sending.on = before


def goes_on() -> bool:
    """Return whether the message that this thread enqueues carries a job on, or moves between queues."""
    return _sending.on or isinstance(threading.current_thread(), ConsumerThread)


def tell_apart(message: dramatiq.Message[Any]) -> None:
    """Make a job of its own of a message that went on before, and that its user sends again."""
    state = message.options[HEADER]
    if not isinstance(state, dict):
        return
    if state.get("attempt") != 1 or not {"fence", "next_retry_at"}.isdisjoint(state):
        message.options[HEADER] = {**state, "chain": uuid.uuid4().hex}


def _nested(options: Mapping[str, Any]) -> Iterator[dramatiq.Message[Any]]:
    """Return the messages that a message carries: the rest of its pipeline, its group's callbacks."""
    target, callbacks = map(options.get, _NESTS)
    for fields in (*([target] if target else []), *(callbacks or [])):
        message = dramatiq.Message[Any](**fields)
        yield message
        yield from _nested(message.options)
