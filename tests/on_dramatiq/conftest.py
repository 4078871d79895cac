"""Brokers and fleets for the Dramatiq tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from tests.on_dramatiq.fleet import Fleet, broker_of

KINDS = ("stub", "redis", "rabbitmq")


def url_of(request: pytest.FixtureRequest, kind: str) -> str:
    """The URL of the session's server for a kind of broker."""
    servers = {"redis": "valkey", "rabbitmq": "rabbitmq"}
    return request.getfixturevalue(servers[kind]).url if kind in servers else ""


@pytest.fixture(scope="module", params=KINDS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A working fleet with a store, which a module's tests share; it must leave nothing in its queues."""
    name = f"t{uuid4().hex[:10]}"
    store = tmp_path_factory.mktemp("store") / "ojs.db"
    broker = broker_of(request.param, url_of(request, request.param), name)
    fleet = Fleet(broker, name, store=f"sqlite:///{store}", errors={TimeoutError: "external.timeout"})
    fleet.declare(lambda: None)
    with fleet.working():
        yield fleet
    assert fleet.left() == 0
    fleet.broker.close()


@pytest.fixture(params=KINDS)
def broker(request: pytest.FixtureRequest, unique: str) -> Iterator[dramatiq.Broker]:
    """A fresh broker of each kind."""
    broker = broker_of(request.param, url_of(request, request.param), unique)
    yield broker
    broker.close()


@pytest.fixture
def stub() -> StubBroker:
    """A fresh StubBroker."""
    return StubBroker()


@pytest.fixture
def stubbed(stub: StubBroker, unique: str, tmp_path: Path) -> Callable[..., Fleet]:
    """Makes fleets on a StubBroker; `store` is its URL or None."""

    def make(**options: Any) -> Fleet:
        return Fleet(stub, unique, **{"store": f"sqlite:///{tmp_path}/ojs.db", **options})

    return make
