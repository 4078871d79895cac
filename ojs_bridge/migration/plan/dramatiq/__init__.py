"""The plan of a broker: each actor, the policy nearest to it, its hazards, and the check by a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import dramatiq
from dramatiq import Actor, Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AgeLimit, CurrentMessage, Middleware, Retries, SkipMessage, TimeLimit

from ....bridge import Bridge
from ....config.policies import EntryFields
from ....dramatiq import OJSRetries, install
from ....dramatiq.actors import OF_RETRIES, PARK_OPTION, options_as_policy, unreadable
from ....dramatiq.brokers import PATIENCE, kind_of
from ....dramatiq.compat import settings_of
from ....engine.layers import TaskPolicy, in_ojs
from ....errors import ConfigurationError
from ....messages import RETRY_OPTION
from ....rules.notations import spoken
from ....rules.policy import RetryPolicy, partial_to_ojs
from .. import (
    LIMIT,
    NOT_KNOWN,
    Hazard,
    Measured,
    Moved,
    NativeRetries,
    Open,
    Planned,
    WaitRange,
    already_ojs,
    counting,
    differing,
    measurable,
    measure,
    moved_already,
    once,
    pickled,
    planned,
    policy_wait,
    raised_for,
    unpickles,
)
from ..code import functions_imported, is_the_users, wrapped
from ..sends import Send, Sending, long_ones, with_delays
from ..storms import libraries_of, with_storms
from .reading import Around, Settings, place_of, retries_of

#: Longer waits should not be in a worker's memory.
_LONG = PATIENCE.total_seconds()
#: The methods that send with a delay if they are given actors; `message_with_options` does so in a pipeline.
_MAY_SEND = frozenset(("enqueue", "run", "message_with_options"))
_ONCE = {"max_attempts": 1, "on_exhaustion": "discard"}


def plans(broker: Broker, names: Collection[str] = (), *, protect: bool = False) -> list[Planned]:  # noqa: ARG001
    """Return the plans of a broker's actors, sorted by name.

    With `names`, patterns such as `billing.*`, only of the actors that match one. `protect` changes
    nothing: Dramatiq acknowledges a message when its job has ended. Options and code are read.
    No actor is called, nothing is sent, and no broker is asked. Raises ConfigurationError for a name that
    matches no actor.
    """
    actors, around, own = broker.actors, Around(broker), _bridged(broker)
    plans = planned(actors, names, "actor", lambda name: _plan(around, broker, actors[name]))

    def is_parked(name: str) -> bool:
        if own is None:
            return bool(actors[name].options.get(PARK_OPTION))
        delays = own.delays if name in own.actors.tasks else None
        return delays is not None and delays.may_park and delays.are_asked_for(actors[name])

    def today(_name: str, seconds: float) -> str:
        memory = kind_of(broker).long_wait() if seconds > _LONG else "in a worker's memory"
        perhaps = "" if math.isfinite(seconds) else "if it is long, "
        return f"{perhaps}it is all the time {memory}; a worker holds 1,000 such jobs for each of its threads"

    known = own.bridge.engine.dependencies if own else None
    stormy = [*with_storms(plans, lambda name: libraries_of(wrapped(actors[name].fn)), known)]
    return [*with_delays(stormy, sends(broker), is_parked, today)]


def sends(broker: Broker) -> list[Send]:
    """Return the places of the user's code that send messages with long delays."""

    def name_of(value: object) -> str:
        name = value.actor_name if issubclass(type(value), Actor) else value  # type: ignore[attr-defined]
        return name if type(name) is str and name in broker.actors else ""

    functions = [x for actor in broker.actors.values() for x in wrapped(actor.fn)]
    sending = Sending({"delay": 0.001}, frozenset({"send_with_options"}), _MAY_SEND, name_of)
    own = _bridged(broker)
    return long_ones(
        sending.sends(dict.fromkeys((*functions, *functions_imported("dramatiq")), ())),
        own.bridge.settings if own else None,
    )


def _bridged(broker: Broker) -> OJSRetries | None:
    return next((m for m in broker.middleware if isinstance(m, OJSRetries)), None)


def _task_policy(broker: Broker, actor: Actor[..., Any]) -> TaskPolicy | None:
    """Return the policy of an actor under the bridge, else None."""
    own = _bridged(broker)
    return own.actors.tasks.get(actor.actor_name) if own else None


