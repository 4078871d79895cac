"""The Dramatiq broker of a storm; natively its actor has a backoff from one second."""

from __future__ import annotations

import os
from typing import Any

import dramatiq
import requests
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage

from ojs_bridge.dramatiq import install
from ojs_bridge.rules.backoff import Rng
from tests.chaos.ledger import Ledger
from tests.storm.settings import TASK, VARIABLE, Settings

QUEUE = "storm-dramatiq"


def make_broker(settings: Settings) -> dramatiq.Broker:
    """Build the broker."""
    broker: dramatiq.Broker = RedisBroker(url=settings.broker)
    broker.add_middleware(CurrentMessage())
    is_native = settings.side == "native"
    ledger = Ledger(settings.ledger)
    longest = settings.longest

    def jittered(_n: int, seconds: float, rng: Rng) -> float:
        """Return the delay that Dramatiq would have."""
        delay = seconds * (1 + rng.random())
        return delay if delay <= longest else longest * (1 + rng.random()) / 2

    if not is_native:
        install(broker, settings.bridge(jittered))

    def call(job: str) -> None:
        """Call the dependency; note the last failure of a native job."""
        try:
            requests.get(f"{settings.url}/{job}", timeout=10).raise_for_status()
        except requests.RequestException:
            message = CurrentMessage.get_current_message()
            assert message is not None
            if is_native and message.options.get("retries", 0) + 1 == settings.attempts:
                ledger.note("dead", job, settings.attempts)
            raise

    native = {
        "max_retries": settings.attempts - 1,
        "min_backoff": 1000,
        "max_backoff": longest * 1000,
    }
    options: dict[str, Any] = native if is_native else {}
    actor: Any = dramatiq.actor
    actor(call, broker=broker, actor_name=TASK, queue_name=QUEUE, **options)
    return broker


if VARIABLE in os.environ:
    dramatiq.set_broker(make_broker(Settings.from_env()))
