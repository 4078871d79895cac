"""The small form of the chaos suite; `make chaos` runs the full one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.fates import load
from tests.chaos.frameworks import Framework
from tests.chaos.report import judge, story
from tests.chaos.trial import Outage, Storm, Trial
from tests.servers import RabbitMQ, Valkey

SMALL = Storm(
    seconds=8,
    kill_every=2,
    outages=(Outage(2, "store", 2, frozen=True), Outage(5, "broker", 0.5)),
    patience=100,
)


@pytest.fixture
def survives(tmp_path: Path) -> Callable[[Framework, type[Valkey] | type[RabbitMQ]], None]:
    """Have a small load live through a short storm, on servers of its own."""

    def survive(framework: Framework, broker: type[Valkey] | type[RabbitMQ]) -> None:
        jobs = load(60, seed=1)
        with broker() as queue, Valkey() as store:
            outcome = Trial(framework, queue, store, jobs, tmp_path).run(SMALL)
        faults = judge("", jobs, outcome, bridged=True).faults
        assert not faults, story(faults, outcome, (tmp_path / "workers.log").read_text())

    return survive
