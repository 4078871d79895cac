"""The Dramatiq broker and actors of a chaos fleet, with the bridge or without."""

from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage

from ojs_bridge.dramatiq import OJSRetries
from tests.chaos.fates import FATES, FIRST_DELAY, LONGEST_DELAY, Fate, play
from tests.chaos.ledger import Ledger
from tests.chaos.settings import QUEUE, QUORUM, VARIABLE, Settings

#: Milliseconds without a sign of life after which Redis takes a worker for dead, and looks at once.
HEARTBEAT_TIMEOUT = 4_000
ALWAYS = 1_000_000


class QuorumBroker(RabbitmqBroker):
    """A broker whose jobs wait in quorum queues, as a user of RabbitMQ 4 may have them."""

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        return {**super()._build_queue_arguments(queue_name), **QUORUM}


def make_broker(settings: Settings) -> dramatiq.Broker:
    """Build the broker; with a store its actors are under the bridge, else they retry as Dramatiq does."""
    kind: Any
    options: dict[str, Any]
    if settings.on_redis:
        kind, options = RedisBroker, {"heartbeat_timeout": HEARTBEAT_TIMEOUT, "maintenance_chance": ALWAYS}
    else:
        kind, options = QuorumBroker, {"confirm_delivery": True}
    if not settings.hasty:
        kind, options = RedisBroker if settings.on_redis else RabbitmqBroker, {}
    url = settings.broker
    if settings.heartbeat and not settings.on_redis:
        url += f"?heartbeat={settings.heartbeat}"
    broker: dramatiq.Broker = kind(url=url, **options)
    broker.add_middleware(CurrentMessage())
    ledger = Ledger(settings.ledger)
    if settings.store is not None:
        broker.add_middleware(OJSRetries(settings.bridge(ledger)))
    for fate in FATES.values():
        _declare(broker, fate, ledger, bridged=settings.store is not None)
    return broker


def _declare(broker: dramatiq.Broker, fate: Fate, ledger: Ledger, *, bridged: bool) -> None:
    def run(job: str) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        play(ledger, job, message.options.get("retries", 0) + 1, lambda _: (os.getpid(),))

    native = {
        "max_retries": fate.max_attempts - 1,
        "min_backoff": int(FIRST_DELAY * 1000),
        "max_backoff": int(LONGEST_DELAY * 1000),
    }
    options: dict[str, Any] = {"ojs_retry": fate.policy} if bridged else native
    actor: Any = dramatiq.actor
    actor(run, broker=broker, actor_name=fate.name, queue_name=QUEUE, **options)


if VARIABLE in os.environ:
    dramatiq.set_broker(make_broker(Settings.from_env()))
