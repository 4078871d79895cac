"""Broker and store are a Redis behind a Sentinel, and its master dies."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import redis

from tests.contract.fleet import Fleet, attempts, await_runs, end
from tests.contract.steps import raises, waits_for
from tests.servers import Watched, eventually

Made = Callable[..., Fleet]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """A master, two replicas and a Sentinel."""
    with Watched() as servers:
        yield servers


@pytest.mark.parametrize("framework", ["celery", "dramatiq"])
def test_jobs_outlive_the_master_of_broker_and_store(made: Made, watched: Watched, framework: str) -> None:
    """What the replicas had is neither lost nor run twice: ended, running, waiting and parked jobs."""
    url = f"sentinel://127.0.0.1:{watched.sentinel.port}"
    # What a Celery worker had only fetched comes back after the visibility timeout.
    fleet = made(f"{framework}-valkey", broker=url, store=watched.url, visibility=10)
    fleet.start(2).await_ready()
    ended = fleet.send("act", "ok")
    assert end(fleet, ended).type == "job.completed"
    parked = fleet.send("act", raises(OSError, "down"), "ok", policy={"initial_interval": "PT5M"})
    eventually(lambda: fleet.bridge.retries.list().jobs, what="a parked retry")
    gate = f"{fleet.queue}-gate"
    running = [fleet.send("act", waits_for(gate)) for _ in range(2)]
    await_runs(fleet, *running)
    waiting = [fleet.send("act", "ok") for _ in range(8)]
    watched.await_replica()
    watched.fail_over()
    with redis.Redis.from_url(fleet.settings.backend) as client:
        client.set(gate, "")
    for job in (*running, *waiting):
        assert end(fleet, job).type == "job.completed"
    fleet.bridge.retries.run(parked)
    assert end(fleet, parked).type == "job.completed"
    assert end(fleet, fleet.send("act", "ok")).type == "job.completed"
    eventually(lambda: fleet.left() == 0, what="an empty queue")
    assert [attempts(fleet, job) for job in (ended, *running, *waiting)] == [[1]] * 11
    assert attempts(fleet, parked) == [1, 2]
