"""An app of either framework whose broker no test can reach, under virtual time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.rate_limits.backends import RedisBackend as RedisLimits
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

import ojs_bridge.celery
import ojs_bridge.dramatiq
from ojs_bridge import Bridge
from ojs_bridge.testing import VirtualTime, virtual_time

#: No server listens there.
NOWHERE = "redis://127.0.0.1:1/0"
CRM = {
    "max_attempts": 5,
    "initial_interval": "PT15S",
    "backoff_coefficient": 4.0,
    "max_interval": "PT1H",
    "on_exhaustion": "dead_letter",
}


@dataclass
class Shop:
    """A user's app or broker, and the same tasks of both frameworks."""

    target: Any
    bridge: Bridge
    is_celery: bool

    def task(self, fn: Callable[..., Any], name: str | None = None, **retry: Any) -> Any:
        """Declare a task under a policy."""
        fn.__name__ = name = name or fn.__name__
        if self.is_celery:
            return ojs_bridge.celery.ojs_task(self.target, name=name, retry=retry, shared=False)(fn)
        return dramatiq.actor(fn, actor_name=name, broker=self.target, ojs_retry=retry, store_results=True)

    def send(self, task: Any, *args: Any, delay: float = 0, **options: Any) -> str:
        """Send a job; return its id."""
        if self.is_celery:
            sent: str = task.apply_async(args, countdown=delay or None, **options).id
            return sent
        milliseconds = round(delay * 1000) or None
        return str(task.send_with_options(args=args, delay=milliseconds, **options).message_id)


def celery_shop(bridge: Bridge) -> Shop:
    """A Celery app on Redis."""
    app = Celery("shop", broker=NOWHERE, backend=NOWHERE, set_as_current=False)
    ojs_bridge.celery.install(app, bridge, policies={})
    return Shop(app, bridge, is_celery=True)


def dramatiq_shop(bridge: Bridge) -> Shop:
    """A Dramatiq broker on Redis."""
    broker = RedisBroker(url=NOWHERE)
    broker.add_middleware(Results(backend=RedisBackend(url=NOWHERE)))
    broker.add_middleware(dramatiq.middleware.GroupCallbacks(RedisLimits(url=NOWHERE)))
    ojs_bridge.dramatiq.install(broker, bridge, policies={})
    return Shop(broker, bridge, is_celery=False)


def amqp_shop(bridge: Bridge) -> Shop:
    """A Celery app on RabbitMQ."""
    app = Celery("shop", broker="amqp://127.0.0.1:1//", set_as_current=False)
    ojs_bridge.celery.install(app, bridge, policies={})
    return Shop(app, bridge, is_celery=True)


def rabbitmq_shop(bridge: Bridge) -> Shop:
    """A Dramatiq broker on RabbitMQ."""
    broker = RabbitmqBroker(url="amqp://127.0.0.1:1//")
    broker.add_middleware(Results(backend=RedisBackend(url=NOWHERE)))
    ojs_bridge.dramatiq.install(broker, bridge, policies={})
    return Shop(broker, bridge, is_celery=False)


@pytest.fixture(params=[celery_shop, dramatiq_shop], ids=["celery", "dramatiq"])
def shop(request: pytest.FixtureRequest) -> Shop:
    """A shop of each framework."""
    made: Shop = request.param(Bridge())
    return made


@pytest.fixture
def ojs(shop: Shop) -> Iterator[VirtualTime]:
    """The jobs of the shop under virtual time."""
    with virtual_time(shop.target) as ojs:
        yield ojs
