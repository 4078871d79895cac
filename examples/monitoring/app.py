"""A worker's module: one actor, counted for Prometheus."""

import os

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from ojs_bridge import Bridge
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.instrumentation import prometheus

bridge = Bridge(os.environ["SHOP_STORE"], retry={"max_attempts": 1, "on_exhaustion": "dead_letter"})
prometheus.instrument(bridge)
broker = RedisBroker(url=os.environ["SHOP_BROKER"])
broker.add_middleware(OJSRetries(bridge))
dramatiq.set_broker(broker)


@dramatiq.actor
def pay(card: str) -> None:
    """Take a payment."""
    if card == "stolen":
        raise PermissionError(card)
