"""`OJSRetries`: the stock `Retries` replaced, the bridge's decisions executed."""

from __future__ import annotations

import fnmatch
import json
import logging
import math
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from dramatiq import Actor, Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.middleware import (
    Middleware,
    Retries,
    ShutdownNotifications,
    SkipMessage,
    TimeLimit,
)
from dramatiq.middleware.middleware import MiddlewareError

from ..bridge import Bridge, Postpone, Refuse, Run, TaskPolicy
from ..decision import Complete, DeadLetter, Decision, Discard, RetryAt, Snooze
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..job import Job
from ..policy import PartialPolicy, RetryPolicy
from ..store import StoreError
from .consumer import Settlement, mark, wrap
from .options import native_partial
from .replay import FRAMEWORK, DramatiqPublisher, original
from .translate import (
    HEADER,
    RESERVED,
    RETRY_OPTION,
    RETRY_WHEN_SAID_NO,
    InvalidOptions,
    Refused,
    bare_job,
    job_of,
    next_options,
    outcome,
)

logger = logging.getLogger("ojs_bridge")

_RUN = "_ojs_run"


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

    def before_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Check the set-up and wrap the broker's consumers; raises BootError."""
        self._take_over(broker)
        self._check(broker)
        wrap(broker)
        if self.bridge.store is None:
            logger.warning(
                "no store: dead letters go to the broker's own dead queues, where they are not searched or "
                "replayed and the broker forgets them in time; set Bridge(store=...) or OJS_BRIDGE_STORE"
            )

    def after_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """Let the listeners hear the last events."""
        self.bridge.flush()

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Turn a message's `ojs_retry` into its `ojs` header; raises InvalidRetryPolicy before it is sent."""
        if RETRY_OPTION in message.options:
            partial = message.options.pop(RETRY_OPTION)
            if partial is not None:
                self._add_header(message, partial)
        if "pipe_target" in message.options:
            for target in _pipeline(message.options["pipe_target"]):
                self._check_target(target)

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Begin the job: it runs, waits for its time, or is refused."""
        task = self._tasks.get(message.actor_name)
        if task is None or message.failed:
            return
        bare = bare_job(message)
        begun = self.bridge.begin(job_of(message, bare), bare, task)
        if isinstance(begun, Postpone):
            self._postpone(broker, message, begun)
        setattr(message, _RUN, begun)
        if isinstance(begun, Refuse):
            raise Refused(begun.decision.reason)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """Have the outcome judged and the decision carried out; whatever happens, the job is somewhere."""
        begun: Run | Refuse | None = getattr(message, _RUN, None)
        if begun is None:
            if message.actor_name not in self._tasks or self._tasks[message.actor_name] is None:
                super().after_process_message(broker, message, result=result, exception=exception)
            return
        try:
            self._disarm(broker)
            self._conclude(broker, message, begun, exception)
        except BaseException:
            logger.exception(
                "job %s: its outcome could not be carried out; it goes back to its queue", begun.job.id
            )
            mark(message, Settlement.HOLD)

    def _conclude(
        self, broker: Broker, message: MessageProxy, begun: Run | Refuse, exception: BaseException | None
    ) -> None:
        if isinstance(begun, Refuse):
            decision: Decision = begun.decision
        elif exception is None:
            decision = self.bridge.judge(begun, None)
        else:
            options = broker.get_actor(message.actor_name).options
            decision = self.bridge.judge(begun, outcome(message, options, exception, begun.errors))
        self._execute(broker, message, begun, decision)
        self.bridge.settled(begun, decision)

    def _execute(
        self, broker: Broker, message: MessageProxy, begun: Run | Refuse, decision: Decision
    ) -> None:
        match decision:
            case Complete():
                return
            case RetryAt() | Snooze():
                self._send_on(broker, message, self.bridge.after(begun.job, decision), decision)
            case Discard():
                self._finish(broker, message, begun, decision)
                mark(message, Settlement.DROP)
            case DeadLetter():
                kept = original(message) if self.bridge.store else {}
                self._finish(broker, message, begun, decision)
                mark(message, self._bury(begun, decision, kept))

    def _send_on(self, broker: Broker, message: MessageProxy, job: Job, decision: RetryAt | Snooze) -> None:
        failure = decision.failure if isinstance(decision, RetryAt) else None
        message.options.update(next_options(job, self.bridge.header(job), failure))
        seconds = (decision.at - self.bridge.now()).total_seconds()
        broker.enqueue(message, delay=max(math.ceil(seconds * 1000), 0) + 1)  # type: ignore[arg-type]

    def _finish(
        self, broker: Broker, message: MessageProxy, begun: Run | Refuse, decision: Discard | DeadLetter
    ) -> None:
        """Mark the message failed, so that results, pipelines and other middleware see the end they know."""
        ended = self.bridge.after(begun.job, decision)
        message.options.update(next_options(ended, self.bridge.header(ended), decision.failure))
        message.options["retries"] = ended.attempt
        message.fail()
        if decision.cause == "exhausted" or decision.failure.final == RETRY_WHEN_SAID_NO:
            self._announce_exhaustion(broker, message, begun)

    def _bury(self, begun: Run | Refuse, decision: DeadLetter, kept: dict[str, Any]) -> Settlement:
        if self.bridge.store is None:
            return Settlement.DEAD
        policy = begun.policy if isinstance(begun, Run) else RetryPolicy()
        try:
            self.bridge.bury(self.bridge.after(begun.job, decision), decision, policy, FRAMEWORK, kept)
        except StoreError:
            logger.exception("job %s: kept in the broker's dead queue, not in the store", begun.job.id)
            return Settlement.DEAD
        return Settlement.DROP

    def _announce_exhaustion(self, broker: Broker, message: MessageProxy, begun: Run | Refuse) -> None:
        actor = broker.get_actor(message.actor_name)
        target = message.options.get("on_retry_exhausted") or actor.options.get("on_retry_exhausted")
        if not target or not isinstance(begun, Run):
            return
        counts = {"retries": begun.job.attempt - 1, "max_retries": begun.policy.runs - 1}
        try:
            broker.get_actor(target).send(message.asdict(), counts)
        except Exception:
            logger.exception("job %s: on_retry_exhausted %r was not sent", begun.job.id, target)

    def _postpone(self, broker: Broker, message: MessageProxy, begun: Postpone) -> None:
        seconds = (begun.at - self.bridge.now()).total_seconds()
        # Results would store None over the real result of a message that is skipped.
        message.options["store_results"] = False
        copy = message.copy(options={})
        del copy.options["store_results"]
        try:
            broker.enqueue(copy, delay=max(math.ceil(seconds * 1000), 0) + 1)
        except Exception:
            logger.exception("job %s: came before its time and goes back to its queue", begun.job.id)
            mark(message, Settlement.HOLD)
        raise SkipMessage(f"not due before {begun.at.isoformat()}")

    def _disarm(self, broker: Broker) -> None:
        """Keep the time limit and shutdown of the actor away from what happens to its outcome."""
        for middleware in broker.middleware:
            if isinstance(middleware, TimeLimit):
                middleware.manager.remove_timeout(threading.get_ident())
            elif isinstance(middleware, ShutdownNotifications):
                middleware.manager.remove_notification()

    def _add_header(self, message: Message[Any], partial: PartialPolicy) -> None:
        task = self._tasks.get(message.actor_name) or self.bridge.task()
        try:
            header = self.bridge.initial_header(bare_job(message), task, partial)
        except InvalidRetryPolicy as error:
            raise InvalidOptions(
                [f"{RETRY_OPTION} of {message.actor_name}: {p}" for p in error.problems]
            ) from None
        message.options[HEADER] = json.loads(header)

    def _check_target(self, target: Mapping[str, Any]) -> None:
        partial = target.get("options", {}).get(RETRY_OPTION)
        name = str(target.get("actor_name"))
        if partial is not None:
            task = self._tasks.get(name) or self.bridge.task()
            try:
                task.for_job(partial)
            except InvalidRetryPolicy as error:
                raise InvalidOptions([f"{RETRY_OPTION} of {name}: {p}" for p in error.problems]) from None

    def _task(self, actor: Actor[..., Any]) -> TaskPolicy | None:
        """Resolve an actor's policy; None for one that stays with the native retries."""
        own = actor.options.get(RETRY_OPTION)
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
        for name in ("max_retries", "min_backoff", "max_backoff", "retry_when"):
            setattr(self, name, getattr(stock[0], name))
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
    return middleware


def _named(where: str, bridge: Bridge, partial: PartialPolicy) -> None:
    try:
        bridge.task(partial)
    except InvalidRetryPolicy as error:
        raise InvalidRetryPolicy([f"{where}: {problem}" for problem in error.problems]) from None


def _pipeline(target: Any) -> Iterator[Mapping[str, Any]]:
    while isinstance(target, Mapping):
        yield target
        target = target.get("options", {}).get("pipe_target")


def _path(middleware: Middleware) -> str:
    return f"{type(middleware).__module__}.{type(middleware).__qualname__}"