def _plan(around: Around, broker: Broker, actor: Actor[..., Any]) -> Planned:
    moved = _task_policy(broker, actor)
    if moved is not None and RETRY_OPTION in actor.options:
        return already_ojs(actor.actor_name, "has an ojs_retry", moved.policy, moved.layers.task)
    settings = Settings.of(actor, broker, around.given(actor))
    if (option := settings.broken) is not None:
        value = f"{option}={getattr(settings, option)!r}"
        why = f"{value}: Dramatiq itself raises an error for it, and a job that fails is lost"
        if unreadable({option: getattr(settings, option)}):
            why += "; the bridge leaves the actor to Dramatiq"
        return Planned(actor.actor_name, unreadable=why)
    if opened := once(around.open_lines(settings)):
        native = NativeRetries.unknown()
        return Planned(
            actor.actor_name, native, hazards=tuple(_hazards(settings, native, broker)), open=opened
        )
    native, policy = _native(settings, broker), _policy(settings)
    if native.runs == NOT_KNOWN:
        why = "retry_when says at each failure whether there is a retry"
        opened = (Open(place_of(settings.retry_when), why),)
    merged = RetryPolicy.merge(policy)
    then = [policy_wait(merged, n) for n in range(1, len(native.waits) + 1)]
    differences, hazards = differing(native.waits, then), _hazards(settings, native, broker)  # type: ignore[arg-type]
    return Planned(actor.actor_name, native, policy, tuple(differences), tuple(hazards), open=opened)


def _native(settings: Settings, broker: Broker) -> NativeRetries:
    if settings.retries is None:
        end = "it is acknowledged as if it had succeeded: this broker has no Retries"
        return NativeRetries.computed(
            1, settings.wait, retries="nothing", final="every error", at_the_end=end
        )
    retried = "every error, time limits and shutdowns too"
    once = settings.runs == 1
    refused = [f"throws: {', '.join(map(_name, settings.thrown))}"] if settings.thrown else []
    refused += ["what retry_when refuses"] if settings.retry_when is not None else []
    final = ", and ".join(refused) or "nothing"
    heir = settings.actor.options.get("on_retry_exhausted")
    heirs = f"; then the actor {heir} is sent it" if heir else ""
    return NativeRetries.computed(
        settings.runs,
        settings.wait,
        retries="nothing" if once else retried if settings.retry_when is None else "what retry_when says",
        final="every error" if once else final,
        at_the_end=f"{kind_of(broker).dead_places.in_words(settings.actor.queue_name)}{heirs}",
    )


def _name(cls: type[BaseException]) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _policy(settings: Settings) -> dict[str, Any]:
    if settings.retries is None:
        return partial_to_ojs(_ONCE)
    backoff = {"min_backoff": settings.min_backoff, "max_backoff": settings.max_backoff}
    fields = in_ojs(options_as_policy(backoff))
    if isinstance(settings.runs, int):
        fields = {"max_attempts": settings.runs, **fields}
    if settings.thrown:
        fields["non_retryable_errors"] = [*map(_name, settings.thrown)]
    kind = {"backoff_strategy": "exponential", "backoff_coefficient": 2.0, "jitter": True}
    return partial_to_ojs({**fields, **kind, "on_exhaustion": "dead_letter"})


def _hazards(settings: Settings, native: NativeRetries, broker: Broker) -> Iterator[Hazard]:
    """Yield the hazards of an actor."""
    moved = _task_policy(broker, settings.actor)
    if moved is not None:
        yield moved_already(moved.policy, "Dramatiq")
    if settings.retries is None:
        yield Hazard(
            "no-retries",
            "the broker has no Retries middleware: a job that fails is acknowledged as if it had succeeded, "
            "and nothing keeps it; on_exhaustion=dead_letter would",
        )
        if unread := sorted(OF_RETRIES & settings.actor.options.keys()):
            text = f"{', '.join(unread)} is never read, as the broker has no Retries: a job runs once"
            yield Hazard("unused-retry-options", f"{text}, under plain install, too")
    else:
        yield from _of_retries(settings, native)
    yield from _of_waits(settings, native, broker)
    if less := kind_of(broker).less:
        yield Hazard("unknown-broker", less)
    if unpickles(dramatiq.get_encoder().decode):
        yield pickled("messages are pickled")


def _of_retries(settings: Settings, native: NativeRetries) -> Iterator[Hazard]:
    if native.runs not in (NOT_KNOWN, 1):
        yield counting(native.runs)
    if native.runs == 1:
        yield Hazard(
            "lost-worker",
            "max_retries=0, and yet Dramatiq runs a job again whose worker dies; under the bridge the lost "
            "worker has used the only attempt, and the job is a dead letter",
            differs=True,
        )
    if settings.retry_when is not None:
        asked = (
            "the bridge goes on asking it: set max_attempts for jobs that it never ends"
            if settings.is_asked
            else "it is set on the broker's Retries: a policy that says max_attempts takes its place"
        )
        yield Hazard(
            "retry-when",
            f"retry_when takes the place of max_retries, and its answers cannot be read; {asked}",
        )
    if names := ", ".join(cls.__name__ for cls in settings.thrown):
        yield Hazard(
            "throws",
            f"throws={names} also rules out subclasses, which non_retryable_errors does not name; the bridge "
            "goes on reading throws, so leave it on the actor",
        )


