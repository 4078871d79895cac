"""A retry that is far away waits in the store, or travels in hops, and runs once, on time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery.result import AsyncResult

from tests.contract.notes import client
from tests.contract.steps import Step, raises
from tests.on_celery.fleet import LATE, Fleet
from tests.servers import Valkey, eventually

#: A retry in two hours, to the millisecond.
FAR = {"initial_interval": "PT2H", "max_interval": "PT2H"}


@pytest.fixture(params=["valkey", "rabbitmq"])
def fleet(separate: Callable[..., Fleet], request: pytest.FixtureRequest) -> Fleet:
    """A fleet with a store, on each broker; Redis gives out again what is not acknowledged in a minute."""
    return separate(broker=request.getfixturevalue(request.param).url, visibility=60)


def parked(fleet: Fleet, *steps: Step) -> AsyncResult:
    """A job whose retry is parked."""
    job = fleet.send("act", *steps, ojs_retry=FAR)
    eventually(lambda: fleet.bridge.store.parked.get(job.id), seconds=40, what="a parked retry")
    return job


def test_a_parked_retry_outlives_every_worker(fleet: Fleet) -> None:
    fleet.start("-c", "2")
    job = parked(fleet, raises(OSError, "first"), "second")
    fleet.worker.kill()
    fleet.bridge.retries.run(job.id)
    fleet.start("-c", "2")
    assert fleet.end(job) == "SUCCESS"
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]


@pytest.mark.requirement("RET-11")
def test_without_a_store_a_long_delay_travels_in_hops(separate: Callable[..., Fleet]) -> None:
    with Valkey() as server:
        fleet = separate(store=None, broker=server.url, visibility=9)
        fleet.start("-c", "2").await_ready()
        jobs = [
            fleet.send("act", raises(OSError), "ok", ojs_retry={"initial_interval": "PT21S"})
            for _ in range(3)
        ]
        assert [fleet.end(job) for job in jobs] == ["SUCCESS"] * 3
        for job in jobs:
            assert len(fleet.runs(job)) == 2
            assert 21 <= fleet.gaps(job)[0] < 21 + LATE
            # Each hop is shorter than a third of the visibility timeout, so that none is given out twice.
            assert fleet.worker.log.count(f"[{job.id}] received") >= 7
        eventually(lambda: client(server.url).hlen("unacked") == 0, what="the acknowledgements")
