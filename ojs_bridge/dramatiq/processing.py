"""The processing of a delivery: it is begun before its actor runs, and ended when the actor has run."""

from __future__ import annotations

import logging
from typing import Any

from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import SkipMessage
from dramatiq.middleware.middleware import MiddlewareError

from ..bridge import Bridge
from ..engine.reservations import TakenOver
from ..engine.runs import Drop, Lost, Postpone, Refuse, Run, TaskPolicy
from ..errors import StoreError
from ..messages import HEADER
from .acknowledging import Acknowledging, acknowledging_on
from .actors import Actors
from .compat import message_in
from .delivery import HOLD, NATIVE, UNBEGUN, Delivery, Settlement, delivery_of, keep_what_is_delivered, mark
from .execution import Execution, NotSent
from .holding import GiveUp, Holding
from .other_middleware import drop
from .publishing import FRAMEWORK, READ
from .translate import LostAttempt, Refused, bare_job

logger = logging.getLogger("ojs_bridge")


class Processing:
    """Begins and ends the deliveries of one broker."""

    def __init__(self, bridge: Bridge, actors: Actors, holding: Holding) -> None:
        self._bridge = bridge
        self._actors = actors
        self._holding = holding
        self._acknowledging: Acknowledging | None = None

    def boot(self, broker: Broker) -> None:
        """Choose how a job that succeeded is acknowledged on this broker, and keep what is delivered."""
        self._acknowledging = acknowledging_on(broker, self._bridge)
        keep_what_is_delivered()

    def begin(self, broker: Broker, message: Any) -> None:
        """Begin a job: its actor runs, or this raises an exception that keeps the actor from running."""
        # Attributes, not items of `__dict__`: building that costs more, and every job comes by here.
        inside = message_in(message)
        options = inside.options
        delivery = message.ojs_delivery
        if delivery is None:
            delivery = message.ojs_delivery = Delivery()
        task = delivery.task = self._actors.task_of(inside)
        if task is not None:
            # If anything ends this delivery before its job has another place, the job goes back to its queue.
            delivery.settlement = UNBEGUN
            if self._bridge.engine.is_silent and READ.isdisjoint(options) and not self._holding.is_stopping:
                return
        elif HEADER not in options:
            return
        if message.failed:
            return
        try:
            if task is None:
                self._let_wait(broker, message, delivery)
            else:
                self._begin(broker, message, delivery, task)
        except MiddlewareError:
            raise
        except Exception as error:
            # Dramatiq would log the error, and run the actor.
            logger.exception("job %s: kept in the broker's dead queue", bare_job(message))
            raise _kept_dead(message, repr(error)) from None

    def _begin(self, broker: Broker, message: Any, delivery: Delivery, task: TaskPolicy) -> None:
        if self._holding.is_stopping and self._holding.stops():
            raise _given_back(message)
        # Without a store and listeners, nobody hears of a success: a plain job is begun when it has failed.
        if self._bridge.engine.is_silent and READ.isdisjoint(message_in(message).options):
            return
        execution = Execution(self._bridge.engine, broker, message, self._holding)
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
        instruments = self._bridge.engine.instruments
        if instruments:
            delivery.within = instruments.running(FRAMEWORK, begun, message_in(message).options)
            delivery.within.__enter__()

    def _let_wait(self, broker: Broker, message: Any, delivery: Delivery) -> None:
        """Leave a delivery to Dramatiq, but not before the time that the bridge once gave it."""
        execution = Execution(self._bridge.engine, broker, message, self._holding)
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

    def skip(self, message: MessageProxy) -> None:
        """Leave a message to Dramatiq that another middleware skips."""
        delivery = delivery_of(message)
        if delivery.within is not None:
            delivery.within.__exit__(None, None, None)
        if isinstance(delivery.begun, Run):
            self._bridge.engine.release(delivery.begun)
        if delivery.begun is not None:
            delivery.settle(NATIVE)

    def end(self, broker: Broker, message: Any, exception: BaseException | None) -> bool:
        """Have the outcome judged and the decision carried out; False if Dramatiq itself is to retry."""
        delivery: Delivery = message.ojs_delivery or delivery_of(message)
        within, delivery.within = delivery.within, None
        if within is None:
            return self._end(broker, message, delivery, exception)
        try:
            ended = self._end(broker, message, delivery, exception)
        except BaseException as error:
            within.__exit__(type(error), error, error.__traceback__)
            raise
        within.__exit__(None, None, None)
        return ended

    def _end(self, broker: Broker, message: Any, delivery: Delivery, exception: BaseException | None) -> bool:
        if exception is None and delivery.settlement is UNBEGUN:
            delivery.settlement = NATIVE
            delivery.begun = None
            return True
        task = delivery.task
        if task is UNBEGUN:
            # Another middleware raised before the bridge saw the message.
            task = delivery.task = self._actors.task_of(message_in(message))
        if task is None:
            # A delivery that was put aside, or goes back to its queue, comes again by itself.
            return delivery.settlement is not NATIVE
        # Dramatiq calls this a second time when an interrupt breaks into the first.
        begun, delivery.begun = delivery.begun, None
        if begun is not None:
            self._conclude(broker, message, task, begun, exception)
        return True

    def _conclude(
        self, broker: Broker, message: Any, task: TaskPolicy, begun: Any, exception: BaseException | None
    ) -> None:
        try:
            self._holding.disarm(exception)
            execution = Execution(self._bridge.engine, broker, message, self._holding, self._acknowledging)
            if begun is UNBEGUN:
                mark(message, HOLD)
                begun = execution.begin(task, self._actors)
                if isinstance(begun, (Postpone, Drop)):
                    return
            execution.conclude(begun, exception)
        except TakenOver as late:
            drop(message, late)
            if exception is None:
                # Nothing less keeps the job's pipeline and its callbacks from following.
                raise
        except GiveUp:
            mark(message, Settlement.GIVE_BACK)
        except (NotSent, StoreError) as error:
            logger.error("job %s: %s; it goes back to its queue", bare_job(message), error)
            self._let_expire(begun)
        except Exception:
            logger.exception("job %s: kept in the broker's dead queue", bare_job(message))
            message.fail()
            mark(message, Settlement.DEAD)
            self._let_expire(begun)
        except BaseException:
            logger.exception("job %s: interrupted, it goes back to its queue", bare_job(message))
            self._let_expire(begun)

    def check(self, message: Any) -> None:
        """Raise TakenOver for a job that succeeded after its reservation was taken over."""
        delivery = delivery_of(message)
        begun = delivery.begun
        if not isinstance(begun, Run):
            return
        try:
            self._bridge.engine.check(begun)
        except TakenOver as late:
            delivery.begun = None
            self._holding.disarm(None)
            drop(message, late)
            raise

    def _let_expire(self, begun: Any) -> None:
        run = begun.run if isinstance(begun, Lost) else begun
        if isinstance(run, Run):
            self._bridge.engine.expire(run)


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
