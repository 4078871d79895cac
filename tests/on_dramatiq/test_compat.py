"""The private names of Dramatiq that the adapter needs are there, and a worker tells of one that is not."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from importlib import import_module

import dramatiq
import pytest
from dramatiq.broker import Broker, Consumer
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.dramatiq.actors import BootError
from ojs_bridge.dramatiq.compat import NAMES
from ojs_bridge.engine.private_names import Name

#: Nobody answers there, and nobody is asked.
NOWHERE = "127.0.0.1:9"
#: How a broker is made whose worker needs the names of a module; a StubBroker's needs the others.
BROKERS: dict[str, Callable[[], Broker]] = {
    "dramatiq.brokers.redis": lambda: RedisBroker(url=f"redis://{NOWHERE}"),
    "redis": lambda: RedisBroker(url=f"redis://{NOWHERE}"),
    "dramatiq.brokers.rabbitmq": lambda: RabbitmqBroker(url=f"amqp://{NOWHERE}"),
    "pika.adapters.blocking_connection": lambda: RabbitmqBroker(url=f"amqp://{NOWHERE}"),
}


def boot(broker: Broker) -> None:
    """Do what a worker does before it starts its threads."""
    retries = OJSRetries()
    broker.add_middleware(retries)
    try:
        retries.before_worker_boot(broker, None)
    finally:
        retries.bridge.stop()


def ids(name: Name) -> str:
    return f"{name.owner.rpartition('.')[2]}-{name.name}"


@pytest.mark.parametrize("name", NAMES.all, ids=ids)
def test_a_name_is_there(name: Name) -> None:
    assert name.is_there(), str(name)


@pytest.mark.parametrize("name", NAMES.all, ids=ids)
def test_a_name_that_is_gone_is_told_of(
    name: Name, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gone = dataclasses.replace(name, name=f"{name.name.replace(' or ', '_gone or ')}_gone")
    monkeypatch.setattr(NAMES, "all", [gone])
    broker = BROKERS.get(name.module, StubBroker)()
    said = f"Dramatiq {dramatiq.__version__}.*{gone.name}.*{name.needed_to[:20]}"
    if name.keeps_jobs:
        with pytest.raises(BootError, match=said):
            boot(broker)
    else:
        with caplog.at_level(logging.WARNING, "ojs_bridge"):
            boot(broker)
        assert gone.name in caplog.text


def test_a_consumer_that_keeps_what_it_fetched_elsewhere_stops_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(Consumer):
        """A consumer of some later release."""

    monkeypatch.setattr(import_module("dramatiq.brokers.redis"), "_RedisConsumer", Other)
    with pytest.raises(BootError, match="message_cache"):
        boot(BROKERS["redis"]())


def test_a_broker_needs_no_names_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [name for name in NAMES.all if name.module in BROKERS]
    monkeypatch.setattr(NAMES, "all", [dataclasses.replace(name, name="gone") for name in names])
    boot(StubBroker())
