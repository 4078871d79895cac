"""The fleets that the contract is asked of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import dramatiq
import pytest

from tests.contract.fleet import Fleet, OnCelery, OnDramatiq
from tests.on_celery import fleet as celery_fleet
from tests.on_celery.conftest import end
from tests.on_celery.project import Settings
from tests.on_dramatiq import fleet as dramatiq_fleet

FLEETS = ("celery-valkey", "celery-rabbitmq", "dramatiq-stub", "dramatiq-valkey", "dramatiq-rabbitmq")
BROKERS = {"valkey": "redis"}
#: Retries so quick that a test can wait for them; deterministic. A Celery fleet's are the same, and there a
#: job is discarded by default.
QUICK = {"max_attempts": 3, "initial_interval": "PT0.1S", "jitter": False, "on_exhaustion": "discard"}


@pytest.fixture(scope="module", params=FLEETS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A working fleet with a store, of each framework on each of its brokers."""
    folder = tmp_path_factory.mktemp(request.param)
    with working(request, store=f"sqlite:///{folder}/ojs.db", folder=folder) as fleet:
        yield fleet


@pytest.fixture(scope="module", params=FLEETS)
def storeless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A working fleet without a store, of each framework on each of its brokers."""
    with working(request, store=None, folder=tmp_path_factory.mktemp(request.param)) as fleet:
        yield fleet


@contextmanager
def working(request: pytest.FixtureRequest, *, store: str | None, folder: Path) -> Iterator[Fleet]:
    """Have the fleet that a fixture's parameter names work."""
    framework, _, broker = request.param.partition("-")
    url = "" if broker == "stub" else request.getfixturevalue(broker).url
    name = f"t{uuid4().hex[:10]}"
    if framework == "celery":
        settings = Settings(url, request.getfixturevalue("valkey").url, name, store)
        with on_celery(settings, folder) as fleet:
            yield fleet
    else:
        with on_dramatiq(
            dramatiq_fleet.broker_of(BROKERS.get(broker, broker), url, name), name, store
        ) as fleet:
            yield fleet


@contextmanager
def on_celery(settings: Settings, folder: Path) -> Iterator[Fleet]:
    """Start a worker process with a pool of processes, and end it."""
    fleet = celery_fleet.Fleet(settings, folder)
    worker = fleet.start("-c", "4")
    try:
        worker.await_ready()
        yield OnCelery(fleet)
    finally:
        assert end([worker]) == []


@contextmanager
def on_dramatiq(broker: dramatiq.Broker, queue: str, store: str | None) -> Iterator[Fleet]:
    """Have a worker in this process, which must leave nothing in its queue."""
    errors = {TimeoutError: "external.timeout"}
    fleet = dramatiq_fleet.Fleet(broker, queue, store=store, errors=errors, retry=QUICK)
    asked = OnDramatiq(fleet, store)
    with fleet.working():
        yield asked
    assert fleet.left() == 0
    broker.close()
