"""What settings of a broker or a bridge take from the promises, said in one line each at a worker's start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from dramatiq.broker import Broker

from ..bridge import Bridge
from .on_redis import is_broker, is_redis

logger = logging.getLogger("ojs_bridge")

#: How long RabbitMQ waits for an acknowledgement, unless its `consumer_timeout` says otherwise.
PATIENCE = timedelta(minutes=30)


def say_caveats(broker: Broker, bridge: Bridge) -> None:
    """Warn of every setting that takes something from the promises."""
    for caveat in _caveats(broker, bridge):
        logger.warning("%s", caveat)


def _caveats(broker: Any, bridge: Bridge) -> Iterator[str]:
    if bridge.store is None and (is_redis(broker) or is_broker(broker, "rabbitmq", "RabbitmqBroker")):
        yield (
            "no store: a job that kills its worker is delivered again without an attempt being counted, and "
            "long delays wait in the memory of workers"
        )
    if is_broker(broker, "rabbitmq", "RabbitmqBroker") and bridge.store and bridge.park_after >= PATIENCE:
        yield (
            f"park_after is {bridge.park_after}: RabbitMQ takes a delayed job back from its worker after its "
            f"consumer_timeout, {PATIENCE} by default, again and again; let park_after be shorter"
        )
    if is_redis(broker):
        yield from _redis_caveats(broker)


def _redis_caveats(broker: Any) -> Iterator[str]:
    settings = _settings_of(broker)
    policy = settings.get("maxmemory-policy", "noeviction")
    if settings.get("maxmemory", "0") != "0" and policy != "noeviction":
        yield f"the broker's Redis may evict jobs: set maxmemory-policy noeviction, not {policy}"
    if settings.get("appendonly") == "no" and settings.get("save") == "":
        yield "the broker's Redis keeps no job over a restart: set appendonly yes"


def _settings_of(broker: Any) -> dict[str, str]:
    """Return the server's settings; none where CONFIG is not allowed, or nobody answers yet."""
    found: dict[str, str] = {}
    for name in ("maxmemory", "maxmemory-policy", "appendonly", "save"):
        try:
            found |= broker.client.config_get(name)
        except Exception:  # noqa: BLE001 - a caveat that cannot be found out stops no worker
            return {}
    return found
