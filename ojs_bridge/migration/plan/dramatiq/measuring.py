"""Runs Dramatiq's actors in memory, with failures in place of their bodies: natively, then moved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

from dramatiq import Actor, Message
from dramatiq.broker import Broker, MessageProxy
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Middleware, Retries, SkipMessage

from ....bridge import Bridge
from ....config.policies import EntryFields
from ....dramatiq import install
from ....dramatiq.compat import settings_of
from ....errors import ConfigurationError
from .. import LIMIT, Measured, Moved, Planned, measurable, measure, raised_for
from ..code import is_the_users
from .reading import retries_of, task_policy


class _Delays(Middleware):
    """Records the wait of each message."""

    def __init__(self) -> None:
        self.heard: list[float] = []

    def before_enqueue(self, _broker: Broker, _message: Any, delay: int | None) -> None:
        if delay is not None:
            self.heard.append(delay / 1000)


class _Ahead(Bridge):
    """A bridge whose clock runs ahead, so that its retries are due at once."""

    ahead = timedelta(0)

    def _now(self) -> datetime:
        return super()._now() + self.ahead


def measured(broker: Broker, found: Sequence[Planned]) -> list[Planned]:
    """Return a plan after measuring the actors that can be measured; raises ConfigurationError.

    Bodies are not run. The actors run on a broker in memory, with the broker's `Retries` and the user's own
    middleware, whose hooks run. What a hook sends to the broker itself goes nowhere.
    """
    if any(task_policy(broker, actor) for actor in broker.actors.values()):
        raise ConfigurationError("verify: the broker is under the bridge already: name it as it was before")
    actors = [broker.actors[name] for name in measurable(found)]
    with patch.object(broker, "enqueue", lambda message, **_: message):
        return measure(
            found, partial(_measured, _alike(broker, actors)), partial(_moved, _alike(broker, actors))
        )


def _moved(broker: StubBroker, url: str, entries: Mapping[str, EntryFields]) -> Iterator[Moved]:
    bridge = _Ahead(url, retry={}, park_after=timedelta(days=3650))
    install(broker, bridge, policies=entries, canary=100)
    for middleware in broker.middleware:
        if not _is_own(middleware):  # the user's own may start threads
            middleware.after_process_boot(broker)
    for name, actor in broker.actors.items():
        if moved := task_policy(broker, actor):
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


def _measured(broker: StubBroker, name: str, bridge: _Ahead | None = None) -> Measured:
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
