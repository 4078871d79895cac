"""`OJSRetries`: the stock `Retries` replaced, the bridge's decisions executed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import dramatiq
from dramatiq import Actor, Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Middleware, Retries, SkipMessage
from dramatiq.middleware.middleware import MiddlewareError

from ..bridge import Bridge
from ..config.policy_files import PoliciesOrFile
from ..config.settings import InFlight
from ..engine.canary import Percentages
from ..engine.reservations import TakenOver
from ..engine.runs import Drop, Lost, Postpone, Refuse, Run, TaskPolicy
from ..errors import StoreError
from .acknowledging import Acknowledging, acknowledging_on
from .actors import ERRORS_OPTION, NO_RETRIES, RETRY_ON_OPTION, Actors, BootError
from .brokers import say_caveats
from .compat import ConsumerThread, consumer_threads, message_in, missing, settings_of
from .consumer import SettlingConsumer, wrap
from .dead_queues import DramatiqDeadQueues
from .delivery import HOLD, NATIVE, UNBEGUN, Delivery, Settlement, delivery_of, mark
from .execution import Execution, NotSent
from .holding import GiveUp, Holding
from .other_middleware import count_members_once, drop, hear_first
from .publishing import FRAMEWORK, READ, WISHING, DramatiqPublisher, add_headers, carry_wishes
from .translate import HEADER, RETRY_OPTION, LostAttempt, Refused
from .watch import Watch

logger = logging.getLogger("ojs_bridge")


class OJSRetries(Retries):
    """Retries Dramatiq jobs as the Open Job Spec says, in place of the stock `Retries`.

    `policies` maps actor name patterns to partial policies, or is the path of a TOML or JSON file of them;
    actors that no pattern names then keep the native retries. Without it the configured ones count
    (OJS_BRIDGE_POLICIES); without those every actor is under the bridge. `canary` is the percentage of their
    jobs that already are, or maps name patterns to percentages (OJS_BRIDGE_CANARY); a job or an actor with an
    `ojs_retry` always is. `in_flight` is about jobs that were retried natively more often than their policy
    allows: `"counted"`, they end when they fail again, or `"afresh"`, they begin at attempt 1. Raises
    InvalidRetryPolicy for an actor's `ojs_retry` where the actor is declared, and for a message's where it is
    enqueued, and ConfigurationError.
    """

    def __init__(
        self,
        bridge: Bridge | None = None,
        *,
        policies: PoliciesOrFile | None = None,
        canary: Percentages | None = None,
        in_flight: InFlight = "counted",
    ) -> None:
        super().__init__()
        self.bridge = bridge or Bridge()
        self._engine = self.bridge.engine
        self._actors = Actors(self._engine, policies, canary, in_flight)
        self._tasks = self._actors.tasks
        self._canary = self._actors.canary
        self._holding = Holding()
        self._watches: dict[Any, Watch] = {}
        #: Whether a job with nothing to read is begun when it turns out to have failed: nobody is to be told.
        self._is_silent = self._engine.store is None and not self._engine.listened_to
        self._swapped = False
        self._lighten()
        self._acknowledging: Acknowledging | None = None

    def expect_no_retries(self) -> None:
        """Retry what says nothing itself as a broker without `Retries` does: never."""
        self._actors.stock = NO_RETRIES

    @property
    def actor_options(self) -> set[str]:
        """The options that actors may set."""
        return {*super().actor_options, RETRY_OPTION, RETRY_ON_OPTION, ERRORS_OPTION}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Refuse an actor whose `ojs_retry` or `ojs_errors` is invalid, where it is declared."""
        self._take_over(broker)
        self._actors.declare(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Read the options of an actor that was declared before this middleware was added."""
        self._take_over(broker)
        if actor.actor_name not in self._actors:
            self._actors.declare(actor)

    def after_declare_queue(self, broker: Broker, queue_name: str) -> None:
        """Take the place of the stock `Retries` as soon as the broker is known."""
        self._take_over(broker)

    def after_process_boot(self, broker: Broker) -> None:
        """Take the place of the stock `Retries` where no queue was declared yet."""
        self._take_over(broker)

    def before_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Check the set-up and wrap the broker's consumers; raises BootError."""
        self._take_over(broker)
        self._check(broker)
        count_members_once(broker)
        wrap(broker)
        self._holding.boot(broker)
        self._acknowledging = acknowledging_on(broker, self._engine)
        if self.bridge.store:
            hear_first(broker, self, self._check_success)
        say_caveats(broker, self.bridge)
        if self._canary is not None:
            logger.warning("canary: under the bridge are %s; Dramatiq itself retries the rest", self._canary)
        self._engine.try_store("the broker's own dead queues (.XQ), which forget them in time")
        self.bridge.start()

    def after_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Begin to look after the worker's threads."""
        self._watches[worker] = Watch(worker)

    def before_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """Begin no more jobs: what the worker gives back now would come straight back to it."""
        if watch := self._watches.get(worker):
            watch.stop()
        self._holding.stop(worker)
        self._lighten()
        for thread in consumer_threads(worker).values():
            if isinstance(thread.consumer, SettlingConsumer):
                thread.consumer.stop_fetching()

    def after_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """End the bridge's threads, and let the listeners hear the last events.

        Raises SystemExit when the worker's own threads would not live, for a supervisor to see.
        """
        self._holding.stopped(worker)
        self._lighten()
        self.bridge.stop()
        watch = self._watches.pop(worker, None)
        if watch and watch.gave_up:
            raise SystemExit(1)

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Turn `ojs_retry` options into `ojs` headers; raises InvalidRetryPolicy before anything is sent."""
        if WISHING.isdisjoint(message.options):
            return
        if isinstance(threading.current_thread(), ConsumerThread):
            # A delayed message on its way back: refusing it here would end the consumer.
            carry_wishes(message.options)
        else:
            add_headers(message, self._actors.header_of)

    def before_process_message(self, broker: Broker, message: Any) -> None:
        """Begin the job: it runs, waits for its time, or is refused."""
        # Attributes, not items of its __dict__: every job comes by here, and building that costs more.
        inside = message_in(message)
        name, options = inside.actor_name, inside.options
        delivery = message.ojs_delivery
        if delivery is None:
            delivery = message.ojs_delivery = Delivery()
        if self._light.get(name) is not None and (not options or READ.isdisjoint(options)):
            delivery.settlement = UNBEGUN
            return
        task = self._tasks.get(name)
        if task is None:
            return
        # Whatever ends this delivery before something durable follows it gives the job back.
        delivery.settlement = UNBEGUN
        if message.failed:
            return
        try:
            self._begin(broker, message, delivery, task)
        except MiddlewareError:
            raise
        except Exception as error:
            # Dramatiq would log it, and run the actor.
            logger.exception("job %s: kept in the broker's dead queue", message.message_id)
            raise _kept_dead(message, repr(error)) from None

    def _begin(self, broker: Broker, message: Any, delivery: Delivery, task: TaskPolicy) -> None:
        if self._canary is not None and self._actors.task_of(message) is None:
            self._let_wait(broker, message, delivery)
            return
        if self._holding.is_stopping and self._holding.stops():
            raise _given_back(message)
        if self._is_silent and READ.isdisjoint(message_in(message).options):
            return
        execution = Execution(self._engine, broker, message, self._holding)
        delivery.settle(HOLD)
        try:
            begun = execution.begin(task, self._actors)
        except GiveUp:
            raise _given_back(message) from None
        if execution.held:
            self._holding.begins(message)
        if isinstance(begun, (Postpone, Drop)):
            raise SkipMessage(_why(begun))
        delivery.begun = begun
        if isinstance(begun, Refuse):
            raise Refused(begun.decision.reason)
        if isinstance(begun, Lost):
            raise LostAttempt(begun.failure.message)

    def _let_wait(self, broker: Broker, message: Any, delivery: Delivery) -> None:
        """Leave a delivery to the native retries, unless it comes before the time that the bridge gave it."""
        delivery.settlement = NATIVE
        if HEADER not in message_in(message).options:
            return
        execution = Execution(self._engine, broker, message, self._holding)
        while (postponed := execution.early()) is not None:
            delivery.settle(HOLD)
            try:
                put = execution.put_aside(postponed)
                if isinstance(put, Refuse):
                    raise _kept_dead(message, put.decision.reason)
                if put is not None:
                    raise SkipMessage(_why(postponed))
            except GiveUp:
                raise _given_back(message) from None
        if execution.held:
            self._holding.begins(message)
        delivery.settlement = NATIVE

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Leave a message that another middleware skipped to Dramatiq."""
        delivery = delivery_of(message)
        if isinstance(delivery.begun, Run):
            self._engine.release(delivery.begun)
        if delivery.begun is not None:
            delivery.settle(NATIVE)

    def after_process_message(
        self,
        broker: Broker,
        message: Any,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """Have the outcome judged and the decision carried out; whatever happens, the job is somewhere."""
        delivery = message.ojs_delivery or delivery_of(message)
        if exception is None and delivery.settlement is UNBEGUN:
            delivery.settlement = NATIVE
            delivery.begun = None
            return
        name = message_in(message).actor_name
        task = self._actors.task_of(message) if self._canary else self._tasks.get(name)
        if task is None:
            super().after_process_message(broker, message, result=result, exception=exception)
            return
        # Dramatiq emits this a second time when an interrupt breaks into the first.
        begun, delivery.begun = delivery.begun, None
        if begun is not None:
            self._conclude(broker, message, task, begun, exception)

    def _conclude(
        self, broker: Broker, message: Any, task: TaskPolicy, begun: Any, exception: BaseException | None
    ) -> None:
        try:
            self._holding.disarm(exception)
            execution = Execution(self._engine, broker, message, self._holding, self._acknowledging)
            if begun is UNBEGUN:
                mark(message, HOLD)
                begun = execution.begin(task, self._actors)
                if isinstance(begun, (Postpone, Drop)):
                    return
            execution.conclude(begun, exception)
        except TakenOver as late:
            drop(message, late)
            if exception is None:
                # Nothing less keeps its pipeline and its callbacks from following a success.
                raise
        except GiveUp:
            mark(message, Settlement.GIVE_BACK)
        except (NotSent, StoreError) as error:
            logger.error("job %s: %s; it goes back to its queue", message.message_id, error)
            self._let_run_out(begun)
        except Exception:
            logger.exception("job %s: kept in the broker's dead queue", message.message_id)
            message.fail()
            mark(message, Settlement.DEAD)
            self._let_run_out(begun)
        except BaseException:
            logger.exception("job %s: interrupted, it goes back to its queue", message.message_id)
            self._let_run_out(begun)

    def _check_success(self, message: Any) -> None:
        """Raise TakenOver for a job that succeeded after its reservation was taken over."""
        delivery = delivery_of(message)
        begun = delivery.begun
        if not isinstance(begun, Run):
            return
        try:
            self._engine.check(begun)
        except TakenOver as late:
            delivery.begun = None
            self._holding.disarm(None)
            drop(message, late)
            raise

    def _let_run_out(self, begun: Any) -> None:
        run = begun.run if isinstance(begun, Lost) else begun
        if isinstance(run, Run):
            self._engine.expire(run)

    def _lighten(self) -> None:
        """Work out which actors' jobs are begun without a question if there is nothing to read in them."""
        light = self._is_silent and self._canary is None and not self._holding.is_stopping
        self._light: Mapping[str, TaskPolicy | None] = self._tasks if light else {}

    def _take_over(self, broker: Broker) -> None:
        """Take the stock `Retries`' place in the middleware, once; others say `before=Retries`."""
        if self._swapped:
            return
        self._swapped = True
        dead_queues = DramatiqDeadQueues(broker, self._engine, self._actors.tasks)
        self._engine.register(FRAMEWORK, DramatiqPublisher(broker), dead_queues)
        stock = [m for m in broker.middleware if type(m) is Retries]
        if not stock:
            return
        self._actors.stock = settings_of(stock[0])
        for name, value in self._actors.stock.items():
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
        absent = missing(broker)
        if fatal := [str(name) for name in absent if name.keeps_jobs]:
            raise BootError(f"Dramatiq {dramatiq.__version__}: jobs could be lost: {'; '.join(fatal)}")
        for name in absent:
            logger.warning("Dramatiq %s: %s", dramatiq.__version__, name)
        self._actors.check(broker.actors)


def _given_back(message: Any) -> SkipMessage:
    delivery_of(message).settle(Settlement.GIVE_BACK)
    message.options["store_results"] = False
    return SkipMessage("this worker shuts down")


def _kept_dead(message: Any, why: str) -> SkipMessage:
    message.fail()
    delivery_of(message).settle(Settlement.DEAD)
    return SkipMessage(f"the job could not be begun: {why}")


def _why(begun: Postpone | Drop) -> str:
    return begun.reason if isinstance(begun, Drop) else f"not due before {begun.at.isoformat()}"


def _path(middleware: Middleware) -> str:
    return f"{type(middleware).__module__}.{type(middleware).__qualname__}"
