"""The execution of one delivery: it is begun, and the decision about its job is carried out."""

from __future__ import annotations

import logging
import math
from contextlib import nullcontext
from datetime import datetime
from typing import Any

from dramatiq import Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Interrupt
from dramatiq.middleware.middleware import MiddlewareError

from ..engine.carrying import NotCarried
from ..engine.engine import Engine
from ..engine.ports import Ended, Onward
from ..engine.runs import Begun, Drop, Lost, Postpone, Refuse, Run, TaskPolicy
from ..errors import InvalidRetryPolicy, InvalidState, StoreError, Unroutable, Unstorable
from ..messages import parameters_of
from ..rules.decision import Complete, Decision, GiveBack, RetryAt, SnoozeUntil
from ..rules.job import Job
from ..rules.policy import LARGEST
from .acknowledging import Acknowledging, Ending
from .actors import ONCE, Actors
from .brokers import is_rabbitmq, is_redis, outages, told
from .compat import message_in
from .delivery import Settlement, leave_by, mark, publication, restore_arguments
from .holding import HELD_AT_MOST, GiveUp, Holding, is_old
from .native_options import is_exhausted, say_end, say_retry
from .on_rabbitmq import have_queue, is_refusal
from .on_redis import replacing
from .publishing import FRAMEWORK, carry_wishes, original, sending_on
from .translate import (
    bare_job,
    encodable,
    failed_options,
    job_of,
    max_age,
    names_exceptions,
    next_options,
    outcome,
)

logger = logging.getLogger("ojs_bridge")


class NotSent(Exception):
    """The broker did not take a message; the delivery is still there."""


