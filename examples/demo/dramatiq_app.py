"""The demonstration's Dramatiq broker: `dramatiq dramatiq_app`."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from jobs import TASK_POLICY
from project import VALKEY_URL, bridge, perform
from workers import KILLED_QUEUE

from ojs_bridge.dramatiq import OJSRetries

broker = RedisBroker(url=VALKEY_URL)
broker.add_middleware(OJSRetries(bridge))
dramatiq.set_broker(broker)


def _perform(name: str) -> None:
    """Perform one of the demonstration's jobs."""
    perform("dramatiq", name)


demo = dramatiq.actor(_perform, actor_name="demo", queue_name="demo", ojs_retry=TASK_POLICY)
killed = dramatiq.actor(_perform, actor_name="killed", queue_name=KILLED_QUEUE, ojs_retry=TASK_POLICY)
