"""The fleets that the contract is asked of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tests.contract.fleet import Fleet, OnCelery, OnDramatiq
from tests.on_celery.conftest import fleets_on
from tests.on_dramatiq import fleet as dramatiq_fleet

FLEETS = ("celery-valkey", "celery-rabbitmq", "dramatiq-stub", "dramatiq-valkey", "dramatiq-rabbitmq")
#: Retries so quick that a test can wait for them; deterministic. A Celery fleet's are the same.
QUICK = {"max_attempts": 3, "initial_interval": "PT0.1S", "jitter": False}


@pytest.fixture(scope="package", params=FLEETS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A working fleet of each framework on each of its brokers, which the contract's tests share."""
    framework, _, broker = request.param.partition("-")
    url = "" if broker == "stub" else request.getfixturevalue(broker).url
    folder = tmp_path_factory.mktemp(request.param)
    if framework == "celery":
        with on_celery(url, request.getfixturevalue("valkey").url, folder) as working:
            yield working
    else:
        with on_dramatiq(broker, url, folder) as working:
            yield working


@contextmanager
def on_celery(url: str, backend: str, folder: Path) -> Iterator[Fleet]:
    """A worker process with a pool of processes."""
    with fleets_on(url, backend, folder) as fleets:
        yield OnCelery(fleets("prefork", True))


@contextmanager
def on_dramatiq(broker: str, url: str, folder: Path) -> Iterator[Fleet]:
    """A worker in this process; it must leave nothing in its queues."""
    name = f"t{uuid4().hex[:10]}"
    made = dramatiq_fleet.broker_of({"valkey": "redis"}.get(broker, broker), url, name)
    errors = {TimeoutError: "external.timeout"}
    fleet = dramatiq_fleet.Fleet(made, name, store=f"sqlite:///{folder}/ojs.db", errors=errors, retry=QUICK)
    working = OnDramatiq(fleet)
    with fleet.working():
        yield working
    assert fleet.left() == 0
    made.close()
