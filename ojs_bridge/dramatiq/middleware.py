"""`OJSRetries`, which takes the place of the stock `Retries`, and what others hear of a success."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from dramatiq import Actor, Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.common import q_name
from dramatiq.middleware import GroupCallbacks, Middleware, Retries

from ..adapters.presence import Presence
from ..adapters.private_names import missing_vital
from ..adapters.terms import InFlight, Percentages, Terms
from ..bridge import Bridge
from ..config.policies import MISNAMED, PoliciesOrFile
from ..engine.events import strikes
from ..engine.reservations import TakenOver
from ..errors import ConfigurationError
from ..messages import DEPENDS_OPTION, HEADER, OUTBOX_OPTION, RETRY_OPTION
from . import compat
from .actors import ERRORS_OPTION, NO_RETRIES, PARK_OPTION, RETRY_ON_OPTION, Actors, BootError
from .brokers import kind_of
from .compat import (
    BARRIER_TTL,
    ConsumerThread,
    barrier_ttl,
    consumer_of_thread,
    consumer_threads,
    rate_limiter_backend,
    settings_of,
)
from .consumer import SettlingConsumer, wrap
from .dead_queues import DramatiqDeadQueues
from .delays import Delays
from .delivery import DELAYED_AS, delivery_of, keep_what_is_delivered, listening
from .keeping import Keeping, Stops
from .publishing import (
    SENT,
    WISHING,
    DramatiqPublisher,
    add_headers,
    carry_wishes,
    goes_on,
    sending_on,
    tell_apart,
)
from .run import Runs
from .translate import NAME
from .watch import Watch, remember

logger = logging.getLogger("ojs_bridge")

#: The signals whose hooks are told of a message, and have no say in what becomes of it.
_BEFORE = {name: f"before_{name}" for name in ("delay_message", "ack", "nack")}
_AFTER = {name: f"after_{name}" for name in ("ack", "nack", "enqueue", "process_message", "skip_message")}


class OJSRetries(Retries):
    """Retries Dramatiq jobs as the Open Job Spec says, in place of the stock `Retries`.

    Raises ConfigurationError. Raises InvalidRetryPolicy for the `ojs_retry` of an actor where the actor is
    declared, and for that of a message where the message is enqueued.

    Args:
        bridge: the bridge of the broker; without it, a `Bridge()` of the settings.
        policies: partial policies by actor name pattern, or the path of a TOML or JSON file of them. An actor
            that no pattern names keeps the native retries. Without `policies`, OJS_BRIDGE_POLICIES counts.
            Without both, every actor is under the bridge.
        canary: the percentage of jobs that are under the bridge, or percentages by actor name pattern.
            Without it, OJS_BRIDGE_CANARY counts. A job or an actor with an `ojs_retry` is always under the
            bridge.
        in_flight: what becomes of a job that was retried natively more often than its policy allows. With
            `"counted"` it ends when it fails again; with `"afresh"` it begins at attempt 1.
        park_delays: that of the bridge, for the actors of this broker; an actor's own is its option
            `ojs_park_delays`. On a StubBroker delays stay in the broker, because its `join` waits for them.
        outbox: that of the bridge, for the actors of this broker; an actor's own is its option `ojs_outbox`.
    """

    def __init__(
        self,
        bridge: Bridge | None = None,
        *,
        policies: PoliciesOrFile | None = None,
        canary: Percentages | None = None,
        in_flight: InFlight = "counted",
        park_delays: bool | None = None,
        outbox: bool | None = None,
    ) -> None:
        super().__init__()
        self.bridge = Bridge() if bridge is None else bridge
        terms = Terms.of("OJSRetries", self.bridge, policies, canary, in_flight, park_delays, outbox)
        #: The actors and their policies, for the plan.
        self.actors = Actors(self.bridge, terms)
        self._terms = terms
        #: What becomes of its users' delays.
        self.delays: Delays | None = None
        self._keeping = Keeping(self.bridge.engine.outage)
        self._runs = Runs(self.bridge, self.actors, self._keeping)
        self._watches: dict[Any, Watch] = {}
        #: The last message of each thread, and those that a thread has left unsettled, for the watch.
        self._latest: dict[int, Any] = {}
        self._left: list[Any] = []
        self._presences: dict[Any, Presence] = {}
        self._swapped = self._is_program = self._has_booted = False
        #: The job that a thread sends, and the context in which instruments hear of it.
        self._sending = threading.local()

    @property
    def actor_options(self) -> set[str]:
        """The options that actors may set, and those that are refused with the name of the right one."""
        ours = RETRY_OPTION, RETRY_ON_OPTION, ERRORS_OPTION, PARK_OPTION, OUTBOX_OPTION, DEPENDS_OPTION
        return {*super().actor_options, *ours, *MISNAMED}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Resolve the policy of an actor; an invalid one is an error where the actor is declared."""
        self.take_over(broker)
        self.actors.declare(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Resolve the policy of an actor that was declared before this middleware was added."""
        self.take_over(broker)
        if actor.actor_name not in self.actors.tasks:
            self.actors.declare(actor)
        if self._has_booted:
            actor.fn = listening(actor.actor_name, actor.fn)

    def after_declare_queue(self, broker: Broker, queue_name: str) -> None:
        """Take the place of the stock `Retries` as soon as the broker is known."""
        self.take_over(broker)

    def after_process_boot(self, broker: Broker) -> None:
        """Remember that this is a process of Dramatiq's program; its worker begins later."""
        self._is_program = True
        self.take_over(broker)

    def before_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Check the set-up, and wrap the broker's consumers; raises BootError."""
        self.take_over(broker)
        self._check(broker)
        for actor in broker.actors.values() if not self._has_booted else ():
            actor.fn = listening(actor.actor_name, actor.fn)
        self._has_booted = True
        count_members_once(broker)
        tell_all(broker, self._runs.check)
        delays = self.delays
        wrap(broker, self.bridge.engine, delays.take_over if delays and delays.may_park else None)
        self._keeping.boot(broker)
        keep_what_is_delivered()
        kind = kind_of(broker)
        for caveat in kind.caveats(self.bridge):
            logger.warning("%s", caveat)
        try:
            self.bridge.engine.try_store(kind.dead_queue, is_program=self._is_program)
        except ConfigurationError as error:
            raise BootError(str(error)) from None
        if self._is_program:
            Stops(self.bridge.engine.reservations).hear()

        def queues() -> set[str]:
            # The worker begins to consume a little later.
            return {*map(q_name, consumer_threads(worker) or broker.get_declared_queues())}

        self.bridge.start(NAME, queues)
        self.bridge.engine.start_threads()
        if presence := kind.present(self.bridge.engine.reservations, queues):
            self._presences[worker] = presence

    def after_worker_thread_boot(self, broker: Broker, thread: Any) -> None:
        """Remember where a thread takes its messages from its queue."""
        remember(thread)

    def after_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Begin to look after the worker's threads."""
        self._watches[worker] = Watch(worker, self._left, self.bridge.engine.reservations.give_back)

    def before_worker_thread_shutdown(self, broker: Broker, thread: Any) -> None:
        """Have all that has ended acknowledged, for as long as the worker waits for its threads."""
        if acks := kind_of(broker).acks:
            acks.flush()

    before_consumer_thread_shutdown = before_worker_thread_shutdown

    def before_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """Begin no more jobs, and fetch none: a job that is given back now would come straight back."""
        if watch := self._watches.get(worker):
            watch.stop()
        self._keeping.stop(worker)
        for thread in consumer_threads(worker).values():
            consumer = consumer_of_thread(thread, None)
            if isinstance(consumer, SettlingConsumer):
                consumer.stop_fetching()

    def after_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """End the bridge's threads, and let the listeners hear the last events.

        Raises SystemExit if the worker ends because its threads died again and again.
        """
        self._keeping.stopped(worker)
        if self._is_program:
            # What has outlasted the worker's own patience ends with this process.
            self.bridge.engine.reservations.give_back()
        presence = self._presences.pop(worker, None)
        # A job that outlasts `Worker.stop(timeout)` goes on, and nobody may give its message back.
        if presence and not any(thread.is_alive() for thread in compat.worker_threads(worker)):
            presence.stop()
        self.bridge.stop()
        watch = self._watches.pop(worker, None)
        if watch and watch.gave_up:
            raise SystemExit(1)

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Turn `ojs_retry` options into `ojs` headers; raises InvalidRetryPolicy before anything is sent."""
        instruments = self.bridge.engine.instruments
        if instruments.all and SENT.isdisjoint(message.options) and not goes_on():
            queue = q_name(message.queue_name)
            sending = instruments.sending(NAME, message.actor_name, queue, message.options)
            sending.__enter__()
            self._sending.within = message.message_id, sending
        if HEADER in message.options and self.bridge.store and not goes_on():
            tell_apart(message)
        if DELAYED_AS in message.options and not isinstance(threading.current_thread(), ConsumerThread):
            del message.options[DELAYED_AS]
        if WISHING.isdisjoint(message.options):
            return
        if isinstance(threading.current_thread(), ConsumerThread):
            # A delayed message comes back to its queue: an error here would end the consumer thread.
            carry_wishes(message.options)
        else:
            add_headers(message, self.actors.header_of)

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Tell instruments that a job was sent."""
        job, sending = getattr(self._sending, "within", (None, None))
        if sending is not None and job == message.message_id:
            del self._sending.within
            sending.__exit__(None, None, None)

    def before_process_message(self, broker: Broker, message: Any) -> None:
        """Begin the job: it runs, waits for its time, or is refused."""
        thread = threading.get_ident()
        before, self._latest[thread] = self._latest.get(thread), message
        if before is not None and not delivery_of(before).is_settled:
            self._left.append(before)
        self._runs.begin(broker, message)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Leave a message to Dramatiq that another middleware skips."""
        self._runs.skip(message)

    def after_process_message(
        self, broker: Broker, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        """Judge the outcome, and carry the decision out."""
        if not self._runs.end(broker, message, exception) and self.actors.stock is not NO_RETRIES:
            with sending_on():
                super().after_process_message(broker, message, result=result, exception=exception)

    def take_over(self, broker: Broker) -> None:
        """Take the place of the stock `Retries` once; other middleware is placed relative to it."""
        if self._swapped:
            return
        self._swapped = True
        kind = kind_of(broker)
        kind.use_dead_queues_as_they_are()
        dead_queues = DramatiqDeadQueues(broker, kind.dead_places, self.bridge, self.actors.tasks)
        self.bridge.engine.register(NAME, DramatiqPublisher(broker, self.bridge), dead_queues)
        self.delays = Delays(broker, self.bridge, self.actors, self._terms)
        self.delays.wrap()
        stock = [m for m in broker.middleware if type(m) is Retries]
        if not stock:
            return
        self.actors.stock = settings_of(stock[0])
        for name, value in self.actors.stock.items():
            setattr(self, name, value)
        # A new list, because the broker may be in the middle of the old one.
        rest = [m for m in broker.middleware if m is not self]
        broker.middleware = [self if m is stock[0] else m for m in rest]
        logger.info(
            "OJSRetries took the place of dramatiq's Retries at position %d", broker.middleware.index(self)
        )

    def _check(self, broker: Broker) -> None:
        others = [m for m in broker.middleware if isinstance(m, Retries) and m is not self]
        if others:
            raise BootError(
                f"two middlewares would retry every job: OJSRetries and {_path(others[0])}; "
                "remove one of them from the broker"
            )
        kinds = {cls.__module__ for cls in type(broker).__mro__}
        if lost := missing_vital(compat.names(), kinds):
            raise BootError("; ".join(map(str, lost)))
        self.actors.check(broker.actors)


def _path(middleware: Middleware) -> str:
    return f"{type(middleware).__module__}.{type(middleware).__qualname__}"


def install(
    broker: Broker,
    bridge: Bridge | None = None,
    *,
    policies: PoliciesOrFile | None = None,
    canary: Percentages | None = None,
    in_flight: InFlight = "counted",
    park_delays: bool | None = None,
    outbox: bool | None = None,
) -> OJSRetries:
    """Put a whole broker, or the actors that `policies` names, under the bridge; return the middleware.

    The arguments are those of OJSRetries. Raises InvalidRetryPolicy and ConfigurationError.
    """
    middleware = OJSRetries(
        bridge,
        policies=policies,
        canary=canary,
        in_flight=in_flight,
        park_delays=park_delays,
        outbox=outbox,
    )
    if not any(isinstance(m, Retries) for m in broker.middleware):
        # Actors without options of their own run once on such a broker, as before.
        middleware.actors.stock = NO_RETRIES
    broker.add_middleware(middleware)
    middleware.take_over(broker)
    return middleware


def bridge_of(broker: Broker) -> Bridge:
    """Return a broker's bridge, ready to replay its dead letters; raises ConfigurationError."""
    for middleware in broker.middleware:
        if isinstance(middleware, OJSRetries):
            middleware.take_over(broker)
            return middleware.bridge
    raise ConfigurationError(
        f"the Dramatiq broker {broker!r} has no bridge: add the middleware OJSRetries to it"
    )


def tell_all(broker: Any, check: Callable[[Any], None]) -> None:
    """Tell all middleware what becomes of a message, whatever one of them raises; check a success before.

    Dramatiq logs an Exception. Anything else would end the thread, and the bridge would hear of no end.
    TakenOver keeps all from hearing of a success: results are mostly added after the retries, and hear first.
    """

    def told(emit: Any, hooks: Mapping[str, str], signal: str, *args: Any, **kwargs: Any) -> Any:
        hook = hooks.get(signal)
        if hook == "after_process_message" and kwargs.get("exception") is None:
            check(args[0])
        if hook is None or is_own:
            return emit(signal, *args, **kwargs)
        for middleware in broker.middleware if hooks is _BEFORE else reversed(broker.middleware):
            try:
                getattr(middleware, hook)(broker, *args, **kwargs)
            except BaseException as error:
                if strikes(error) or isinstance(error, TakenOver):
                    raise
                broker.logger.critical("Unexpected failure in %s of %r.", hook, middleware, exc_info=error)
        return None

    # A broker that tells in its own way goes on with it.
    is_own = type(broker).emit_after is not Broker.emit_after
    if "emit_after" not in vars(broker):
        broker.emit_before = partial(told, broker.emit_before, _BEFORE)
        broker.emit_after = partial(told, broker.emit_after, _AFTER)


def count_members_once(broker: Broker) -> None:
    """Make the broker's GroupCallbacks count each member of a group once; changes each of them once."""
    for middleware in broker.middleware:
        if isinstance(middleware, GroupCallbacks) and "after_process_message" not in vars(middleware):
            middleware.after_process_message = _counting_once(middleware)  # type: ignore[method-assign]


def _counting_once(callbacks: Any) -> Any:
    count = callbacks.after_process_message

    def after_process_message(broker: Broker, message: Any, **ended: Any) -> None:
        group = None if ended.get("exception") is not None else message.options.get("group_completion_uuid")
        if group is None:
            return
        limits, ttl = rate_limiter_backend(callbacks), barrier_ttl(callbacks, BARRIER_TTL)
        key = f"{group}-{message.message_id}"
        # 0 while the member is being counted, 1 afterwards. Only a 1 keeps it from being counted again.
        if limits.add(key, 0, ttl) or limits.incr(key, 0, 0, ttl):
            count(broker, message, **ended)
            limits.incr(key, 1, 1, ttl)

    return after_process_message