class Execution:
    """One delivery under the bridge, and its outlet: it translates for the engine, and decides nothing."""

    framework = FRAMEWORK
    can_wait = True
    unreachable = (NotSent, StoreError)

    def __init__(
        self,
        engine: Engine,
        broker: Broker,
        message: MessageProxy,
        holding: Holding,
        acknowledging: Acknowledging | None = None,
    ) -> None:
        self._engine = engine
        self._broker = broker
        self._proxy = message
        self._holding = holding
        self._acknowledging = acknowledging
        #: Whether the thread has waited; then no interrupt is armed any more.
        self.held = False
        #: The options of the message that goes on.
        self._options: dict[str, Any] = {}

    def begin(self, task: TaskPolicy, actors: Actors) -> Begun:
        """Return what becomes of the job, and wait for the store if need be.

        A job that is postponed or dropped was put aside before. Raises GiveUp when the worker shuts down.
        """
        while True:
            try:
                begun = self._ask(task, actors)
            except Interrupt as interrupt:
                # An interrupt is meant for a job, and none has begun.
                self._wait(RuntimeError(f"interrupted: {interrupt!r}"))
                continue
            if not isinstance(begun, (Postpone, Drop)):
                return begun
            put = self.put_aside(begun)
            if put is not None:
                return put

    def _ask(self, task: TaskPolicy, actors: Actors) -> Begun:
        # A proxy takes longer to answer than its message, and every job comes by here.
        message = message_in(self._proxy)
        bare = Job(str(message.message_id), message.actor_name, message.queue_name)
        try:
            bare = bare_job(message, max_age(self._broker, message))
            carry_wishes(message.options)
            if not names_exceptions(message.options.get("throws")):
                logger.warning("job %s: its throws option names no exception classes", bare)
                del message.options["throws"]
            job, publication_ = job_of(message, bare), publication(self._proxy)
            try:
                own = actors.of_message(task, message)
            except InvalidRetryPolicy as error:
                return self._engine.refuse(job if isinstance(job, Job) else bare, error)
            return self._engine.begin(job, bare, own, publication=publication_, wait=self._keeps)
        except GiveUp:
            raise
        except Exception as error:
            if isinstance(error, StoreError) and not isinstance(error, Unstorable):
                # It was held for as long as it may be. Published anew, it may be held again.
                self.held, now = False, self._engine.now()
                return Postpone(bare if isinstance(job, InvalidState) else job.waiting(now), now)
            # Dramatiq would log the error, and run the actor without the bridge.
            logger.exception("job %s: could not be begun", bare)
            return self._engine.unbegun(bare, error)

    def early(self) -> Postpone | None:
        """Return the postponement of a native delivery that comes before the time the bridge gave it."""
        message = message_in(self._proxy)
        job = job_of(message, bare_job(message))
        return None if isinstance(job, InvalidState) else self._engine.early(job)

    def conclude(self, begun: Run | Lost | Refuse, exception: BaseException | None) -> None:
        """Have the outcome judged and the decision carried out; raises TakenOver."""
        run = begun.run if isinstance(begun, Lost) else begun
        self._engine.check(run)
        decision = self._judge(begun, exception)
        if not isinstance(decision, Complete) and not self._goes_on_changed(run, decision):
            restore_arguments(self._proxy)
        if (
            isinstance(decision, Complete)
            and isinstance(run, Run)
            and run.reservation
            and self._acknowledging
        ):
            leave_by(self._proxy, Ending(self._acknowledging, run))
            return
        try:
            self._engine.carry(run, decision, self)
        except NotCarried as left:
            self._carry_later(run, left)

    def _goes_on_changed(self, run: Run | Refuse, decision: Decision) -> bool:
        """Return whether a retry has the arguments as the actor has changed them, as under Dramatiq alone."""
        if not isinstance(decision, (RetryAt, SnoozeUntil)) or not isinstance(run, Run):
            return False
        if not run.layers.is_native:
            return False
        try:
            encodable(self._proxy)
        except Exception as error:  # noqa: BLE001 - the application's own encoder may raise anything
            logger.warning("job %s: its retry has the arguments as they came: %r", run.job, error)
            return False
        return True

    def _carry_later(self, begun: Run | Refuse, left: NotCarried) -> None:
        """Try again to carry a decision out; raises the last error if the worker shuts down."""
        while isinstance(left.error, self.unreachable) and self._holding.keep_unended(left.error):
            try:
                with self._engine.at_once():
                    self._engine.carry(begun, left.decision, self)
            except NotCarried as again:
                left = again
            else:
                self._holding.ends()
                return
        raise left.error

    def put_aside(self, begun: Postpone | Drop) -> Postpone | Drop | Refuse | None:
        """Send an early delivery on to its time, or drop a late copy; return it when that is done.

        Returns the refusal of a job that no message can carry to its time. Returns None after a pause if the
        broker took nothing: the time may have come meanwhile. Raises GiveUp when the worker shuts down.
        """
        if isinstance(begun, Drop):
            mark(self._proxy, Settlement.DROP)
        else:
            try:
                refused = self._engine.postpone(begun, self)
            except Exception as error:
                logger.debug("job %s: could not be sent on", begun.job, exc_info=True)
                self._wait(error)
                return None
            if refused is not None:
                return refused
        # For a skipped message `Results` would store None over the real result.
        self._proxy.options["store_results"] = False
        return begun

    def _keeps(self, error: Exception) -> bool:
        """Wait before the store is asked again; False if this delivery was held for as long as it may be."""
        if is_old(self._proxy):
            return False
        self._wait(error)
        return True

    def _wait(self, error: Exception) -> None:
        self.held = True
        if not self._holding.keep_unbegun(error):
            raise GiveUp from None

    def _judge(self, begun: Run | Lost | Refuse, exception: BaseException | None) -> Decision:
        if isinstance(begun, Refuse):
            return begun.decision
        if isinstance(begun, Lost):
            return self._engine.judge(begun.run, begun.failure)
        if exception is None:
            return self._engine.judge(begun, None)
        options = self._broker.get_actor(self._proxy.actor_name).options
        return self._engine.judge(
            begun, outcome(self._proxy, options, exception, begun.task.errors, begun.layers.retries)
        )

    def prepare(self, onward: Onward) -> bool:
        """Make the options of the message that goes on."""
        self._options = next_options(onward.job, onward.header) | failed_options(onward.failure)
        return True

    def publish(self, onward: Onward) -> None:
        """Publish the message that goes on."""
        self._publish(self._proxy.copy(options=self._options), onward.at)

    def kept(self, onward: Onward | None) -> dict[str, Any]:
        """Return the message as the store keeps it, with the names of its actor's parameters."""
        message = self._proxy if onward is None else self._proxy.copy(options=self._options)
        names = parameters_of(self._broker.get_actor(message.actor_name).fn)
        return {**original(message), "parameters": [*names]}

    def sent(self, onward: Onward) -> None:
        """Have the delivery acknowledged: another message carries the job on."""
        self._proxy.options.update(self._options)
        mark(self._proxy, Settlement.DROP)
        if isinstance(onward.decision, RetryAt):
            say_retry(onward.job.id, onward.decision)

    def complete(self) -> None:
        """Have the delivery acknowledged as Dramatiq does it."""
        mark(self._proxy, Settlement.NATIVE)

    def release(self, decision: GiveBack) -> None:  # noqa: ARG002 - as the engine calls it
        """Have the delivery given back to its queue."""
        mark(self._proxy, Settlement.GIVE_BACK)

    def discard(self, ended: Ended) -> None:
        """Have the delivery acknowledged, its message marked failed."""
        self._finish(ended, Settlement.DROP)

    def dead_letter(self, ended: Ended, *, in_store: bool) -> None:
        """Have the delivery acknowledged, or moved to the broker's own dead queue."""
        if not in_store and isinstance(ended.begun, Run):
            # If the broker delivers it again before it lies there, a settled run would be dropped.
            self._engine.expire(ended.begun)
        self._finish(ended, Settlement.DROP if in_store else Settlement.DEAD)

    def _publish(self, message: Message[Any], at: datetime) -> None:
        """Publish a message that is due at a time; raises NotSent if the broker does not take it."""
        try:
            self._enqueue(message, at)
        except MiddlewareError:
            raise
        except Exception as error:
            if is_refusal(error):
                raise Unroutable(told(error)) from error
            plain = encodable(message)
            if plain is message:
                raise NotSent(f"the broker took no retry: {told(error)}") from error
            self._enqueue(plain, at)

    def _enqueue(self, message: Message[Any], at: datetime) -> None:
        # RabbitMQ takes a message back that a worker holds for too long: a long delay is several short ones.
        most = HELD_AT_MOST if is_rabbitmq(self._broker) else math.inf

        def enqueue() -> None:
            seconds = min((at - self._engine.now()).total_seconds(), most)
            have_queue(self._broker, message.queue_name)
            # One more, because the broker cuts off the fraction of a millisecond.
            delay = math.ceil(seconds * 1000) + 1 if seconds > 0 else None
            with sending_on():
                self._broker.enqueue(message, delay=delay)

        # A crash between two steps would leave two messages of one job, which only a store tells apart.
        swaps = self._engine.store is None and is_redis(self._broker)
        with replacing(self._proxy) if swaps else nullcontext():
            self._engine.context.storage_retry.run(enqueue, retry_on=outages())

    def _finish(self, ended: Ended, settlement: Settlement) -> None:
        """Mark the message failed, so that results, pipelines and other middleware see the end of the job."""
        job, decision = ended.job, ended.decision
        options = next_options(job, self._engine.last_header(job)) | failed_options(decision.failure)
        self._proxy.options.update(options, retries=job.attempt)
        self._proxy.fail()
        mark(self._proxy, settlement)
        say_end(job.id, decision)
        if is_exhausted(decision):
            self._announce_exhaustion(ended.begun)

    def _announce_exhaustion(self, begun: Run | Refuse) -> None:
        message = self._proxy
        actor = self._broker.get_actor(message.actor_name)
        target = message.options.get("on_retry_exhausted") or actor.options.get("on_retry_exhausted")
        if not target or not isinstance(begun, Run):
            return
        if begun.layers.framework is ONCE and begun.layers.limit_is_native:
            return  # A broker without `Retries` announces nothing.
        limit = None if begun.policy.max_attempts >= LARGEST else begun.policy.runs - 1
        counts = {"retries": begun.job.attempt - 1, "max_retries": limit}
        try:
            self._broker.get_actor(target).send(message.asdict(), counts)
        except Exception:
            logger.exception("job %s: on_retry_exhausted %r was not sent", begun.job, target)
