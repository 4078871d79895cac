"""At its start a worker names the settings that weaken the bridge's promises."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from tests.on_dramatiq.fleet import Fleet
from tests.servers import RabbitMQ, Valkey


def said(fleet: Fleet, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The bridge's warnings at the start of a worker."""
    with fleet.working(threads=1):
        pass
    return [r.getMessage() for r in caplog.records if r.name == "ojs_bridge" and r.levelname == "WARNING"]


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
def test_what_goes_without_a_store_is_said(
    broker: dramatiq.Broker, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    (told,) = said(Fleet(broker, unique), caplog)
    assert "no store: the attempt of a killed worker does not count" in told
    assert "dead letters go to " in told


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
def test_a_good_set_up_is_silent(
    broker: dramatiq.Broker, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert said(Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db"), caplog) == []


def test_a_redis_that_forgets_is_named(unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Valkey(appendonly="no", maxmemory="100mb", maxmemory_policy="allkeys-lru") as server:
        fleet = Fleet(RedisBroker(url=server.url), unique, store=f"sqlite:///{tmp_path}/ojs.db")
        evicts, forgets = said(fleet, caplog)
    assert "set maxmemory-policy noeviction, not allkeys-lru" in evicts
    assert "set appendonly yes" in forgets


def test_parking_later_than_rabbitmq_s_patience_is_named(
    rabbitmq: RabbitMQ, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, late = f"sqlite:///{tmp_path}/ojs.db", timedelta(hours=1)
    fleet = Fleet(RabbitmqBroker(url=rabbitmq.url), unique, store=store, park_after=late)
    (caveat,) = said(fleet, caplog)
    assert "consumer_timeout" in caveat


def test_a_store_that_cannot_be_written_is_named(
    stub: dramatiq.Broker, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Fleet(stub, unique, store="sqlite:////nowhere/ojs.db").working(threads=1):
        pass
    errors = [r.getMessage() for r in caplog.records if r.name == "ojs_bridge" and r.levelname == "ERROR"]
    assert errors[0].startswith("jobs and retries wait for the store or the broker")
