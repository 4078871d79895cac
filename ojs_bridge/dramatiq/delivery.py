"""The delivery: the bridge's notes about a message that a broker has handed to this process, and its end.

A run that succeeded is settled just before its acknowledgement. If it were settled earlier, a worker that is
killed would lose the job's pipeline, callbacks and result.
"""

from __future__ import annotations

import enum
import functools
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from contextvars import copy_context
from typing import Any, NamedTuple, TypeAlias

from dramatiq import Message
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.errors import ConnectionClosed
from dramatiq.errors import Retry as NativeRetry
from dramatiq.logging import get_logger
from dramatiq.middleware import Retries, SkipMessage

from ..engine.engine import Engine
from ..engine.events import MAY_ANSWER, harmless, hear
from ..engine.instruments import Entered
from ..engine.layers import TaskPolicy
from ..engine.reservations import UNTOLD, TakenOver
from ..engine.runs import Lost, Refuse, Run
from ..engine.threads import keep_going, starting
from ..messages import HEADER
from ..rules import responses
from ..rules.decision import Complete, DeadLettered, Discarded, RetryAt
from ..rules.failures import HandlerFailed, can_be_shown
from ..rules.job import Job
from ..rules.policy import LARGEST
from .actors import ONCE
from .compat import REDIS_ID, message_in, redelivered
from .compat import message as inner
from .translate import RETRY_WHEN_SAID_NO, THROWN, next_options

logger = logging.getLogger("ojs_bridge")
#: The logger of the stock `Retries`, so that a search in the logs finds its lines as before.
stock_logger = get_logger(Retries.__module__, Retries)


class Exit(enum.Enum):
    """The way in which a message leaves its consumer."""

    DROP = enum.auto()
    """Acknowledge it: it is not needed any more."""
    DEAD = enum.auto()
    """Keep it, with its final state, in the broker's own dead queue."""
    LATER = enum.auto()
    """Give it back to its queue after a while: something broke in before its end was known."""
    NOT_YET = enum.auto()
    """As LATER: its actor runs, and the bridge has not begun it yet."""
    GIVE_BACK = enum.auto()
    """Give it back to its queue: this worker shuts down."""
    ENDING = enum.auto()
    """Settle its run, and acknowledge it: its job succeeded."""
    NATIVE = enum.auto()
    """Do with it as Dramatiq itself does."""


class Skipped(SkipMessage):
    """Keeps an actor from running: its delivery leaves its queue in this way."""

    def __init__(self, exit_: Exit, why: str) -> None:
        super().__init__(why)
        self.exit = exit_


#: The attribute of a message that holds the bytes that it came as.
_DELIVERED = "ojs_delivered"

#: The option that keeps the publication of a message that was delayed. If its worker dies before the delayed
#: message is acknowledged, it goes to its queue a second time, and is a copy there.
DELAYED_AS = "ojs_delayed_as"

#: Looked up once, because enumerations are slow and every job comes by here.
NATIVE, LATER, NOT_YET, ENDING = Exit.NATIVE, Exit.LATER, Exit.NOT_YET, Exit.ENDING


class Delivery:
    """The notes about one delivery; the attribute `ojs_delivery` of Dramatiq's message leads to them."""

    __slots__ = (
        *("admission", "consumer", "end", "ending", "exit"),
        *("is_given_back", "is_judged", "is_replaced", "is_seen", "is_settled", "received", "task", "within"),
    )

    def __init__(self, consumer: Consumer | None = None, received: float | None = None) -> None:
        self.exit = NATIVE
        #: Whether the bridge has seen it, and the policy of its actor; None if Dramatiq itself retries it.
        self.is_seen = False
        self.task: TaskPolicy | None = None
        #: The engine's answer to it, and what judges its outcome then.
        self.admission: Run | Lost | Refuse | None = None
        self.end: Callable[[TaskPolicy, BaseException | None], Exit] | None = None
        #: Whether there is no outcome to be judged, or none any more.
        self.is_judged = False
        #: The end of a job that succeeded.
        self.ending: Ending | None = None
        #: The context of the run in which instruments are active.
        self.within: Entered | None = None
        #: Whether another message took its place on the broker, so that it need not be acknowledged.
        self.is_replaced = False
        #: Whether it went back to its queue, or was about to go.
        self.is_given_back = False
        #: Whether it has left its consumer, or another thread sees to that.
        self.is_settled = False
        #: On RabbitMQ: the broker's own consumer that received it, and the time, by the monotonic clock.
        self.consumer = consumer
        self.received = received

    def settle(self, exit_: Exit) -> None:
        """Say how it leaves, and that its run has no outcome to be judged."""
        # What judges it knows the message, and they would keep each other in memory.
        self.exit, self.is_judged, self.end = exit_, True, None


