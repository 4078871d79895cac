"""The life of a delivery of a Dramatiq message: it begins, runs, is judged, and its decision is carried out.

An exception keeps an actor from running, and a mark tells the consumer how a delivery leaves its queue.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack, nullcontext
from datetime import datetime
from functools import partial
from typing import Any

from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Interrupt
from dramatiq.middleware.middleware import MiddlewareError
from typing_extensions import assert_never

from ..bridge import Bridge
from ..engine.carrying import NotCarried, may_pass
from ..engine.layers import TaskPolicy
from ..engine.reservations import TakenOver
from ..engine.runs import Admission, Drop, Held, Lost, Onward, Postpone, Refuse, Run, Settlement
from ..engine.storage_retry import at_once
from ..errors import InvalidRetryPolicy, InvalidState, StoreError, Unroutable
from ..messages import HEADER
from ..rules.decision import Complete, DeadLettered, Decision, Discarded, GiveBack, RetryAt, SnoozeUntil
from ..rules.failures import HandlerFailed
from ..rules.job import Job
from .actors import Actors, without_bad_throws
from .compat import message_in
from .delivery import (
    ENDING,
    LATER,
    NATIVE,
    NOT_YET,
    Delivery,
    Ending,
    Exit,
    Skipped,
    delivery_of,
    drop,
    entering,
    mark_failed,
    publication,
    restore_arguments,
    tell_end,
    tell_retry,
)
from .keeping import GiveUp, Keeping, is_old
from .publishing import READ, WISHING, NotSent, Outgoing, can_carry, carry_wishes, send_on
from .translate import (
    NAME,
    LostAttempt,
    Refused,
    argument_in,
    bare_job,
    encodable,
    error_in_words,
    is_refusal,
    job_of,
    max_age,
    next_options,
    outcome,
    parts_of,
)

logger = logging.getLogger("ojs_bridge")


class Runs:
    """The runs of one broker's deliveries, as its middleware hears of them."""

    def __init__(self, bridge: Bridge, actors: Actors, keeping: Keeping) -> None:
        self.bridge = bridge
        self.actors = actors
        self.keeping = keeping

    def begin(self, broker: Broker, message: Any) -> None:
        """Begin a job: its actor runs, or this raises an exception that keeps the actor from running."""
        inside = message_in(message)
        delivery = delivery_of(message)
        task = delivery.task = self.actors.task_of(inside)
        delivery.is_seen = True
        if task is not None:
            # If anything ends this delivery before its job has another place, the job goes back to its queue.
            delivery.exit = NOT_YET
            entering.actor = inside.actor_name
            # Without a store and listeners, nobody hears of a success: a plain job begins when it has failed.
            is_plain = self.bridge.engine.is_silent and READ.isdisjoint(inside.options)
            if is_plain and not (self.keeping.is_stopping and self.keeping.stops()):
                return
        elif HEADER not in inside.options:
            return
        if message.failed:
            return
        run = ActorRun(self, broker, message, delivery)
        try:
            admission = run.enter(task)
        except Skipped as skipped:
            if skipped.exit is Exit.DEAD:
                message.fail()
            else:
                # For a skipped message `Results` would store None over the real result.
                message.options["store_results"] = False
            delivery.settle(skipped.exit)
            raise
        if admission is None:
            delivery.exit = NATIVE
            return
        if isinstance(admission, Refuse):
            raise Refused(admission.decision.reason)
        if isinstance(admission, Lost):
            raise LostAttempt(admission.failure.message)

    def skip(self, message: MessageProxy) -> None:
        """Leave a message to Dramatiq that another middleware skips."""
        delivery = delivery_of(message)
        if delivery.within is not None:
            delivery.within.__exit__(None, None, None)
        if not delivery.is_judged:
            if isinstance(delivery.admission, Run):
                self.bridge.engine.settling.release(delivery.admission)
            delivery.settle(NATIVE)

    def end(self, broker: Broker, message: Any, exception: BaseException | None) -> bool:
        """Judge the outcome and carry the decision out; False if Dramatiq itself is to retry."""
        delivery = delivery_of(message)
        if delivery.within is not None:
            with ExitStack() as leaving:
                leaving.push(delivery.within)
                delivery.within = None
                return self.end(broker, message, exception)
        if exception is None and delivery.exit is NOT_YET:
            # A success of which nobody needs to hear: most jobs come by here.
            delivery.exit, delivery.is_judged = NATIVE, True
            return True
        if not delivery.is_seen:
            # Another middleware has raised before.
            delivery.task, delivery.is_seen = self.actors.task_of(message_in(message)), True
        task = delivery.task
        if task is None:
            # A delivery that was put aside, or goes back to its queue, comes again by itself.
            return delivery.exit is not NATIVE
        # Dramatiq calls this a second time when an interrupt breaks into the first.
        if not delivery.is_judged:
            end = delivery.end or ActorRun(self, broker, message, delivery).end
            delivery.settle(LATER)
            try:
                delivery.exit = end(task, exception)
            except TakenOver as late:
                delivery.exit = drop(message, late)
                if exception is None:
                    # Nothing less keeps the job's pipeline and its callbacks from following.
                    raise
        return True

    def check(self, message: Any) -> None:
        """Raise TakenOver for a job that succeeded after its reservation was taken over."""
        if (delivery := delivery_of(message)).is_judged or not isinstance(run := delivery.admission, Run):
            return
        try:
            try:
                self.bridge.engine.settling.check(run)
            except StoreError as error:
                self.keeping.await_answer(self.bridge.engine, run, error)
        except TakenOver as late:
            self.keeping.disarm(None)
            delivery.settle(drop(message, late))
            raise


