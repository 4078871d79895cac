"""Redis gives a job that a worker has to no other worker, however long the job takes."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.contract.steps import raises, sleeps
from tests.on_celery.fleet import Fleet, Worker
from tests.servers import Valkey, eventually

#: Seconds of the visibility timeout, and of a job that takes far longer.
SHORT, LONG = 6, 18
#: pool -> whether there is a store: the broker's own timeout must be enough
POOLS = {"prefork": True, "threads": False, "gevent": False}


@pytest.fixture(scope="module")
def server() -> Iterator[Valkey]:
    """A Valkey whose deliveries no other test's worker watches over."""
    with Valkey() as valkey:
        yield valkey


def beside(fleet: Fleet, *options: str) -> Worker:
    """Start one more worker process on a fleet's queue."""
    return Worker(fleet.settings, fleet.folder, *options, "-n", f"{fleet.settings.queue}-second@%h")


@pytest.mark.requirement("RET-13")
def test_what_takes_longer_than_the_visibility_timeout_runs_once(separate, server: Valkey) -> None:
    fleets, seconds = {}, []
    for pool, stored in POOLS.items():
        options = {"broker": server.url, "visibility": SHORT, "reservation": f"PT{SHORT}S"}
        fleets[pool] = separate(**options) if stored else separate(store=None, **options)
        fleets[pool].start("-P", pool, "-c", "2")
        seconds.append(beside(fleets[pool], "-P", pool, "-c", "2"))
    try:
        for worker in (*(fleet.worker for fleet in fleets.values()), *seconds):
            worker.await_ready()
        sent = {
            pool: (
                fleet.send("act", sleeps(LONG, "ran")),
                fleet.send("act", "waited", countdown=LONG),
                fleet.send("act", raises(OSError), "retried", ojs_retry={"initial_interval": f"PT{LONG}S"}),
            )
            for pool, fleet in fleets.items()
        }
        for pool, jobs in sent.items():
            assert [fleets[pool].end(job) for job in jobs] == ["SUCCESS"] * 3, pool
        time.sleep(SHORT)  # for what must not happen: a second run
        for pool, jobs in sent.items():
            assert [len(fleets[pool].runs(job)) for job in jobs] == [1, 1, 2], pool
            assert fleets[pool].gaps(jobs[2])[0] >= LONG
    finally:
        assert [worker.stop() for worker in seconds] == [0] * len(seconds)


@pytest.mark.requirement("RET-13")
def test_a_warm_shutdown_longer_than_the_visibility_timeout_doubles_nothing(separate, server: Valkey) -> None:
    fleet = separate(store=None, broker=server.url, visibility=SHORT)
    first = fleet.start("-c", "1")
    first.await_ready()
    job = fleet.send("act", sleeps(LONG, "ran"))
    eventually(lambda: fleet.runs(job), seconds=30, what="a run")
    second = beside(fleet, "-c", "1")
    second.await_ready()
    first.ask_to_stop()
    assert first.process.wait(90) == 0
    time.sleep(SHORT)  # for what must not happen: a second run
    assert second.stop() == 0
    assert (job.state, len(fleet.runs(job))) == ("SUCCESS", 1)
