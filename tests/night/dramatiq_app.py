"""The Dramatiq broker of the shop."""

from __future__ import annotations

import os
from typing import Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker

from ojs_bridge import Bridge
from ojs_bridge.dramatiq import install
from ojs_bridge.instrumentation import prometheus
from tests.night.settings import DRAMATIQ, WORKER, Settings, work


def make_broker(settings: Settings, bridge: Bridge) -> dramatiq.Broker:
    """Build the broker."""
    broker: dramatiq.Broker = RedisBroker(url=settings.broker, socket_timeout=5, socket_connect_timeout=2)
    install(broker, bridge)
    for type_ in DRAMATIQ:
        _define(broker, settings, type_)
    return broker


def _define(broker: dramatiq.Broker, settings: Settings, type_: str) -> None:
    def run(job: str, order: dict[str, Any]) -> None:
        work(settings, type_, job, order)

    actor: Any = dramatiq.actor
    actor(run, broker=broker, actor_name=type_, queue_name=DRAMATIQ[type_])


if WORKER in os.environ:
    _settings = Settings.from_env()
    _bridge = _settings.bridge()
    prometheus.instrument(_bridge)
    broker = make_broker(_settings, _bridge)
    dramatiq.set_broker(broker)