def keep_what_is_delivered() -> None:
    """Let each message that a worker decodes keep the bytes that it came as.

    An actor may change its arguments in place. To copy them before each run costs more than the run.
    """
    if hasattr(Message.decode, "ojs_keeps"):
        return
    # As the class has it: instrumentation may have wrapped it.
    decode = vars(Message)["decode"]

    def keeping(kind: type[Message[Any]], data: bytes) -> Message[Any]:
        message: Message[Any] = decode.__get__(None, kind)(data)
        # A delayed message is published anew before it runs, and many of them wait in a worker. The options
        # of a foreign message may be anything.
        if not (isinstance(message.options, dict) and "eta" in message.options):
            vars(message)[_DELIVERED] = data
        return message

    keeping.ojs_keeps = True  # type: ignore[attr-defined]
    Message.decode = classmethod(keeping)  # type: ignore[method-assign, assignment]


def restore_arguments(message: MessageProxy) -> None:
    """Give a message the arguments back with which it was delivered."""
    inside = message_in(message)
    if (data := vars(inside).get(_DELIVERED)) is not None:
        sent = Message.decode(data)
        restored = inside.copy(args=sent.args, kwargs=sent.kwargs)
        vars(restored)[_DELIVERED] = data
        setattr(message, inner.name, restored)


class _Entering(threading.local):
    """The actor that the worker is about to call in this thread for a job under the bridge."""

    actor: str | None = None


entering = _Entering()


@functools.cache
def _as_retry(snooze: type) -> type:
    """Return a class of Snooze as Dramatiq hears of it: all but its `Retry` are failures in its log."""
    names = {"__module__": snooze.__module__, "delay": getattr(snooze, "delay", None)}
    return type(snooze.__name__, (snooze, NativeRetry), names)


