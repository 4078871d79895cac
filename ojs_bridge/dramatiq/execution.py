"""How a delivery is begun, and what was decided about it is carried out."""

from __future__ import annotations

import logging
import math
from datetime import datetime
from typing import Any

from dramatiq import Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware.middleware import MiddlewareError

from ..bridge import Bridge, Postpone, Refuse, Run, TaskPolicy
from ..decision import Complete, DeadLetter, Decision, Discard, RetryAt, Snooze
from ..errors import InvalidState
from ..job import Header, Job
from ..policy import RetryPolicy
from .consumer import Settlement, have_queue, mark
from .encoding import encodable
from .options import UNBOUNDED
from .producer import carry_wishes
from .replay import FRAMEWORK, original
from .translate import RETRY_WHEN_SAID_NO, bare_job, job_of, max_age, names_exceptions, next_options, outcome

logger = logging.getLogger("ojs_bridge")


class NotSent(Exception):
    """The broker did not take a message; the one that is being processed is still there."""


class Execution:
    """One delivery under the bridge: it translates and executes, it never decides."""

    def __init__(self, bridge: Bridge, broker: Broker, message: MessageProxy) -> None:
        self._bridge = bridge
        self._broker = broker
        self._message = message

    def begin(self, task: TaskPolicy) -> Run | Postpone | Refuse:
        """Ask the bridge whether the job runs."""
        message = self._message
        bare = bare_job(message, max_age(self._broker, message))
        try:
            carry_wishes(message.options)
            if not names_exceptions(message.options.get("throws")):
                logger.warning("job %s: its throws option names no exception classes", bare.id)
                del message.options["throws"]
            return self._bridge.begin(job_of(message, bare), bare, task)
        except Exception as error:
            # Dramatiq would log it, run the actor and know nothing of its outcome.
            logger.exception("job %s: could not be begun", bare.id)
            return self._bridge.refuse(bare, InvalidState(f"the job could not be begun: {error!r}"))

    def conclude(self, begun: Run | Postpone | Refuse, exception: BaseException | None) -> None:
        """Have the outcome judged and the decision carried out."""
        if isinstance(begun, Postpone):
            self.postpone(begun)
            return
        decision = self._judge(begun, exception)
        try:
            self._execute(begun, decision)
        except InvalidState as error:
            decision = self._bridge.impossible(begun.job, decision, error)
            self._execute(begun, decision)
        self._bridge.settled(begun, decision)

    def postpone(self, begun: Postpone) -> None:
        """Send a delivery that came before its time on to that time."""
        copy = self._message.copy()
        # Results would store None over the real result of a message that is skipped.
        self._message.options["store_results"] = False
        try:
            self._publish(copy, begun.at)
        except Exception:
            logger.exception("job %s: came before its time and goes back to its queue", begun.job.id)
        else:
            mark(self._message, Settlement.DROP)

    def _judge(self, begun: Run | Refuse, exception: BaseException | None) -> Decision:
        if isinstance(begun, Refuse):
            return begun.decision
        if exception is None:
            return self._bridge.judge(begun, None)
        options = self._broker.get_actor(self._message.actor_name).options
        return self._bridge.judge(begun, outcome(self._message, options, exception, begun.errors))

    def _execute(self, begun: Run | Refuse, decision: Decision) -> None:
        match decision:
            case Complete():
                mark(self._message, Settlement.NATIVE)
            case RetryAt() | Snooze():
                self._send_on(self._bridge.after(begun.job, decision), decision)
            case Discard():
                self._finish(begun, decision, self._bridge.after(begun.job, decision), Settlement.DROP)
            case DeadLetter():
                ended = self._bridge.after(begun.job, decision)
                self._finish(begun, decision, ended, self._bury(begun, decision, ended))

    def _send_on(self, job: Job, decision: RetryAt | Snooze) -> None:
        failure = decision.failure if isinstance(decision, RetryAt) else None
        options = next_options(job, self._bridge.header(job), failure)
        self._publish(self._message.copy(options=options), decision.at)
        self._message.options.update(options)
        mark(self._message, Settlement.DROP)

    def _publish(self, message: Message[Any], at: datetime) -> None:
        """Publish a message for a time, never before it; raises NotSent when the broker cannot take it."""
        seconds = (at - self._bridge.now()).total_seconds()
        # One more, because the broker's own clock reading loses the fraction of its millisecond.
        delay = max(math.ceil(seconds * 1000), 0) + 1
        have_queue(self._broker, message.queue_name)
        try:
            self._broker.enqueue(message, delay=delay)
        except MiddlewareError:
            raise
        except Exception as error:
            plain = encodable(message)
            if plain is message:
                raise NotSent(f"the broker took no retry: {error!r}") from error
            self._broker.enqueue(plain, delay=delay)

    def _finish(
        self, begun: Run | Refuse, decision: Discard | DeadLetter, ended: Job, settlement: Settlement
    ) -> None:
        """Mark the message failed, so that results, pipelines and other middleware see the end they know."""
        self._message.options.update(next_options(ended, self._last_header(ended), decision.failure))
        self._message.options["retries"] = ended.attempt
        self._message.fail()
        mark(self._message, settlement)
        if decision.cause == "exhausted" or decision.failure.final == RETRY_WHEN_SAID_NO:
            self._announce_exhaustion(begun)

    def _last_header(self, ended: Job) -> Header | None:
        try:
            return self._bridge.header(ended, ended=True)
        except InvalidState:
            return None

    def _bury(self, begun: Run | Refuse, decision: DeadLetter, ended: Job) -> Settlement:
        if self._bridge.store is None:
            return Settlement.DEAD
        policy = begun.policy if isinstance(begun, Run) else RetryPolicy()
        try:
            self._bridge.bury(ended, decision, policy, FRAMEWORK, original(self._message))
        except Exception:
            logger.exception("job %s: kept in the broker's dead queue, not in the store", begun.job.id)
            return Settlement.DEAD
        return Settlement.DROP

    def _announce_exhaustion(self, begun: Run | Refuse) -> None:
        message = self._message
        actor = self._broker.get_actor(message.actor_name)
        target = message.options.get("on_retry_exhausted") or actor.options.get("on_retry_exhausted")
        if not target or not isinstance(begun, Run):
            return
        limit = None if begun.policy.max_attempts >= UNBOUNDED else begun.policy.runs - 1
        counts = {"retries": begun.job.attempt - 1, "max_retries": limit}
        try:
            self._broker.get_actor(target).send(message.asdict(), counts)
        except Exception:
            logger.exception("job %s: on_retry_exhausted %r was not sent", begun.job.id, target)
