"""A worker that cannot begin its jobs now keeps them, and uses up none of their deliveries."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import pytest

from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.steps import sleeps
from tests.servers import Valkey, eventually

Made = Callable[..., Fleet]
#: The lines of a worker's log at the beginning and at the end of an outage.
BEGINS, ENDS = "jobs and retries wait for the store or the broker", "jobs and retries go on"
#: Seconds of an outage in which a delivery could come again far more often than RabbitMQ allows.
AWAY = 15


def settings_of(kind: str, store: Valkey) -> dict[str, Any]:
    """The settings of a fleet whose queue, where it can, drops what was delivered more than five times."""
    counts = kind == "dramatiq-rabbitmq" or (kind == "celery-rabbitmq" and version("celery") >= "5.5")
    return {"store": store.url, "insist": 1, "visibility": 3, "deliveries": 5 if counts else None}


@pytest.fixture
def store() -> Iterator[Valkey]:
    """The server of a store that may be killed."""
    with Valkey() as server:
        yield server


@pytest.mark.parametrize(
    ("kind", "options"), [*((kind, ()) for kind in SERVED), ("celery-rabbitmq", ("-P", "threads"))]
)
def test_jobs_outlast_a_store_that_is_away_for_longer_than_their_deliveries(
    made: Made, store: Valkey, kind: str, options: tuple[str, ...]
) -> None:
    """Waiting jobs go back when their worker stops, and wait in the next worker."""
    fleet = made(kind, **settings_of(kind, store))
    fleet.start(2, *options).await_ready()
    store.kill()
    jobs = [fleet.send("act", "ok") for _ in range(4)]
    eventually(lambda: BEGINS in fleet.worker.log, what="the word of the outage")
    time.sleep(AWAY)
    # Its threads for jobs, for parked retries and for the fleet's health have met the outage, too.
    assert (fleet.worker.log.count(BEGINS), fleet.worker.log.count("failed: ")) == (1, 1)
    assert fleet.worker.stop() == 0
    assert (ENDS in fleet.worker.log, "Traceback" in fleet.worker.log) == (False, False)
    eventually(lambda: fleet.left() == len(jobs), what="the jobs in the queue")
    assert [fleet.runs(job) for job in jobs] == [[]] * len(jobs)
    fleet.start(2, *options)
    eventually(lambda: fleet.worker.log.count(BEGINS) == 2, what="the word of the outage")
    store.start()
    assert {end(fleet, job).type for job in jobs} == {"job.completed"}
    assert [len(fleet.runs(job)) for job in jobs] == [1] * len(jobs)
    eventually(lambda: ENDS in fleet.worker.log, what="the word of its end")
    assert (fleet.worker.log.count(BEGINS), fleet.worker.log.count(ENDS)) == (2, 1)
    assert fleet.dead() == set()


@pytest.mark.parametrize("kind", SERVED)
def test_a_success_leaves_its_queue_though_the_store_is_away(made: Made, store: Valkey, kind: str) -> None:
    """If its message waited for the store, and its worker died meanwhile, the job would run and end again.

    Only a run of more than four seconds asks whether it was taken over, and waits for the answer.
    """
    fleet = made(kind, **{**settings_of(kind, store), "insist": 1000})
    fleet.start(2).await_ready()
    jobs = [fleet.send("act", sleeps(n)) for n in (1, 2)]
    await_runs(fleet, *jobs)
    store.kill()
    eventually(lambda: fleet.left() == 0, what="the acknowledgements")
    assert fleet.worker.stop() == 0
    store.start()
    fleet.start(2)
    assert end(fleet, fleet.send("act", "after")).type == "job.completed"
    assert (fleet.left(), [len(fleet.runs(job)) for job in jobs]) == (0, [1, 1])


@pytest.mark.parametrize("kind", ["celery-rabbitmq", "dramatiq-rabbitmq"])
def test_what_waits_for_long_is_published_anew(made: Made, store: Valkey, kind: str) -> None:
    """RabbitMQ closes the channel of a consumer that keeps a message for half an hour."""
    fleet = made(kind, longest_wait=1, **settings_of(kind, store))
    fleet.start(1).await_ready()
    store.kill()
    job = fleet.send("act", "ok")
    eventually(lambda: fleet.calls(job, "after_publish") >= 4, seconds=40, what="four publications")
    store.start()
    assert end(fleet, job).type == "job.completed"
    assert len(fleet.runs(job)) == 1
