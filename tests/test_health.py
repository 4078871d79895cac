"""The health of a fleet: real stores and brokers, away, silent, and well."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

import ojs_bridge.celery
import ojs_bridge.dramatiq
from ojs_bridge import Bridge
from ojs_bridge.engine.context import Context
from ojs_bridge.operations import health
from ojs_bridge.operations.health import Beat
from tests.cli.running import run
from tests.lives import Outbox, bridge_with_outbox
from tests.servers import RabbitMQ, Valkey, eventually
from tests.servers.ports import free_port
from tests.store.test_parked import parked

Lives = tuple[Bridge, Outbox]


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def statuses(bridge: Bridge, seconds: float = 30) -> dict[str, str]:
    found = bridge.operations.health.check(seconds)
    return {"all": found.status, **{name: check.status for name, check in found.checks.items()}}


def test_all_is_well(fleet: Lives) -> None:
    """A worker that started tells that it lives; without one, and with an overdue retry, all is not well."""
    bridge, _ = fleet
    assert bridge.store is not None
    assert statuses(bridge) == {
        "all": "degraded", "store": "ok", "broker": "ok", "workers": "degraded", "retries": "ok",
    }  # fmt: skip
    worker = Bridge(bridge.store)
    worker.start()
    try:
        eventually(lambda: statuses(bridge)["all"] == "ok", what="the first beat")
    finally:
        worker.stop()
    workers = bridge.operations.health.check().checks["workers"]
    assert workers.facts["seen"] == 1
    now = bridge.engine.now()
    bridge.store.park(parked("soon", next_retry_at=now - timedelta(seconds=30)))
    assert statuses(bridge)["retries"] == "ok"
    bridge.store.park(parked("late", next_retry_at=now - timedelta(seconds=300)))
    found = bridge.operations.health.check()
    assert (found.status, found.checks["retries"].status) == ("degraded", "degraded")
    assert found.checks["retries"].message.startswith("the oldest is 30")


def test_workers_of_long_ago(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker counts once, while it has told within the last ninety seconds; old beats are deleted."""
    bridge, _ = fleet
    beat = Beat(bridge.engine.context)
    for n in range(3):
        monkeypatch.setattr(health.os, "getpid", lambda n=n: n)
        beat.tell()
        beat.tell()
    monkeypatch.setattr(health, "_PAGE", 2)
    assert bridge.operations.health.check().checks["workers"].facts["seen"] == 3
    monkeypatch.setattr(health, "LATELY", timedelta(0))
    assert bridge.operations.health.check().checks["workers"].status == "degraded"
    monkeypatch.setattr(bridge.dead_letters, "_clock", lambda: bridge.engine.now() + health.KEPT)
    bridge.dead_letters.prune_once_a_period()
    assert bridge.store is not None
    assert bridge.store.list_documents(health.KIND, limit=9, cursor=None).documents == ()


def test_a_worker_whose_clock_goes_ahead(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen if it is a little ahead; otherwise it would be seen long after its death."""
    bridge, _ = fleet
    now = bridge.engine.now()
    for ahead, seen in ((3600, 0), (60, 1)):
        late = Context(bridge.store, lambda ahead=ahead: now + timedelta(seconds=ahead), *[None] * 4)  # type: ignore[arg-type]
        monkeypatch.setattr(health.os, "getpid", lambda ahead=ahead: ahead)
        Beat(late).tell()
        assert bridge.operations.health.check().checks["workers"].facts["seen"] == seen


def test_a_store_that_is_away(silent: int) -> None:
    """One that refuses is told with its words; one that keeps silent is told in time, and asked once."""
    for port, told in ((free_port(), "refused"), (silent, "no answer within 0.5 s")):
        bridge, _ = bridge_with_outbox(f"redis://127.0.0.1:{port}")
        begun = time.monotonic()
        for _ in range(3):
            found = bridge.operations.health.check(0.5)
            assert (found.status, found.checks["store"].status) == ("away", "away")
            assert told in found.checks["store"].message
            assert found.checks["workers"].status == "unknown"
        assert time.monotonic() - begun < 5
        asking = [thread for thread in threading.enumerate() if thread.name == "ojs-health-store"]
        assert len(asking) == (1 if port == silent else 0)


def test_a_store_of_a_newer_version(tmp_path: Path) -> None:
    """Also where the store was of this version when the process began."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge = Bridge(url)
    assert bridge.operations.health.check().checks["store"].message == "empty"
    bridge.dead_letters.stats()
    assert bridge.operations.health.check().checks["store"].facts == {"schema": 4}
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE ojs_schema SET version = 99"))
    engine.dispose()
    found = bridge.operations.health.check()
    assert (found.status, found.checks["store"].status) == ("away", "away")
    assert "the store has schema 99" in found.checks["store"].message


def test_a_broker_that_is_away(fleet: Lives) -> None:
    bridge, outbox = fleet
    outbox.raises = ConnectionError("down")
    found = bridge.operations.health.check()
    assert (found.status, found.checks["broker"].message) == ("away", "down")
    assert statuses(Bridge(bridge.store))["broker"] == "unknown"
    assert statuses(Bridge())["store"] == "unknown"


@pytest.mark.parametrize("kind", ["valkey", "rabbitmq"])
def test_brokers_of_celery(kind: str, request: pytest.FixtureRequest) -> None:
    server: Valkey | RabbitMQ = request.getfixturevalue(kind)
    for url, status in (
        (server.url, "ok"),
        (f"{server.url.partition(':')[0]}://127.0.0.1:{free_port()}", "away"),
    ):
        bridge = Bridge()
        ojs_bridge.celery.install(Celery(broker=url), bridge)
        assert statuses(bridge)["broker"] == status


@pytest.mark.parametrize("kind", ["valkey", "rabbitmq"])
def test_brokers_of_dramatiq(kind: str, request: pytest.FixtureRequest) -> None:
    server: Valkey | RabbitMQ = request.getfixturevalue(kind)
    made: Any = RedisBroker if kind == "valkey" else RabbitmqBroker
    for url, status in (
        (server.url, "ok"),
        (f"{server.url.partition(':')[0]}://127.0.0.1:{free_port()}", "away"),
    ):
        bridge, broker = Bridge(), made(url=url)
        ojs_bridge.dramatiq.install(broker, bridge)
        assert statuses(bridge)["broker"] == status
    bridge = Bridge()
    ojs_bridge.dramatiq.install(StubBroker(), bridge)
    assert statuses(bridge)["broker"] == "unknown"


def test_on_the_command_line(fleet: Lives, url: str, silent: int) -> None:
    bridge, _ = fleet
    Beat(bridge.engine.context).tell()
    well = run("health", store=url)
    assert (well.code, "1 in the last 90 s" in well.out, "no app" in well.out) == (0, True, True), well.out
    assert bridge.store is not None
    bridge.store.park(parked("late", next_retry_at=bridge.engine.now() - timedelta(hours=1)))
    late = run("health", "--json", store=url)
    assert (late.code, late.json[0]["checks"]["retries"]["status"]) == (1, "degraded")
    away = run("health", "--timeout", "0.3", store=f"redis://127.0.0.1:{silent}")
    assert (away.code, "no answer within 0.3 s" in away.out) == (3, True)
