"""Fleets: one worker process for each kind of broker, pool and acknowledgement, shared by the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from tests.contract.notes import Settings
from tests.on_celery.fleet import Fleet, Worker
from tests.servers import RabbitMQ, Valkey

Fleets = Callable[[str, bool], Fleet]


def end(workers: list[Worker]) -> list[str]:
    """End workers side by side, and return the logs of those that ended badly."""
    for worker in workers:
        worker.ask_to_stop()
    return [
        f"exit status {worker.process.returncode}\n{worker.log[-20_000:]}"
        for worker in workers
        if worker.stop() != 0
    ]


@contextmanager
def fleets_on(broker: str, backend: str, folder: Path) -> Iterator[Fleets]:
    """Give the fleet of a pool and an acknowledgement, whose worker is started when it is first asked for."""
    started: dict[tuple[str, bool], Fleet] = {}

    def fleet_of(pool: str, acks_late: bool) -> Fleet:
        if (pool, acks_late) not in started:
            name = f"{pool}-{'late' if acks_late else 'early'}-{uuid4().hex[:6]}"
            store = f"sqlite:///{folder}/{name}.db"
            fleet = Fleet(Settings(broker, backend, name, store, acks_late), folder)
            fleet.start("-P", pool, "-c", "1" if pool == "solo" else "4").await_ready()
            started[pool, acks_late] = fleet
        return started[pool, acks_late]

    yield fleet_of
    assert end([fleet.worker for fleet in started.values() if fleet.worker]) == []


@pytest.fixture(scope="package")
def on_valkey(valkey: Valkey, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    """The fleets whose broker is Valkey."""
    with fleets_on(valkey.url, valkey.url, tmp_path_factory.mktemp("on-valkey")) as fleets:
        yield fleets


@pytest.fixture(scope="package")
def on_rabbitmq(
    rabbitmq: RabbitMQ, valkey: Valkey, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Fleets]:
    """The fleets whose broker is RabbitMQ."""
    with fleets_on(rabbitmq.url, valkey.url, tmp_path_factory.mktemp("on-rabbitmq")) as fleets:
        yield fleets


@pytest.fixture(scope="module", params=["on_valkey", "on_rabbitmq"])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """A prefork fleet on each broker."""
    return request.getfixturevalue(request.param)("prefork", True)


@pytest.fixture
def separate(
    request: pytest.FixtureRequest, valkey: Valkey, tmp_path: Path, unique: str
) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets that a test has for itself; Valkey is their broker unless it says otherwise."""
    made: list[Fleet] = []
    failed = request.session.testsfailed

    def make(**options: object) -> Fleet:
        standard = {"broker": valkey.url, "backend": valkey.url, "store": f"sqlite:///{tmp_path}/ojs.db"}
        settings = Settings(**{**standard, "queue": f"{unique}-{len(made)}", **options})
        made.append(Fleet(settings, tmp_path))
        return made[-1]

    yield make
    for fleet in made:
        if fleet.worker:
            if request.session.testsfailed > failed:
                print(fleet.worker.say_where_it_stands())
            fleet.worker.kill()
