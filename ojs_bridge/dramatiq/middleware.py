"""`OJSRetries`: the stock `Retries` replaced, the bridge's decisions executed."""

from __future__ import annotations

import fnmatch
import logging
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dramatiq import Actor, Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import Middleware, Retries, SkipMessage
from dramatiq.middleware.middleware import MiddlewareError

from ..bridge import Bridge, Postpone, Refuse, Run, TaskPolicy
from ..decision import Complete, DeadLetter, Decision, Discard, RetryAt, Snooze
from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState
from ..job import Header, Job
from ..policy import PartialPolicy, RetryPolicy
from ..store import StoreError
from .consumer import Settlement, have_queue, mark, wrap
from .encoding import encodable
from .interrupts import Interrupts
from .options import UNBOUNDED, native_partial
from .producer import add_headers, carry_wishes, is_plain
from .replay import FRAMEWORK, DramatiqPublisher, original
from .translate import (
    RESERVED,
    RETRY_OPTION,
    RETRY_WHEN_SAID_NO,
    InvalidOptions,
    Refused,
    bare_job,
    job_of,
    names_exceptions,
    next_options,
    outcome,
)

logger = logging.getLogger("ojs_bridge")

_RUN = "_ojs_run"
_UNBEGUN: Any = object()
_NATIVE_SETTINGS = ("max_retries", "min_backoff", "max_backoff", "retry_when")


class NotSent(Exception):
    """The broker did not take a message; the one that is being processed is still there."""


class BootError(MiddlewareError, ConfigurationError):
    """The worker cannot start as it is set up; a MiddlewareError, or Dramatiq would swallow it."""


