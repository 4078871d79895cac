"""What Dramatiq's own `Retries` does for each actor of a broker, and the policies nearest to it."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

from dramatiq import Actor
from dramatiq.broker import Broker
from dramatiq.common import xq_name

from ....dramatiq.brokers import is_broker, is_redis
from ....dramatiq.native_options import native_partial
from ....dramatiq.translate import RETRY_OPTION
from ....spec.duration import spoken
from ....spec.policy import RetryPolicy, partial_to_ojs
from ..already import already_ojs
from ..comparing import differing, policy_wait
from ..planned import NOT_KNOWN, Native, Open, Planned, chosen, planned
from .hazards import hazards
from .reading import Fleet, open_by_code, open_by_settings, where_of
from .settings import Settings, task_policy


def of_dramatiq(broker: Broker, names: Collection[str] = ()) -> list[Planned]:
    """Return the plan of a broker's actors, by name: of all, or of those that `names` matches.

    `names` are patterns such as `billing.*`. Options and code are read; no actor is called, nothing is sent,
    and no broker is asked. Raises ConfigurationError for a name that matches none.
    """
    actors, fleet = broker.actors, Fleet(broker)
    chosen_names = chosen(actors, names, "actor")
    return [planned(name, partial(_read, fleet, actors[name], broker)) for name in chosen_names]


def _read(fleet: Fleet, actor: Actor[..., Any], broker: Broker) -> Planned:
    moved = task_policy(broker, actor)
    if moved is not None and RETRY_OPTION in actor.options:
        return already_ojs(actor.actor_name, "has an ojs_retry", moved.policy, moved.partials[-1])
    settings = Settings.of(actor, broker)
    if (option := settings.broken) is not None:
        value = f"{option}={getattr(settings, option)!r}"
        why = f"{value}: Dramatiq itself raises an error over it, and a job that fails is lost"
        if option == "throws":
            why += "; the bridge refuses an actor with it"
        return Planned(actor.actor_name, None, None, (), (), unreadable=why)
    opened = (*open_by_settings(settings, broker), *open_by_code(fleet, broker, actor))
    native = Native.unknown() if opened else _native(settings, broker)
    own_retry_when = native.runs == NOT_KNOWN and settings.is_asked
    policy = None if opened else _policy(settings)
    return Planned(
        actor.actor_name,
        native,
        policy,
        () if policy is None else tuple(_differences(native, policy)),
        tuple(hazards(settings, native, broker)),
        open=opened or ((_own_retry_when(settings),) if own_retry_when else ()),
    )


def _own_retry_when(settings: Settings) -> Open:
    """Return what leaves it open how often an actor runs that has a `retry_when` of its own."""
    return Open(where_of(settings.retry_when), "retry_when says at each failure whether there is a retry")


def _native(settings: Settings, broker: Broker) -> Native:
    if settings.retries is None:
        end = "it is acknowledged as if it had succeeded: this broker has no Retries"
        return Native.computed(1, settings.wait, retries="nothing", final="every error", at_the_end=end)
    retried = "every error, time limits and shutdowns too"
    once = settings.runs == 1
    final = f"throws: {', '.join(map(_name, settings.thrown))}" if settings.thrown else "nothing"
    return Native.computed(
        settings.runs,
        settings.wait,
        retries="nothing" if once else retried if settings.retry_when is None else "what retry_when says",
        final="every error" if once else final,
        at_the_end=_end(settings.actor, broker),
    )


def _name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _end(actor: Actor[..., Any], broker: Broker) -> str:
    heir = actor.options.get("on_retry_exhausted")
    told = f"; then the actor {heir} is sent it" if heir else ""
    return f"{_grave(actor, broker)}{told}"


def _grave(actor: Actor[..., Any], broker: Broker) -> str:
    """Say where a broker puts what has failed, and for how long, where it is one of Dramatiq's own."""
    queue = f"it goes to the dead queue {xq_name(actor.queue_name)}"
    if is_redis(broker):
        return f"{queue}, which keeps it for {spoken(broker.dead_message_ttl / 1000)}"  # type: ignore[attr-defined]
    if is_broker(broker, "rabbitmq", "RabbitmqBroker"):
        ttl = sys.modules["dramatiq.brokers.rabbitmq"].DEAD_MESSAGE_TTL
        return f"{queue}, which keeps it for {spoken(ttl / 1000)}"
    if is_broker(broker, "stub", "StubBroker"):
        return f"{queue}, in this process's memory"
    return f"{type(broker).__name__} is told that it has failed, and does with it what it does"


def _policy(settings: Settings) -> dict[str, Any]:
    if settings.retries is None:
        return partial_to_ojs({"max_attempts": 1, "on_exhaustion": "discard"})
    found = native_partial({"min_backoff": settings.min_backoff, "max_backoff": settings.max_backoff})
    if isinstance(settings.runs, int):
        found = {"max_attempts": settings.runs, **found}
    if settings.thrown:
        found["non_retryable_errors"] = [*map(_name, settings.thrown)]
    kind = {"backoff_strategy": "exponential", "backoff_coefficient": 2.0, "jitter": True}
    return partial_to_ojs({**found, **kind, "on_exhaustion": "dead_letter"})


def _differences(native: Native, found: dict[str, Any]) -> Iterator[str]:
    policy = RetryPolicy.merge(found)
    waits = [] if native.waits == NOT_KNOWN else [*native.waits]
    yield from differing(waits, [policy_wait(policy, n) for n in range(1, len(waits) + 1)])
