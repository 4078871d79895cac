"""The fleets that the contract is asked of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from tests.contract.fleet import Fleet
from tests.contract.fleets import OnCelery, OnDramatiq
from tests.contract.notes import Settings
from tests.servers import eventually

#: The fleets whose workers are processes.
SERVED = ("celery-valkey", "celery-rabbitmq", "dramatiq-valkey", "dramatiq-rabbitmq")
FLEETS = (*SERVED, "dramatiq-stub")
KINDS: dict[str, Callable[[Settings, Path], Fleet]] = {"celery": OnCelery, "dramatiq": OnDramatiq}


@pytest.fixture(scope="module", params=FLEETS)
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A working fleet with a store, of each framework on each of its brokers."""
    folder = tmp_path_factory.mktemp(request.param)
    with working(make(request, request.param, folder)) as fleet:
        yield fleet


@pytest.fixture(scope="module", params=FLEETS)
def storeless(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """A working fleet without a store, of each framework on each of its brokers."""
    with working(make(request, request.param, tmp_path_factory.mktemp(request.param), store=None)) as fleet:
        yield fleet


@contextmanager
def working(fleet: Fleet) -> Iterator[Fleet]:
    """Have a fleet work; its worker must end well, and leave nothing in the queue."""
    worker = fleet.start(threads=8 if fleet.framework == "dramatiq" else 4)
    try:
        worker.await_ready()
        yield fleet
        # A job has ended a moment before its message is acknowledged.
        eventually(lambda: fleet.left() == 0, what="an empty queue")
        status = worker.stop()
        assert status == 0, f"exit status {status}\n{worker.log[-20_000:]}"
        assert fleet.left() == 0
    finally:
        fleet.close()


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Fleet]]:
    """Makes fleets that a test has for itself, with the settings that it names."""
    fleets: list[Fleet] = []
    failed = request.session.testsfailed

    def another(kind: str, **settings: Any) -> Fleet:
        fleets.append(make(request, kind, tmp_path, **settings))
        return fleets[-1]

    yield another
    for fleet in fleets:
        fleet.close(badly=request.session.testsfailed > failed)


def make(request: pytest.FixtureRequest, kind: str, folder: Path, **settings: Any) -> Fleet:
    """Make a fleet of a kind, such as celery-valkey, on the session's servers unless told otherwise."""
    framework, _, broker = kind.partition("-")
    queue = f"t{uuid4().hex[:10]}"
    standard = {
        "broker": "" if broker == "stub" else request.getfixturevalue(broker).url,
        "backend": request.getfixturevalue("valkey").url,
        "queue": queue,
        "store": f"sqlite:///{folder}/{queue}.db",
    }
    return KINDS[framework](Settings(**{**standard, **settings}), folder)
