"""Shadow mode on Dramatiq: a middleware, which only watches."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from dramatiq.broker import Broker, MessageProxy
from dramatiq.message import Message
from dramatiq.middleware import Middleware, Retries

from ...bridge import Bridge
from ...config.policy_files import PoliciesOrFile
from ...config.settings import the_policies
from ...dramatiq.actors import NO_RETRIES, Actors
from ...dramatiq.compat import message_in, settings_of
from ...dramatiq.delivery import is_native
from ...dramatiq.publishing import FRAMEWORK
from ...dramatiq.translate import RETRY_WHEN_SAID_NO, bare_job, max_age, outcome
from ...engine.runs import TaskPolicy
from ...errors import ConfigurationError, InvalidRetryPolicy
from ...spec.failures import Failure, Outcome
from ...spec.job import Job
from . import Shadow
from .comparing import Ended, Native, Retried
from .recording import FailedRun, harmless

#: The id of a sent retry, and its delay in milliseconds.
Sent: TypeAlias = "tuple[str, int | None]"


class BrokerShadow(Shadow, Middleware):
    """The shadow of a broker: a middleware, which removes itself from a worker that has it off."""

    def __init__(self, bridge: Bridge | None, policies: PoliciesOrFile | None) -> None:
        super().__init__(bridge, policies)
        self._sent = threading.local()

    def before_worker_boot(self, broker: Broker, worker: Any) -> None:
        """Start shadow mode, or remove this middleware."""
        self._broker = broker
        self._begin(FRAMEWORK)
        # The broker is reading the old list, so this makes a new one. The first middleware hears last of the
        # end of a run.
        rest = [m for m in broker.middleware if m is not self]
        broker.middleware = rest if self._recorder is None else [self, *rest]

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Note the last retry that this thread has sent."""
        if "retries" in message.options:
            self._sent.last = (message.message_id, delay)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
    ) -> None:
        """Have a failed run compared."""
        if exception is None or self._recorder is None:
            return
        with harmless("a failed run is not compared"):
            sent, self._sent.last = getattr(self._sent, "last", None), None
            self._note(message, exception, sent)

    def after_worker_shutdown(self, broker: Broker, worker: Any) -> None:
        """Write the pending tallies."""
        self._end()

    def _note(self, message: MessageProxy, exception: BaseException, sent: Sent | None) -> None:
        """Have a failed run compared, if its actor is shadowed."""
        name = message_in(message).actor_name
        task = self._policy(name, is_bridged=not is_native(message))
        if task is None:
            return
        options = self._broker.get_actor(name).options
        native = _native(message, sent)
        job = self._job(message, options, exception)
        own = self._actors.native_of(task, message_in(message))
        try:
            task = task.of_message(own) if own else task
        except InvalidRetryPolicy:
            # With these options, the comparison finds what the bridge refuses.
            job = job._replace(retry={**own, **(job.retry or {})})
        found = _outcome(message, options, exception, native, task)
        self._compare(FailedRun(job, task, found, native, self.bridge.engine.now()))

    def _named(self) -> Iterable[str]:
        self._actors = Actors(self.bridge.engine, self._policies, canary=100)
        retries = next((m for m in self._broker.middleware if isinstance(m, Retries)), None)
        self._actors.stock = NO_RETRIES if retries is None else settings_of(retries)
        self._actors.check(self._broker.actors)
        self._counts_retries = retries is not None
        policies = the_policies(self._policies)
        return (name for name in self._broker.actors if policies.of(name) is not None)

    def _resolved(self, name: str) -> TaskPolicy | None:
        self._actors.declare(self._broker.get_actor(name))
        return self._actors.tasks[name]

    def _job(self, message: MessageProxy, options: Mapping[str, Any], exception: BaseException) -> Job:
        """Return the job as it was before `Retries` counted its failed run; it does not count `throws`."""
        found = bare_job(message_in(message), max_age(self._broker, message_in(message)))
        throws = message.options.get("throws") or options.get("throws")
        if not self._counts_retries or found.fence == 0 or (throws and isinstance(exception, throws)):
            return found
        return found._replace(attempt=found.attempt - 1, fence=found.fence - 1)


def _native(message: MessageProxy, sent: Sent | None) -> Native:
    if sent is None or sent[0] != message.message_id:
        return Ended(kept=bool(message.failed))
    return Retried((sent[1] or 0) / 1000)


def _outcome(
    message: MessageProxy,
    options: Mapping[str, Any],
    exception: BaseException,
    native: Native,
    task: TaskPolicy,
) -> Outcome:
    """Translate the actor's exception, without a second call of the user's `retry_when`."""
    asked = options.get("retry_when")
    told = options if asked is None else {**options, "retry_when": None}
    found = outcome(message, told, exception, task.errors, task.layers.retries)
    if asked is not None and isinstance(native, Ended) and isinstance(found, Failure) and not found.final:
        return replace(found, final=RETRY_WHEN_SAID_NO)
    return found


def shadow_broker(broker: Broker, bridge: Bridge | None, policies: PoliciesOrFile | None) -> None:
    """Give a broker a shadow; raises ConfigurationError for a broker that has one."""
    if any(isinstance(m, BrokerShadow) for m in broker.middleware):
        raise ConfigurationError("shadow: this broker has it already: call it once")
    broker.add_middleware(BrokerShadow(bridge, policies))
