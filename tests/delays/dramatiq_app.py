"""The Dramatiq broker of a fleet whose jobs are delayed, with the framework's defaults."""

from __future__ import annotations

import os

import dramatiq
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.errors import Retry
from dramatiq.middleware import CurrentMessage

from ojs_bridge import Bridge
from ojs_bridge.dramatiq import install
from tests.chaos.ledger import Ledger
from tests.delays.settings import QUEUE, TASK, VARIABLE, Settings


def make_broker(settings: Settings, bridge: Bridge | None = None) -> dramatiq.Broker:
    """Build the broker, with the bridge if it has a store."""
    broker: dramatiq.Broker = (RedisBroker if settings.on_redis else RabbitmqBroker)(url=settings.broker)
    broker.add_middleware(CurrentMessage())
    ledger = Ledger(settings.ledger)
    if settings.store is not None:
        install(broker, bridge or settings.bridge())

    @dramatiq.actor(broker=broker, actor_name=TASK, queue_name=QUEUE, max_retries=1)
    def mark(job: str, retry_in: float | None = None) -> None:
        """Note this run; the first one asks for another one, if told so."""
        message = CurrentMessage.get_current_message()
        assert message is not None
        attempt = message.options.get("retries", 0) + 1
        if retry_in is not None and attempt == 1:
            ledger.note("failed", job, attempt)
            raise Retry(delay=round(retry_in * 1000))
        ledger.note("start", job, attempt)

    return broker


if VARIABLE in os.environ:
    dramatiq.set_broker(make_broker(Settings.from_env()))