def _of_waits(settings: Settings, native: NativeRetries, broker: Broker) -> Iterator[Hazard]:
    waits = () if native.waits == NOT_KNOWN else native.waits
    longest = max((wait.most for wait in waits), default=0.0)
    if longest > _LONG:
        memory = kind_of(broker).long_wait()
        text = f"a retry may wait {spoken(longest)}, all the time {memory}; with a store the bridge parks it"
        yield Hazard("long-delays", text)
    limit = _over(broker, settings, TimeLimit, "time_limit") or math.inf
    if twice := kind_of(broker).long_run(limit / 1000):
        yield Hazard("over-run", twice)
    if age := _over(broker, settings, AgeLimit, "max_age"):
        late = not isinstance(native.span, WaitRange) or native.span.most > age / 1000
        but = ", perhaps before its retries are through" if late else ""
        yield Hazard("age-limit", f"max_age drops a job that is {spoken(age / 1000)} old{but}")


def _over(broker: Broker, settings: Settings, cls: type[Middleware], option: str) -> Any:
    """Return an actor's option, else that of its broker's middleware; None where neither has one."""
    of_middleware = next((getattr(m, option) for m in broker.middleware if isinstance(m, cls)), None)
    return settings.actor.options.get(option, of_middleware)


class _Delays(Middleware):
    """Records the wait of each message."""

    def __init__(self) -> None:
        self.heard: list[float] = []

    def before_enqueue(self, _broker: Broker, _message: Any, delay: int | None) -> None:
        if delay is not None:
            self.heard.append(delay / 1000)


class _Standing(Bridge):
    """A bridge whose clock stands still, or a busy machine would shorten waits; put ahead, a retry is due."""

    ahead = timedelta(0)

    @cached_property
    def _began(self) -> datetime:
        return super()._now()

    def _now(self) -> datetime:
        return self._began + self.ahead


def measured(broker: Broker, planned_tasks: Sequence[Planned]) -> list[Planned]:
    """Return a plan after measuring the actors that can be measured; raises ConfigurationError.

    Bodies are not run. The actors run on a broker in memory, with the broker's `Retries` and the user's own
    middleware, whose hooks run. What a hook sends to the broker itself goes nowhere.
    """
    if any(_task_policy(broker, actor) for actor in broker.actors.values()):
        raise ConfigurationError("verify: the broker is under the bridge already: name it as it was before")
    actors = [broker.actors[name] for name in measurable(planned_tasks)]
    with patch.object(broker, "enqueue", lambda message, **_: message):
        return measure(
            planned_tasks, partial(_measured, _alike(broker, actors)), partial(_moved, _alike(broker, actors))
        )


def _moved(broker: StubBroker, url: str, entries: Mapping[str, EntryFields]) -> Iterator[Moved]:
    bridge = _Standing(url, retry={}, park_after=timedelta(days=3650))
    install(broker, bridge, policies=entries, canary=100)
    for middleware in broker.middleware:
        if not _is_own(middleware):  # the user's own may start threads
            middleware.after_process_boot(broker)
    for name, actor in broker.actors.items():
        if moved := _task_policy(broker, actor):
            yield name, (_measured(broker, name, bridge), moved.policy)
    bridge.stop()


def _alike(own: Broker, actors: Sequence[Actor[..., Any]]) -> StubBroker:
    """Return a broker in memory with the retries and the user's middleware of a broker, and with actors."""
    retries = retries_of(own)
    kept = (m for m in own.middleware if m is retries or type(m) is CurrentMessage or _is_own(m))
    middleware = [Retries(**settings_of(retries)) if m is retries else m for m in kept]
    broker = StubBroker(middleware=[*middleware, _Delays()])
    for actor in actors:
        broker.declare_actor(
            Actor(
                lambda *_: None,
                broker=broker,
                actor_name=actor.actor_name,
                queue_name=actor.queue_name,
                priority=actor.priority,
                options=dict(actor.options),
            )
        )
    return broker


def _is_own(middleware: Middleware) -> bool:
    """Return whether a middleware is neither Dramatiq's nor an instrumentation's."""
    return is_the_users(type(middleware).__module__)


def _measured(broker: StubBroker, name: str, bridge: _Standing | None = None) -> Measured:
    """Fail a message and each of its retries, as a worker would, without waiting."""
    waits = next(m.heard for m in broker.middleware if isinstance(m, _Delays))
    waits.clear()
    broker.actors[name].send()
    runs, ended = 0, ""
    while runs < LIMIT and not ended and (message := _taken(broker)):
        runs += 1
        if bridge and waits:
            bridge.ahead += timedelta(seconds=waits[-1] + 1)
        try:
            broker.emit_before("process_message", message)
        except SkipMessage:
            broker.emit_after("skip_message", message)
            ended = "skipped"
        else:
            broker.emit_after("process_message", message, exception=raised_for(()))
            ended = "dead" if message.failed else ""
    _taken(broker)
    return Measured(runs, tuple(waits), ended)


def _taken(broker: StubBroker) -> MessageProxy | None:
    """Take the only message out of its queue, and return it."""
    for queue in broker.queues.values():
        if not queue.empty():
            return MessageProxy(Message.decode(queue.get_nowait()))
    return None
