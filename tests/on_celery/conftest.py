"""Fleets: one worker process for each kind of broker, pool and acknowledgement, shared by the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.on_celery.fleet import Fleet
from tests.on_celery.project import Settings

Fleets = Callable[[str, str, bool], Fleet]


@pytest.fixture(scope="session")
def fleets(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleets]:
    """Gives the fleet of a kind, whose worker is started when it is first asked for."""
    started: dict[tuple[str, str, bool], Fleet] = {}
    folder = tmp_path_factory.mktemp("fleets")

    def fleet_of(broker: str, pool: str, acks_late: bool) -> Fleet:
        kind = (broker, pool, acks_late)
        if kind not in started:
            name = f"{broker}-{pool}-{'late' if acks_late else 'early'}-{uuid4().hex[:6]}"
            url = request.getfixturevalue(broker).url
            settings = Settings(
                broker=url,
                backend=request.getfixturevalue("valkey").url,
                queue=name,
                store=f"sqlite:///{folder}/{name}.db",
                acks_late=acks_late,
            )
            started[kind] = Fleet(settings, folder)
            started[kind].start("-P", pool, "-c", "1" if pool == "solo" else "4")
        return started[kind]

    yield fleet_of
    workers = {kind: fleet.worker for kind, fleet in started.items() if fleet.worker}
    for worker in workers.values():
        worker.ask_to_stop()
    ended_badly = {kind: worker.log[-2000:] for kind, worker in workers.items() if worker.stop() != 0}
    assert not ended_badly, "\n".join(f"{kind}\n{log}" for kind, log in ended_badly.items())


@pytest.fixture(scope="module", params=["valkey", "rabbitmq"])
def fleet(request: pytest.FixtureRequest, fleets: Fleets) -> Fleet:
    """A prefork fleet on each broker."""
    return fleets(request.param, "prefork", True)


@pytest.fixture(scope="session")
def valkey_fleet(fleets: Fleets) -> Fleet:
    """The prefork fleet on Valkey."""
    return fleets("valkey", "prefork", True)


@pytest.fixture
def separate(request: pytest.FixtureRequest, tmp_path: Path, unique: str) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets that a test has for itself; `valkey` is their broker unless it says otherwise."""
    made: list[Fleet] = []

    def make(**options: object) -> Fleet:
        url = request.getfixturevalue("valkey").url
        store = f"sqlite:///{tmp_path}/{unique}.db"
        name = f"{unique}-{len(made)}"
        settings = Settings(**{"broker": url, "backend": url, "queue": name, "store": store, **options})
        made.append(Fleet(settings, tmp_path))
        return made[-1]

    yield make
    for fleet in made:
        if fleet.worker:
            fleet.worker.stop()