class ActorRun:
    """One delivery under the bridge, and its outlet; the engine decides, the run carries out."""

    framework, can_wait, at_once = NAME, True, False
    parts = property(lambda self: parts_of(self._proxy))
    unreachable = (NotSent, StoreError)

    def __init__(self, runs: Runs, broker: Broker, message: MessageProxy, delivery: Delivery) -> None:
        self._runs = runs
        self._engine = runs.bridge.engine
        self._keeping = runs.keeping
        self._broker = broker
        self._proxy = message
        self._delivery = delivery
        #: Whether the thread has waited; then no interrupt is armed any more.
        self._waited = False

    def enter(self, task: TaskPolicy | None) -> Run | Lost | Refuse | None:
        """Begin a job; one that Dramatiq itself runs only waits for its time.

        Raises Skipped if the actor is not to run.
        """
        try:
            self._delivery.settle(LATER)
            if task is not None:
                return self._begin(task)
            self._let_wait()
        except MiddlewareError:
            raise
        except GiveUp:
            raise Skipped(Exit.GIVE_BACK, "this worker shuts down") from None
        except Exception as error:
            # Dramatiq would log the error, and run the actor.
            logger.exception("job %s: cannot begin here", bare_job(self._proxy))
            leaves = LATER if may_pass(self, error) else Exit.DEAD
            raise Skipped(leaves, f"the job could not be begun: {error!r}") from None
        return None

    def _begin(self, task: TaskPolicy) -> Run | Lost | Refuse:
        if self._keeping.is_stopping and self._keeping.stops():
            raise GiveUp
        admission = self._admission(task)
        if self._waited:
            self._keeping.begins(self._broker, self._proxy)
        delivery = self._delivery
        # An interrupt that strikes from here on is the job's.
        delivery.is_judged, delivery.end = False, self.end
        if self._engine.instruments.all and isinstance(admission, Run):
            options = message_in(self._proxy).options
            delivery.within = self._engine.instruments.running(NAME, admission, options)
            delivery.within.__enter__()
        return admission

    def _admission(self, task: TaskPolicy) -> Run | Lost | Refuse:
        while True:
            try:
                admission = self._ask(task)
            except Interrupt as interrupt:
                # An interrupt is meant for a job, and none has begun.
                self._wait(RuntimeError(f"interrupted: {interrupt!r}"))
                continue
            if isinstance(admission, (Postpone, Drop, Held)):
                admission = self._put_aside(admission)
            if admission is not None:
                self._delivery.admission = admission
                return admission

    def _ask(self, task: TaskPolicy) -> Admission | None:
        """Return the engine's answer; None after a pause, since the process lacked something."""
        # A proxy takes longer to answer than its message, and every job comes by here.
        message = message_in(self._proxy)
        bare = Job(str(message.message_id), message.actor_name, message.queue_name)
        job: Job | InvalidState = bare
        try:
            bare = bare_job(message, max_age(self._broker, message))
            if not WISHING.isdisjoint(message.options):
                carry_wishes(message.options)
            without_bad_throws(message, bare)
            job, publication_ = job_of(message, bare), publication(self._proxy)
            try:
                own = self._runs.actors.of_message(task, message)
            except InvalidRetryPolicy as error:
                return self._engine.refuse(job if isinstance(job, Job) else bare, error)
            argument = partial(argument_in, self._broker, message)
            begin = partial(self._engine.begin, job, bare, own, wait=self._keeps, argument=argument)
            return begin(publication=publication_, redelivered=not publication_)
        except GiveUp:
            raise
        except Exception as error:
            if may_pass(self, error):
                if not isinstance(error, StoreError) and self._keeps(error):
                    return None
                # It was held for as long as it may be. Published anew, it may be held again.
                self._waited, now = False, self._engine.now()
                return Postpone(bare if isinstance(job, InvalidState) else job.waiting(now), now)
            logger.exception("job %s: could not be begun", bare)
            return self._engine.refuse(bare, error)

    def _let_wait(self) -> None:
        """Leave a delivery to Dramatiq, but not before the time that the bridge once gave it."""
        message = message_in(self._proxy)
        while True:
            job = job_of(message, bare_job(message))
            early = None if isinstance(job, InvalidState) else self._engine.early(job)
            if early is None:
                break
            if refused := self._put_aside(early):
                raise Skipped(Exit.DEAD, f"the job could not be begun: {refused.decision.reason}")
        if self._waited:
            self._keeping.begins(self._broker, self._proxy)

    def _put_aside(self, admission: Postpone | Drop | Held) -> Refuse | None:
        """Send an early job on, let a held one wait, or drop a late copy; raises Skipped when that is done.

        Returns the refusal of a job that no message can carry; None after a pause if it has found no place.
        """
        leaves = Exit.DROP
        try:
            if isinstance(admission, Held):
                self._keeping.disarm(None)
                leaves = self._carried(admission.run, admission.decision)
            elif isinstance(admission, Postpone):
                if isinstance(sent := self._engine.carrying.postpone(admission, self), Refuse):
                    return sent
                self._proxy.options.update(sent.options)
        except Exception as error:  # noqa: BLE001 - the job waits in the worker
            if isinstance(admission, Held):
                self._engine.settling.release(admission.run)
            self._wait(error)
            return None
        self._delivery.settle(leaves)  # nothing that breaks in may bring it back
        if self._waited:
            self._keeping.outage.over()
        self._proxy.options["store_results"] = False
        raise Skipped(leaves, admission.reason)

    def _keeps(self, error: Exception) -> bool:
        """Wait before the store is asked again; False if this delivery was held for as long as it may be."""
        if is_old(self._proxy):
            return False
        self._wait(error)
        return True

    def _wait(self, error: Exception) -> None:
        self._waited = True
        if not self._keeping.wait_to_begin(error):
            raise GiveUp from None

    def end(self, task: TaskPolicy, exception: BaseException | None) -> Exit:
        """Judge an outcome and carry the decision out; raises TakenOver.

        A delivery whose decision finds no place goes back to its queue.
        """
        try:
            self._keeping.disarm(exception)
            return self._conclude(self._delivery.admission or self._admission(task), exception)
        except TakenOver:
            raise
        except Skipped as skipped:
            return skipped.exit
        except GiveUp:
            return Exit.GIVE_BACK
        except BaseException as error:
            if self._delivery.exit is not LATER or not isinstance(error, Exception):
                logger.exception("job %s: interrupted as it ended", bare_job(self._proxy))
                return self._delivery.exit
            if may_pass(self, error):
                logger.error("job %s goes back to its queue: %r", bare_job(self._proxy), error)
                return LATER
            logger.exception("job %s: kept in the broker's dead queue", bare_job(self._proxy))
            self._proxy.fail()
            return Exit.DEAD

    def _conclude(self, admission: Run | Lost | Refuse, exception: BaseException | None) -> Exit:
        """Judge an outcome and carry the decision out."""
        run = admission.run if isinstance(admission, Lost) else admission
        try:
            self._engine.settling.check(run)
        except StoreError as error:
            self._keeping.await_answer(self._engine, run, error)
        decision = self._judge(admission, exception)
        succeeded = isinstance(decision, Complete)
        if succeeded and isinstance(run, Run) and run.reservation:
            # It is settled before its acknowledgement, when all other middleware has heard of it.
            self._delivery.ending = Ending(self._engine, run)
            return ENDING
        is_native = isinstance(run, Run) and run.task.layers.is_native
        goes_on = is_native and isinstance(decision, (RetryAt, SnoozeUntil))
        # Under Dramatiq alone a retry has the arguments as the actor has changed them.
        if not (succeeded or (goes_on and can_carry(self._proxy, run.job))):
            restore_arguments(self._proxy)
        return self._carried(run, decision)

    def _carried(self, run: Run | Refuse, decision: Decision) -> Exit:
        """Carry a decision out; try again as long as it finds no place, and keep the run reserved."""
        left: NotCarried | None = None
        while left is None or (may_pass(self, left.error) and self._keeping.wait_to_end(left.error)):
            try:
                with at_once() if left else nullcontext():
                    leaves = self._settle(self._engine.carrying.carry(run, decision, self))
                if left:
                    self._keeping.outage.over()
                return leaves
            except NotCarried as error:
                left, decision = error, error.decision
        raise left.error

    def _judge(self, admission: Run | Lost | Refuse, exception: BaseException | None) -> Decision:
        match admission:
            case Refuse():
                return admission.decision
            case Lost():
                return self._engine.judge(admission.run, admission.failure)
            case Run() if exception is None:
                return self._engine.judge(admission, None)
            case Run():
                task, options = admission.task, self._broker.get_actor(self._proxy.actor_name).options
                if type(exception) is HandlerFailed and exception.itself is not None:
                    exception = exception.itself
                came_to = outcome(self._proxy, options, exception, task.errors, task.layers.retries)
                return self._engine.judge(admission, came_to)

    def message(self, onward: Onward | None) -> Outgoing:
        """Return the message as it came, or as it goes on."""
        if onward is None:
            return Outgoing(self._proxy, self._broker)
        failure = onward.decision.failure if isinstance(onward.decision, RetryAt) else None
        options = next_options(onward.job, onward.header, failure)
        return Outgoing(self._proxy.copy(options=options), self._broker, options, onward.at)

    def publish(self, outgoing: Outgoing, at: datetime) -> None:
        """Publish a message that is due at a time; raises NotSent if the broker does not take it."""
        try:
            send_on(self._engine, self._broker, self._proxy, outgoing.message, at)
        except MiddlewareError:
            raise
        except Exception as error:
            if is_refusal(error):
                raise Unroutable(error_in_words(error)) from error
            plain = encodable(outgoing.message)
            if plain is outgoing.message:
                raise NotSent(f"the broker took no retry: {error_in_words(error)}") from error
            send_on(self._engine, self._broker, self._proxy, plain, at)

    def bury(self, _: Job) -> bool:
        """Leave a dead letter to the consumer, which puts it into the dead queue as the delivery ends."""
        return False

    def _settle(self, settlement: Settlement[Outgoing]) -> Exit:
        """Settle a run, and return how its delivery leaves; the log says what `Retries` would say."""
        run, job, decision = settlement.run, settlement.job, settlement.decision
        match decision:
            case Complete():
                leaves = NATIVE
            case GiveBack():
                leaves = Exit.GIVE_BACK
            case DeadLettered() if not settlement.in_place:
                leaves = Exit.DEAD
            case RetryAt() | SnoozeUntil() | Discarded() | DeadLettered():
                leaves = Exit.DROP
            case _:
                assert_never(decision)
        if leaves is not Exit.DEAD:
            # The decision is carried out: from now on nothing that breaks in may bring the message back.
            self._delivery.exit = leaves
        elif isinstance(run, Run):
            # If it comes again before it lies there, a settled run would be dropped.
            self._engine.reservations.expire(run)
        if isinstance(decision, (Discarded, DeadLettered)):
            mark_failed(self._engine, self._proxy, job, decision)
            self._delivery.exit = leaves
            tell_end(self._broker, self._proxy, run, decision)
        elif settlement.message is not None:
            self._proxy.options.update(settlement.message.options)
        if isinstance(decision, RetryAt):
            tell_retry(job, decision)
        self._engine.settling.settle(run, decision)
        return leaves