def listening(actor: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function of an actor, whose errors a worker can handle; a direct call is as ever.

    It raises a response that the actor has returned. Dramatiq asks an error for its class, its text and more
    before it tells its middleware. A thread in which that raises would die, and its job with it.
    """

    @functools.wraps(run)
    def heard(*args: Any, **kwargs: Any) -> Any:
        called, entering.actor = entering.actor, None
        try:
            result = run(*args, **kwargs)
            if result is not None and called == actor and issubclass(type(result), MAY_ANSWER):
                hear(result, f"actor {actor}")
            return result
        except BaseException as error:
            if called == actor and issubclass(type(error), responses.Snooze):
                # The user's class may allow no class below it.
                with suppress(Exception):
                    BaseException.__setattr__(error, "__class__", _as_retry(type(error)))  # type: ignore[arg-type]
            if called != actor or can_be_shown(error):
                raise
            failed = HandlerFailed.of(error)
        # The error is in no context of what stands for it.
        raise failed

    return heard


#: Every message is asked for it: a default is quicker than an attribute that may be missing.
MessageProxy.ojs_delivery = None  # type: ignore[attr-defined]


def delivery_of(message: Any) -> Delivery:
    """Return the notes about a message; they begin here if there are none."""
    delivery: Delivery | None = message.ojs_delivery
    if delivery is None:
        delivery = message.ojs_delivery = Delivery()
    return delivery


def drop(message: Any, late: TakenOver) -> Exit:
    """Store no outcome of a run that was taken over; its delivery goes back.

    The worker that took the run over may have died since. If the broker still has the delivery as this
    worker's, the message comes again, and the bridge sees what is left to do.
    """
    logger.warning("job %s: %s", late.job, late)
    # Dramatiq logs an exception as an error unless the `throws` option has it.
    message.options.update(throws=TakenOver, store_results=False)
    return Exit.GIVE_BACK


def is_dropped(message: MessageProxy) -> bool:
    """Return whether a message left its broker for good, though StubBroker still shows it to unit tests."""
    return delivery_of(message).exit is Exit.DROP


def publication(message: MessageProxy) -> str:
    """Return an id that tells a job's messages apart at its first run; "" where RabbitMQ cannot tell.

    A broker of another kind tells nothing.
    """
    options = message_in(message).options
    if redis_id := options.get(REDIS_ID):
        return str(options.get(DELAYED_AS, redis_id))
    told = getattr(message, redelivered.name, None)
    return "" if told and told != UNTOLD else str(options.get(DELAYED_AS, told or uuid.uuid4()))


class Ending:
    """The end of the message of a job that succeeded. Its run is settled once, even if a step is repeated."""

    __slots__ = ("_context", "_engine", "_is_settled", "_run")

    def __init__(self, engine: Engine, run: Run) -> None:
        self._engine, self._run = engine, run
        #: Where instruments find the run: another thread may settle it.
        self._context = copy_context()
        self._is_settled = False

    @classmethod
    def settle_all(cls, endings: Sequence[Ending]) -> None:
        """Settle the runs of one engine, all in one step where the store can.

        It never raises; an interrupt that breaks in leaves them to be settled again.
        """
        unsettled = [ending for ending in endings if not ending._is_settled]
        engine = unsettled[0]._engine if len(unsettled) > 1 else None
        if engine and engine.reservations.settles_together and not engine.instruments.all:
            engine.settling.settle_successes([ending._run for ending in unsettled])
        else:
            for ending in unsettled:
                ending._context.run(ending._engine.settling.settle, ending._run, Complete())
        for ending in unsettled:
            # An error may have kept it from being settled. Nothing else ends it.
            ending._engine.reservations.expire(ending._run)
            ending._is_settled = True

    def hand_over(self) -> None:
        """Let any thread settle the run."""
        self._engine.reservations.hand_over(self._run)

    def acknowledged(self) -> None:
        """Let the store forget the reservation: the run's only message is gone from its broker."""
        self._engine.reservations.acknowledged(self._run.reservation)


class Ended(NamedTuple):
    """A message whose job has ended, and the SettlingConsumer that it leaves."""

    message: MessageProxy
    consumer: Any


#: Messages that have ended, by the identities of their objects.
Lot: TypeAlias = "dict[int, Ended]"


#: How long a thread waits for more messages that end, in seconds: a step for one costs as much as for many.
GATHER_SECONDS = 0.004


class Line:
    """The messages that wait for a step, which a thread takes for all of them together, round after round.

    The step returns those that need it no more; it is taken again for the others. A fork has a thread of its
    own: what waits there is its parent's, which ends it.
    """

    def __init__(self, name: str, step: Callable[[Lot], Lot]) -> None:
        self._name, self._step = name, step
        self._waiting, self._came = dict[int, Ended](), threading.Event()
        #: The process that has the thread, and for how many messages that waits a little when there was none.
        self._pid = self.enough = 0

    def __len__(self) -> int:
        return len(self._waiting) if self._pid == os.getpid() else 0

    def put(self, lot: Lot) -> None:
        """Let messages wait; raises ConnectionClosed where no thread can start."""
        if self._pid != os.getpid():
            self._start()
        self._waiting.update(lot)
        self._came.set()

    def _start(self) -> None:
        with starting.lock:
            if self._pid != os.getpid():
                self._waiting, self._came = {}, threading.Event()
                try:
                    keep_going(self._name, self._round)
                except RuntimeError as error:
                    raise ConnectionClosed(error) from None
                self._pid = os.getpid()

    def _round(self) -> bool:
        if not self._waiting:
            self._came.wait()
            self._came.clear()
            until = time.monotonic() + GATHER_SECONDS
            while len(self._waiting) < self.enough and time.monotonic() < until:
                time.sleep(0.001)
        elif done := self._step(dict(self._waiting)):
            for key in done:
                del self._waiting[key]
        return True


class Acknowledgements:
    """Settles runs that succeeded, many together, and then acknowledges their messages.

    The threads that run jobs do not wait for it.
    """

    #: The ways in which the messages leave.
    exits: tuple[Exit, ...] = (ENDING,)

    def __init__(self) -> None:
        self.lines = [Line("ojs-ending", self._settle)]

    def pending(self) -> int:
        """Return how many messages have ended, and are not acknowledged yet."""
        return sum(map(len, self.lines))

    def flush(self) -> None:
        """Wait until all of them are acknowledged, unless their broker is away."""
        while self.pending() and not self.is_away():
            time.sleep(0.005)

    def is_away(self) -> bool:
        """Return whether the broker is away, and has been for some time: it delivers the messages again."""
        return False

    def send(self, ended: Ended) -> None:
        """Have a message acknowledged soon, and its run settled before; raises ConnectionClosed."""
        if ending := delivery_of(ended.message).ending:
            ending.hand_over()
        self.lines[0 if ending else -1].put({id(ended.message): ended})

    def _settle(self, lot: Lot) -> Lot:
        Ending.settle_all([end for each in lot.values() if (end := delivery_of(each.message).ending)])
        self._acknowledge(lot)
        return lot

    def _acknowledge(self, lot: Lot) -> None:
        for ended in lot.values():
            ended.consumer.acknowledge(ended.message)


def mark_failed(engine: Engine, message: MessageProxy, job: Job, decision: Discarded | DeadLettered) -> None:
    """Mark a message failed, so that results, pipelines and other middleware see the end of its job."""
    options = next_options(job, engine.storing.last_header(job), decision.failure)
    options["retries"] = job.attempt
    if decision.failure.final == THROWN:
        # Under Dramatiq alone a failure that `throws` rules out leaves the message as it came.
        options = {name: value for name, value in options.items() if name == HEADER}
    message.options.update(options)
    message.fail()


def tell_retry(job: Job, decision: RetryAt) -> None:
    """Log that a job is retried, as the stock `Retries` does."""
    told = "Retrying message %r in %d milliseconds."
    harmless(job, stock_logger.info, told, job.id, decision.delay * 1000)


def tell_end(
    broker: Broker, message: MessageProxy, run: Run | Refuse, decision: Discarded | DeadLettered
) -> None:
    """Log the end of a failed job, and send its `on_retry_exhausted`, as the stock `Retries` does."""
    is_exhausted = decision.cause == "exhausted" or decision.failure.final == RETRY_WHEN_SAID_NO
    if decision.failure.final == THROWN:
        harmless(run.job, stock_logger.info, "Aborting message %r.", run.job.id)
    elif is_exhausted:
        harmless(run.job, stock_logger.warning, "Retries exceeded for message %r.", run.job.id)
    if not is_exhausted or not isinstance(run, Run):
        return
    options = broker.get_actor(message.actor_name).options
    target = message.options.get("on_retry_exhausted") or options.get("on_retry_exhausted")
    if not target or (run.task.layers.framework is ONCE and run.task.layers.limit_is_native):
        return  # A broker without `Retries` announces nothing.
    limit: Any = None if run.policy.max_attempts >= LARGEST else run.policy.runs - 1
    if run.task.layers.limit_is_native:
        # As it was written: `retry_when` may have taken its place.
        retries = next(m for m in broker.middleware if isinstance(m, Retries))
        limit = message.options.get("max_retries", options.get("max_retries", retries.max_retries))
    counts = {"retries": run.job.attempt - 1, "max_retries": limit}
    try:
        broker.get_actor(target).send(message.asdict(), counts)
    except Exception:
        logger.exception("job %s: on_retry_exhausted %r was not sent", run.job, target)
