"""A Dramatiq broker whose actors do what their jobs' arguments say, and note each of their runs.

A worker process imports `broker` from here.
"""

from __future__ import annotations

import os
import pkgutil
import re
import signal
import time
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker, _RabbitmqConsumer
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import CurrentMessage, Middleware
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend
from redis import Sentinel

from ojs_bridge import Bridge
from ojs_bridge.dramatiq import OJSRetries, brokers, keeping
from ojs_bridge.dramatiq.on_redis import JointAcknowledgements
from ojs_bridge.engine import heartbeat
from tests import faults
from tests.contract.notes import ELSEWHERE, MASTER, UNACKNOWLEDGED, VARIABLE, Noting, Settings, bridge_of
from tests.contract.steps import ERRORS, KEEP, Run, Step

#: The tasks, with their options.
ACTORS: dict[str, dict[str, Any]] = {
    "act": {},
    "act_kept": {"ojs_retry": {"max_attempts": 2, **KEEP}},
    "interruptible": {"notify_shutdown": True},
}


class Publishing(Middleware):
    """Notes the messages that are published, and dies, once, where a message asks for it."""

    def __init__(self, noting: Noting) -> None:
        self._noting = noting

    def before_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        """Die, perhaps."""
        if message.options.get("deadly") and self._noting.note("died", message.message_id, delay) == 1:
            os.killpg(0, signal.SIGKILL)

    def after_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        """Note it."""
        self._noting.note("calls", message.message_id, ["after_publish"])


class Limited(RabbitmqBroker):
    """A broker whose queues drop what was delivered too often."""

    deliveries = 5

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        arguments = super()._build_queue_arguments(queue_name)
        return {**arguments, "x-queue-type": "quorum", "x-delivery-limit": self.deliveries}


def make_broker(settings: Settings) -> tuple[dramatiq.Broker, Bridge]:
    """Make a fleet's broker and its bridge, in a worker or in the process that sends."""
    # The bridge first, because Sentry instruments the brokers that are made after it.
    bridge, broker = bridge_of(settings), _bare_broker(settings)
    broker.add_middleware(CurrentMessage())
    broker.add_middleware(OJSRetries(bridge))
    broker.add_middleware(Results(backend=RedisBackend(url=settings.backend, namespace=settings.queue)))
    noting = Noting(settings.backend)
    broker.add_middleware(Publishing(noting))
    for name in settings.middleware:
        broker.add_middleware(pkgutil.resolve_name(name)())

    def run(*steps: Step, **named: Any) -> Any:
        message = CurrentMessage.get_current_message()
        assert message is not None
        options = message.options
        note = {
            "at": time.time(),
            "pid": os.getpid(),
            "retries": options.get("retries", 0),
            "state": options.get("ojs"),
            "meta": options,
        }
        n = noting.note("runs", message.message_id, note)
        return Run(n, None, named, noting.url, lambda: broker.enqueue(message)).does(steps)

    def follow_up(word: str, before: Any) -> None:
        noting.note("followed", word, before)

    queue: dict[str, Any] = {"broker": broker, "queue_name": settings.queue}
    for name, options in ACTORS.items():
        dramatiq.actor(run, actor_name=name, ojs_errors=ERRORS, **queue, **options)
    dramatiq.actor(follow_up, **queue)
    dramatiq.actor(follow_up, actor_name="elsewhere", broker=broker, queue_name=f"{settings.queue}-other")
    return broker, bridge


def _bare_broker(settings: Settings) -> dramatiq.Broker:
    if not settings.broker:
        return StubBroker()
    if settings.broker.startswith("amqp"):
        return (Limited if settings.deliveries else RabbitmqBroker)(
            url=settings.broker, confirm_delivery=True
        )
    sentinel = re.fullmatch("sentinel://(.*):(.*)", settings.broker)
    options = (
        {"client": Sentinel([sentinel.groups()]).master_for(MASTER)} if sentinel else {"url": settings.broker}
    )
    return RedisBroker(
        namespace=settings.queue,
        heartbeat_timeout=round(1000 * (settings.visibility or 60)),
        maintenance_chance=1_000_000,
        **options,
    )


if VARIABLE in os.environ:
    settings = Settings.from_env()
    keeping.KEPT_AT_MOST = brokers.OnRabbitMQ.kept_at_most = settings.longest_wait
    broker, _ = make_broker(settings)
    if UNACKNOWLEDGED in os.environ:
        for place, names in {
            _RabbitmqConsumer: ["ack", "nack"],
            broker: ["do_ack", "do_nack"],
        }.items():
            for name in names:
                setattr(place, name, lambda *_: None)
        JointAcknowledgements._send = lambda acks, lot: lot  # type: ignore[method-assign]
    if ELSEWHERE in os.environ:
        heartbeat.lives_here = lambda holder: None
    faults.arm([*faults.STEPS_OF["dramatiq"], *faults.HELD])
    dramatiq.set_broker(broker)
