"""The actors of a broker and their policies: each is resolved once, when the actor is declared."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from dramatiq import Actor, Message
from dramatiq.middleware.middleware import MiddlewareError

from ..bridge import Bridge
from ..config.policies import PoliciesOrFile
from ..config.settings import InFlight, begins_afresh, the_policies
from ..engine.canary import Canary, Percentages
from ..engine.layers import INTERVALS, WAITS, Layers, in_ojs
from ..engine.retry_on import RetryOn
from ..engine.runs import TaskPolicy
from ..errors import ConfigurationError, InvalidRetryPolicy, InvalidState
from ..messages import RETRY_OPTION
from ..rules.job import Job
from .native_options import INTERVAL_OPTIONS, NATIVE_FIELDS, NO_RETRIES, OF_RETRIES, ONCE, options_as_policy
from .translate import WORKER_ERRORS, InvalidOptions, bare_job, job_of, names_exceptions

logger = logging.getLogger("ojs_bridge")

#: The actor option that says which failures are retried (`retry_on`).
RETRY_ON_OPTION = "ojs_retry_on"
#: The actor option that carries an error map.
ERRORS_OPTION = "ojs_errors"


class BootError(MiddlewareError, ConfigurationError):
    """The worker cannot start as it is set up. Dramatiq would swallow it if it were no MiddlewareError."""


class Actors:
    """The policies of a broker's actors, and the canary, which says which of their jobs are under the bridge.

    Raises InvalidRetryPolicy for an invalid policy in `policies`, and ConfigurationError for an invalid
    `canary` or `in_flight`.
    """

    def __init__(
        self,
        bridge: Bridge,
        policies: PoliciesOrFile | None,
        canary: Percentages | None = None,
        in_flight: InFlight = "counted",
    ) -> None:
        self._bridge = bridge
        self._afresh = begins_afresh(in_flight)
        self._canary = Canary(canary)
        #: The actors of whose jobs the canary takes only a part.
        self._partly: set[str] = set()
        self._policies = the_policies(policies)
        #: The policies by actor name; None for an actor that keeps the native retries.
        self.tasks: dict[str, TaskPolicy | None] = {}
        #: The shortest and the longest native waits by actor name, which a message may change one by one.
        self._backoffs: dict[str, dict[str, Any]] = {}
        self._undeclared = bridge.engine.task()
        #: The actors and native options of which the log has said that they meet a policy.
        self._met: set[tuple[str, str]] = set()
        #: The settings of the stock `Retries`; None if the broker never had it.
        self.stock: Mapping[str, Any] | None = None

    def declare(self, actor: Actor[..., Any]) -> None:
        """Resolve an actor's policy; raises InvalidRetryPolicy and ConfigurationError."""
        self.tasks[actor.actor_name] = self._resolve(actor)
        options = {**(self.stock or {}), **actor.options}
        self._backoffs[actor.actor_name] = {key: options[key] for key in INTERVAL_OPTIONS & options.keys()}

    def __contains__(self, name: str) -> bool:
        return name in self.tasks

    def task_of(self, message: Message[Any]) -> TaskPolicy | None:
        """Return the policy of a message's job; None if Dramatiq itself retries it."""
        name = message.actor_name
        task = self.tasks.get(name)
        if task is None or name not in self._partly:
            return task
        return task if self._canary.covers(name, message.message_id) or _wishes(message) else None

    def of_message(self, task: TaskPolicy, message: Message[Any]) -> TaskPolicy:
        """Return an actor's policy with the native options of a message; raises InvalidRetryPolicy."""
        native = self.native_of(task, message)
        return task.of_message(native) if native else task

    def native_of(self, task: TaskPolicy, message: Message[Any]) -> dict[str, Any]:
        """Return what the native options of a message say; never raises.

        The shortest and the longest wait go together: one that the message does not bring is its actor's. The
        log says once of each option that it meets a policy.
        """
        options, layers = message.options, task.layers
        if layers.framework is ONCE and layers.limit_is_native:
            return {}
        if not INTERVAL_OPTIONS.isdisjoint(options):
            options = {**self._backoffs.get(message.actor_name, {}), **options}
        native = options_as_policy(options)
        if native:
            self._say_meetings(task, message, in_ojs(native) if any(map(layers.owner, WAITS)) else native)
        return native

    def _say_meetings(self, task: TaskPolicy, message: Message[Any], native: Mapping[str, Any]) -> None:
        for option, field in NATIVE_FIELDS:
            met = message.actor_name, option
            owners = {*map(task.layers.owner, INTERVALS if field in INTERVALS else [field])}
            counts = owners.isdisjoint(("install", "task"))
            if option not in message.options or met in self._met or (counts and not task.layers.owner(field)):
                continue
            said = task.policy.to_ojs(only={field: native[field]})[field]
            if said == native[field]:
                continue
            self._met.add(met)
            word = "counts" if counts else "does not count"
            logger.warning(
                "actor %s: %s=%r of its messages %s, where a policy says %s=%r",
                *(message.actor_name, option, message.options[option], word, field, said),
            )

    def header_of(self, message: Message[Any], partial: Any) -> dict[str, Any]:
        """Return the header of a message that brings its own partial policy; raises InvalidRetryPolicy."""
        name = message.actor_name
        task = self.tasks.get(name, self._undeclared)
        if task is None:
            raise InvalidOptions(
                [f"{RETRY_OPTION} of {name}: `policies` leaves this actor to native retries"]
            )
        try:
            return self._bridge.engine.initial_header(bare_job(message), task, partial).state
        except InvalidRetryPolicy as error:
            raise InvalidOptions(error.under(f"{RETRY_OPTION} of {name}").problems) from None

    def check(self, names: Iterable[str]) -> None:
        """Check the set-up as a worker starts, and say in the log which jobs the canary takes.

        Raises BootError for a pattern of `policies` that matches none of these names, for a pattern of
        `canary` that matches no actor with a policy, and for a class in a `retry_on` that cannot be imported.
        """
        moved = [name for name, task in self.tasks.items() if task is not None]
        try:
            self._policies.check(names, "actor of this broker")
            for task in self.tasks.values():
                if task is not None:
                    task.layers.retries.resolve()
            self._canary.check(moved, "actor under the bridge")
        except ConfigurationError as error:
            raise BootError(str(error)) from None
        if not self._partly.isdisjoint(moved):
            logger.warning("canary: under the bridge are %s; Dramatiq itself retries the rest", self._canary)

    def _native(self, options: Mapping[str, Any]) -> Layers:
        """Return what Dramatiq alone does with an actor: its options over those of the stock `Retries`."""
        if self.stock is None:
            return Layers(options=options_as_policy(options))
        if self.stock is NO_RETRIES:
            return Layers(ONCE)
        framework = options_as_policy({**self.stock, **options})
        said = {name: framework[name] for name in options_as_policy(options)}
        return Layers({**framework, "on_exhaustion": "dead_letter"}, options=said)

    def _resolve(self, actor: Actor[..., Any]) -> TaskPolicy | None:
        name, options = actor.actor_name, actor.options
        if not names_exceptions(options.get("throws")):
            raise BootError(f"actor {name}: throws must be exception classes")
        own = options.get(RETRY_OPTION)
        is_asked = own is not None or options.get(RETRY_ON_OPTION) is not None
        if not (is_asked or self._canary.covers_all(name)):
            self._partly.add(name)
        moved = self._policies.of(name)
        if moved is None and not is_asked:
            return None
        native = Layers(options=options_as_policy(options)) if own is not None else self._native(options)
        try:
            retry_on = _said(name, options) or self._policies.retry_on(name) or native.retry_on
            layers = replace(native, install=moved or (), task=own, retry_on=retry_on)
            task = self._bridge.engine.task(
                layers, errors=options.get(ERRORS_OPTION), reserved=WORKER_ERRORS, afresh=self._afresh
            )
            if self.stock and self.stock.get("retry_when") is not None and task.layers.limit_is_native:
                options.setdefault("retry_when", self.stock["retry_when"])
            if layers.framework is ONCE and (unread := sorted(OF_RETRIES & options.keys())):
                logger.warning(
                    "actor %s: %s is not read, as before, because its broker has no Retries",
                    *(name, ", ".join(unread)),
                )
            return task
        except InvalidRetryPolicy as error:
            raise InvalidOptions(error.under(f"actor {name}").problems) from None
        except ConfigurationError as error:
            raise BootError(f"actor {name}: {error}") from None


def _said(name: str, options: Mapping[str, Any]) -> RetryOn | None:
    said = options.get(RETRY_ON_OPTION)
    return None if said is None else RetryOn(said, f"actor {name}: {RETRY_ON_OPTION}")


def _wishes(message: Message[Any]) -> bool:
    """Return whether a job has a policy of its own, or an unreadable header, which may hold a policy."""
    if message.options.get(RETRY_OPTION) is not None:
        return True
    found = job_of(message, Job(message.message_id, message.actor_name, message.queue_name))
    return isinstance(found, InvalidState) or bool(found.retry)