class OJSRetries(Retries):
    """Retries Dramatiq jobs as the Open Job Spec says, in place of the stock `Retries`.

    `policies` maps actor name patterns to partial policies; actors that no pattern names then keep the native
    retries. Without it every actor is under the bridge. Raises InvalidRetryPolicy for an actor's `ojs_retry`
    where the actor is declared, and for a message's where it is enqueued.
    """

    def __init__(
        self, bridge: Bridge | None = None, *, policies: Mapping[str, PartialPolicy] | None = None
    ) -> None:
        super().__init__()
        self.bridge = bridge or Bridge()
        self._policies = policies
        self._tasks: dict[str, TaskPolicy | None] = {}
        self._unknown = self.bridge.task()
        self._interrupts: Interrupts | None = None
        self._swapped = False
        for pattern, partial in (policies or {}).items():
            _named(f"policies[{pattern!r}]", self.bridge, partial)

    @property
    def actor_options(self) -> set[str]:
        """The options that actors may set."""
        return {*super().actor_options, RETRY_OPTION, "ojs_errors"}

    def before_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Refuse an actor whose `ojs_retry` or `ojs_errors` is invalid, where it is declared."""
        self._tasks[actor.actor_name] = self._task(actor)

    def after_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Read the options of an actor that was declared before this middleware was added."""
        self._take_over(broker)
        if actor.actor_name not in self._tasks:
            self._tasks[actor.actor_name] = self._task(actor)

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
        wrap(broker)
        self._interrupts = Interrupts(broker)
        self._try_store()

    def _try_store(self) -> None:
        if self.bridge.store is None:
            logger.warning(
                "no store: dead letters go to the broker's own dead queues, where they are not searched or "
                "replayed and the broker forgets them in time; set Bridge(store=...) or OJS_BRIDGE_STORE"
            )
            return
        try:
            self.bridge.store.prepare()
        except StoreError as error:
            logger.error("until the store works, the broker's dead queues keep dead letters: %s", error)

    def after_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """Let the listeners hear the last events."""
        self.bridge.flush()

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Turn `ojs_retry` options into `ojs` headers; raises InvalidRetryPolicy before anything is sent."""
        add_headers(message, self._header_of)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the job: it runs, waits for its time, or is refused."""
        task = self._tasks.get(message.actor_name)
        if task is None or message.failed:
            return
        # Whatever ends this delivery before something durable follows it gives the job back.
        mark(message, Settlement.HOLD)
        if not self.bridge.listened_to and is_plain(message.options):
            # Nothing to read and nobody to tell: the job is begun when it turns out to have failed.
            return
        begun = self._begin(message, task)
        if isinstance(begun, Postpone):
            self._postpone(broker, message, begun)
            setattr(message, _RUN, None)
            raise SkipMessage(f"not due before {begun.at.isoformat()}")
        setattr(message, _RUN, begun)
        if isinstance(begun, Refuse):
            raise Refused(begun.decision.reason)

    def _begin(self, message: MessageProxy, task: TaskPolicy) -> Run | Postpone | Refuse:
        bare = bare_job(message)
        try:
            carry_wishes(message.options)
            if not names_exceptions(message.options.get("throws")):
                logger.warning("job %s: its throws option names no exception classes", bare.id)
                del message.options["throws"]
            return self.bridge.begin(job_of(message, bare), bare, task)
        except Exception as error:
            # Dramatiq would log it, run the actor and know nothing of its outcome.
            logger.exception("job %s: could not be begun", bare.id)
            return self.bridge.refuse(bare, InvalidState(f"the job could not be begun: {error!r}"))

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """Leave a message that another middleware skipped to Dramatiq."""
        if message.__dict__.pop(_RUN, _UNBEGUN) is not None:
            mark(message, Settlement.NATIVE)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """Have the outcome judged and the decision carried out; whatever happens, the job is somewhere."""
        task = self._tasks.get(message.actor_name)
        if task is None:
            super().after_process_message(broker, message, result=result, exception=exception)
            return
        begun = message.__dict__.get(_RUN, _UNBEGUN)
        # Dramatiq emits this a second time when an interrupt breaks into the first.
        message.__dict__[_RUN] = None
        if begun is None:
            return
        try:
            if self._interrupts:
                self._interrupts.disarm(exception)
            if begun is _UNBEGUN and exception is None:
                mark(message, Settlement.NATIVE)
                return
            if begun is _UNBEGUN:
                mark(message, Settlement.HOLD)
                begun = self._begin(message, task)
            self._conclude(broker, message, begun, exception)
        except NotSent as error:
            logger.error("job %s: %s; it goes back to its queue", message.message_id, error)
        except Exception:
            logger.exception("job %s: kept in the broker's dead queue", message.message_id)
            message.fail()
            mark(message, Settlement.DEAD)
        except BaseException:
            logger.exception("job %s: interrupted, it goes back to its queue", message.message_id)

    def _conclude(
        self,
        broker: Broker,
        message: MessageProxy,
        begun: Run | Postpone | Refuse,
        exception: BaseException | None,
    ) -> None:
        if isinstance(begun, Postpone):
            self._postpone(broker, message, begun)
            return
        decision = self._decide(broker, message, begun, exception)
        try:
            self._execute(broker, message, begun, decision)
        except InvalidState as error:
            begun = self.bridge.refuse(begun.job, error)
            decision = begun.decision
            self._execute(broker, message, begun, decision)
        self.bridge.settled(begun, decision)

    def _decide(
        self, broker: Broker, message: MessageProxy, begun: Run | Refuse, exception: BaseException | None
    ) -> Decision:
        if isinstance(begun, Refuse):
            return begun.decision
        if exception is None:
            return self.bridge.judge(begun, None)
        options = broker.get_actor(message.actor_name).options
        return self.bridge.judge(begun, outcome(message, options, exception, begun.errors))

    def _execute(
        self, broker: Broker, message: MessageProxy, begun: Run | Refuse, decision: Decision
    ) -> None:
        match decision:
            case Complete():
                mark(message, Settlement.NATIVE)
            case RetryAt() | Snooze():
                self._send_on(broker, message, self.bridge.after(begun.job, decision), decision)
            case Discard():
                self._finish(broker, message, begun, decision, Settlement.DROP)
            case DeadLetter():
                self._finish(broker, message, begun, decision, self._bury(message, begun, decision))

    def _send_on(self, broker: Broker, message: MessageProxy, job: Job, decision: RetryAt | Snooze) -> None:
        failure = decision.failure if isinstance(decision, RetryAt) else None
        options = next_options(job, self.bridge.header(job), failure)
        self._publish(broker, message.copy(options=options), decision.at)
        message.options.update(options)
        mark(message, Settlement.DROP)

    def _postpone(self, broker: Broker, message: MessageProxy, begun: Postpone) -> None:
        copy = message.copy()
        # Results would store None over the real result of a message that is skipped.
        message.options["store_results"] = False
        try:
            self._publish(broker, copy, begun.at)
        except Exception:
            logger.exception("job %s: came before its time and goes back to its queue", begun.job.id)
        else:
            mark(message, Settlement.DROP)

    def _publish(self, broker: Broker, message: Message[Any], at: datetime) -> None:
        """Publish a message for a time, never before it; raises NotSent when the broker cannot take it."""
        seconds = (at - self.bridge.now()).total_seconds()
        # One more, because the broker's own clock reading loses the fraction of its millisecond.
        delay = max(math.ceil(seconds * 1000), 0) + 1
        have_queue(broker, message.queue_name)
        try:
            broker.enqueue(message, delay=delay)
        except MiddlewareError:
            raise
        except Exception as error:
            plain = encodable(message)
            if plain is message:
                raise NotSent(f"the broker took no retry: {error!r}") from error
            broker.enqueue(plain, delay=delay)

    def _finish(
        self,
        broker: Broker,
        message: MessageProxy,
        begun: Run | Refuse,
        decision: Discard | DeadLetter,
        settlement: Settlement,
    ) -> None:
        """Mark the message failed, so that results, pipelines and other middleware see the end they know."""
        ended = self.bridge.after(begun.job, decision)
        message.options.update(next_options(ended, self._last_header(ended), decision.failure))
        message.options["retries"] = ended.attempt
        message.fail()
        mark(message, settlement)
        if decision.cause == "exhausted" or decision.failure.final == RETRY_WHEN_SAID_NO:
            self._announce_exhaustion(broker, message, begun)

    def _last_header(self, ended: Job) -> Header | None:
        try:
            return self.bridge.header(ended, ended=True)
        except InvalidState:
            return None

    def _bury(self, message: MessageProxy, begun: Run | Refuse, decision: DeadLetter) -> Settlement:
        if self.bridge.store is None:
            return Settlement.DEAD
        policy = begun.policy if isinstance(begun, Run) else RetryPolicy()
        try:
            ended = self.bridge.after(begun.job, decision)
            self.bridge.bury(ended, decision, policy, FRAMEWORK, original(message))
        except Exception:
            logger.exception("job %s: kept in the broker's dead queue, not in the store", begun.job.id)
            return Settlement.DEAD
        return Settlement.DROP

    def _announce_exhaustion(self, broker: Broker, message: MessageProxy, begun: Run | Refuse) -> None:
        actor = broker.get_actor(message.actor_name)
        target = message.options.get("on_retry_exhausted") or actor.options.get("on_retry_exhausted")
        if not target or not isinstance(begun, Run):
            return
        limit = None if begun.policy.max_attempts >= UNBOUNDED else begun.policy.runs - 1
        counts = {"retries": begun.job.attempt - 1, "max_retries": limit}
        try:
            broker.get_actor(target).send(message.asdict(), counts)
        except Exception:
            logger.exception("job %s: on_retry_exhausted %r was not sent", begun.job.id, target)

    def _header_of(self, message: Message[Any], partial: Any) -> dict[str, Any]:
        name = message.actor_name
        task = self._tasks.get(name, self._unknown)
        if task is None:
            raise InvalidOptions(
                [f"{RETRY_OPTION} of {name}: `policies` leaves this actor to native retries"]
            )
        try:
            return self.bridge.initial_header(bare_job(message), task, partial).state
        except InvalidRetryPolicy as error:
            raise InvalidOptions([f"{RETRY_OPTION} of {name}: {p}" for p in error.problems]) from None

    def _task(self, actor: Actor[..., Any]) -> TaskPolicy | None:
        """Resolve an actor's policy; None for one that stays with the native retries."""
        own = actor.options.get(RETRY_OPTION)
        if not names_exceptions(actor.options.get("throws")):
            raise BootError(f"actor {actor.actor_name}: throws must be exception classes")
        patterns = [p for p in self._policies or () if fnmatch.fnmatchcase(actor.actor_name, p)]
        if self._policies is not None and own is None and not patterns:
            return None
        partials = [native_partial(actor.options), *((self._policies or {})[p] for p in patterns), own]
        try:
            return self.bridge.task(*partials, errors=actor.options.get("ojs_errors"), reserved=RESERVED)
        except InvalidRetryPolicy as error:
            raise InvalidOptions([f"actor {actor.actor_name}: {p}" for p in error.problems]) from None
        except ConfigurationError as error:
            raise BootError(f"actor {actor.actor_name}: {error}") from None

    def _take_over(self, broker: Broker) -> None:
        """Take the stock `Retries`' place in the middleware, once; others say `before=Retries`."""
        if self._swapped:
            return
        self._swapped = True
        self.bridge.publishers[FRAMEWORK] = DramatiqPublisher(broker)
        stock = [m for m in broker.middleware if type(m) is Retries]
        if not stock:
            return
        for name in _NATIVE_SETTINGS:
            setattr(self, name, getattr(stock[0], name))
        # A new list, because the broker may be in the middle of the old one.
        rest = [m for m in broker.middleware if m is not self]
        broker.middleware = [self if m is stock[0] else m for m in rest]
        logger.info(
            "OJSRetries took the place of dramatiq's Retries at position %d", broker.middleware.index(self)
        )
        default = Retries()
        own = [
            f"{n}={getattr(self, n)!r}" for n in _NATIVE_SETTINGS if getattr(self, n) != getattr(default, n)
        ]
        if own:
            logger.warning("Retries(%s) no longer counts for actors under the bridge", ", ".join(own))

    def _check(self, broker: Broker) -> None:
        others = [m for m in broker.middleware if isinstance(m, Retries) and m is not self]
        if others:
            raise BootError(
                f"two middlewares would retry every job: OJSRetries and {_path(others[0])}; "
                "remove one of them from the broker"
            )
        for pattern in self._policies or ():
            if not any(fnmatch.fnmatchcase(name, pattern) for name in broker.actors):
                raise BootError(f"policies[{pattern!r}] names no actor of this broker")


def install(
    broker: Broker, bridge: Bridge | None = None, *, policies: Mapping[str, PartialPolicy] | None = None
) -> OJSRetries:
    """Put a whole broker, or the actors that `policies` names, under the bridge without touching their code.

    Returns the middleware. Raises InvalidRetryPolicy and ConfigurationError.
    """
    middleware = OJSRetries(bridge, policies=policies)
    broker.add_middleware(middleware)
    middleware.after_process_boot(broker)
    return middleware


def _named(where: str, bridge: Bridge, partial: PartialPolicy) -> None:
    try:
        bridge.task(partial)
    except InvalidRetryPolicy as error:
        raise InvalidRetryPolicy([f"{where}: {problem}" for problem in error.problems]) from None


def _path(middleware: Middleware) -> str:
    return f"{type(middleware).__module__}.{type(middleware).__qualname__}"
