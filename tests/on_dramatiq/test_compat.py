"""The private names of Dramatiq that the adapter needs are there, and a worker tells of one that is not."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version

import pytest
from dramatiq.broker import Broker, Consumer
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

from ojs_bridge.adapters.private_names import PrivateName
from ojs_bridge.dramatiq import OJSRetries, compat
from ojs_bridge.dramatiq.actors import BootError
from tests.faults import wrapped

NAMES = {f"{name.place}-{name.name}": name for name in compat.names()}
#: An address without a server; no test connects to it.
NOWHERE = "127.0.0.1:9"
#: A kind of names -> a broker whose worker needs them; a StubBroker's worker needs all other names.
BROKERS: dict[str, Callable[[], Broker]] = {
    compat.REDIS: lambda: RedisBroker(url=f"redis://{NOWHERE}"),
    compat.RABBITMQ: lambda: RabbitmqBroker(url=f"amqp://{NOWHERE}"),
}


def boot(broker: Broker) -> None:
    """Do what a worker does before it starts its threads."""
    retries = OJSRetries()
    broker.add_middleware(retries)
    try:
        retries.before_worker_boot(broker, None)
    finally:
        retries.bridge.stop()


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_is_there(name: PrivateName) -> None:
    """The run with the oldest supported versions has this test, too."""
    assert not name.is_missing, str(name)


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
def test_a_name_that_is_gone_is_told_of(
    name: PrivateName, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker with the broker that needs the name does not start, or it logs a warning."""
    gone = replace(name, name=f"{name.name}_gone", since="0")
    monkeypatch.setattr(compat, "names", lambda: [gone])
    broker = BROKERS.get(name.only, StubBroker)()
    installed = version(name.framework)
    said = f"{name.framework} {installed} has no {gone.name} in {name.place}, which the bridge needs to "
    if name.keeps_jobs:
        with pytest.raises(BootError, match=re.escape(said)):
            boot(broker)
    else:
        with caplog.at_level(logging.WARNING, "ojs_bridge"):
            boot(broker)
        assert said in caplog.text


@pytest.mark.parametrize(
    "name", [name for name in NAMES.values() if name.is_expected and name.name.isidentifier()], ids=str
)
def test_a_name_that_somebody_has_wrapped_is_used_and_told_of(
    name: PrivateName, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Instrumentation wraps the functions of a framework. A worker starts all the same."""
    monkeypatch.setattr(compat, "names", lambda: [name])
    broker = BROKERS.get(name.only, StubBroker)()
    with wrapped(name), caplog.at_level(logging.WARNING, "ojs_bridge"):
        boot(broker)
    told = (
        f"{name.name} in {name.place} is wrapped by tests.faults: the bridge uses it as it is to {name.need}"
    )
    said = [line for line in caplog.messages if name.place in line]
    assert said in ([], [told])
    if name in (compat.worker_id, compat.do_enqueue, compat.message, compat.redis_message_id):
        assert said == [told]


def test_a_consumer_that_keeps_what_it_fetched_elsewhere_stops_the_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Other(Consumer):
        """A consumer of some later release."""

    monkeypatch.setattr(import_module("dramatiq.brokers.redis"), "_RedisConsumer", Other)
    with pytest.raises(BootError, match="message_cache"):
        boot(BROKERS[compat.REDIS]())


def test_a_broker_needs_no_names_of_another_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [replace(name, name="gone") for name in NAMES.values() if name.only in BROKERS]
    monkeypatch.setattr(compat, "names", lambda: names)
    boot(StubBroker())
