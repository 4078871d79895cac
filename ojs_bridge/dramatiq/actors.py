"""Which actors are under the bridge, and under which policy: resolved once, where an actor is declared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dramatiq import Actor, Message
from dramatiq.middleware.middleware import MiddlewareError

from ..bridge import Bridge
from ..errors import ConfigurationError, InvalidRetryPolicy
from ..patterns import Policies
from ..policy import PartialPolicy
from ..runs import TaskPolicy
from .options import native_partial
from .translate import RESERVED, RETRY_OPTION, InvalidOptions, bare_job, names_exceptions

#: The actor option that carries an error map.
ERRORS_OPTION = "ojs_errors"


class BootError(MiddlewareError, ConfigurationError):
    """The worker cannot start as it is set up; a MiddlewareError, or Dramatiq would swallow it."""


class Actors:
    """The policies of a broker's actors; raises InvalidRetryPolicy for an invalid one in `policies`."""

    def __init__(self, bridge: Bridge, policies: Mapping[str, PartialPolicy] | None) -> None:
        self._bridge = bridge
        self._policies = Policies(policies)
        #: The policies by name, None for actors that stay with the native retries.
        self.tasks: dict[str, TaskPolicy | None] = {}
        self._undeclared = bridge.task()

    def declare(self, actor: Actor[..., Any]) -> None:
        """Resolve an actor's policy; raises InvalidRetryPolicy and ConfigurationError."""
        self.tasks[actor.actor_name] = self._resolve(actor)

    def __contains__(self, name: str) -> bool:
        return name in self.tasks

    def header_of(self, message: Message[Any], partial: Any) -> dict[str, Any]:
        """Return the header of a message that brings its own partial policy; raises InvalidRetryPolicy."""
        name = message.actor_name
        task = self.tasks.get(name, self._undeclared)
        if task is None:
            raise InvalidOptions(
                [f"{RETRY_OPTION} of {name}: `policies` leaves this actor to native retries"]
            )
        try:
            return self._bridge.initial_header(bare_job(message), task, partial).state
        except InvalidRetryPolicy as error:
            raise InvalidOptions(error.under(f"{RETRY_OPTION} of {name}").problems) from None

    def check(self, names: Iterable[str]) -> None:
        """Raise BootError for a pattern of `policies` that names none of the actors there are."""
        try:
            self._policies.check(names, "actor of this broker")
        except ConfigurationError as error:
            raise BootError(str(error)) from None

    def _resolve(self, actor: Actor[..., Any]) -> TaskPolicy | None:
        name, options = actor.actor_name, actor.options
        if not names_exceptions(options.get("throws")):
            raise BootError(f"actor {name}: throws must be exception classes")
        own = options.get(RETRY_OPTION)
        moved = self._policies.of(name)
        if moved is None and own is None:
            return None
        layers = [native_partial(options), *(moved or ()), own]
        try:
            return self._bridge.task(*layers, errors=options.get(ERRORS_OPTION), reserved=RESERVED)
        except InvalidRetryPolicy as error:
            raise InvalidOptions(error.under(f"actor {name}").problems) from None
        except ConfigurationError as error:
            raise BootError(f"actor {name}: {error}") from None
