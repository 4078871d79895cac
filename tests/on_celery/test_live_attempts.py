"""A job that Celery delivers a second time: the copy is dropped, and starts no second chain of retries."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from celery.result import AsyncResult

from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, eventually

#: Seconds of the broker's visibility timeout and of the reservation.
SHORT = 6
Made = Callable[..., Fleet]


@pytest.fixture
def made(separate: Made) -> Made:
    """Makes fleets with short reservations and visibility timeouts."""
    return lambda **options: separate(**{"reservation": f"PT{SHORT}S", "visibility": SHORT, **options})


def dropped(fleet: Fleet, job: AsyncResult) -> None:
    """Wait until a copy of a job was dropped, by a worker that has long started."""
    fleet.worker.await_ready()
    eventually(lambda: f"[{job.id}] ignored" in fleet.worker.log, seconds=40, what="a dropped copy")


@pytest.mark.requirement("RET-13")
def test_a_copy_of_a_running_job_waits_and_is_dropped_on_rabbitmq(made: Made) -> None:
    with RabbitMQ() as server:
        fleet = made(broker=server.url)
        fleet.start("-c", "2").await_ready()
        server.await_declared(fleet.settings.queue)
        job = fleet.send("act", "time.sleep(15) or 'ran'")
        eventually(lambda: fleet.runs(job), seconds=30, what="a run")
        server.kill()
        server.start()
        assert fleet.end(job) == "SUCCESS"
        dropped(fleet, job)
        fleet.ending(job)
        assert len(fleet.runs(job)) == 1
        assert types(fleet, job) == ["job.started", "job.completed"]


@pytest.mark.requirement("RET-01", "RET-12")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_a_hard_limit_that_strikes_when_the_retry_is_published_starts_no_second_chain(
    made: Made, broker: str, request: pytest.FixtureRequest
) -> None:
    """The main process kills the child that has just decided, and decides once more; one of both counts."""
    fleet = made(broker=request.getfixturevalue(broker).url)
    fleet.start("-c", "2").await_ready()
    lingering = {"headers": {"linger": 30, "once": True}, "time_limit": 6}
    job = fleet.send("hard", "OSError()", "'ok'", ojs_retry={"initial_interval": "PT14S"}, **lingering)
    assert fleet.end(job, seconds=60) == "SUCCESS"
    assert any("failed with timeout" in line for line in fleet.lines(job))
    dropped(fleet, job)
    fleet.ending(job)
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]
    assert types(fleet, job).count("job.completed") == 1


def types(fleet: Fleet, job: AsyncResult) -> list[str]:
    return [event["type"] for event in fleet.events(job)]


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_a_worker_that_dies_between_its_retry_and_its_acknowledgement_starts_no_second_chain(
    made: Made, broker: str, request: pytest.FixtureRequest
) -> None:
    fleet = made(broker=request.getfixturevalue(broker).url)
    fleet.start("-c", "4")
    policy = {"initial_interval": "PT0.5S", "max_attempts": 3}
    job = fleet.send("act_kept", "OSError()", headers={"linger": 8}, ojs_retry=policy)
    for n in (1, 2):
        eventually(lambda n=n: len(fleet.runs(job)) >= n, seconds=60, what=f"run {n}")
        eventually(lambda n=n: len(fleet.calls(job, "after_publish")) >= n, seconds=60, what=f"retry {n}")
        fleet.replace("-c", "4")
    assert fleet.end(job, seconds=60) == "FAILURE"
    dropped(fleet, job)
    time.sleep(SHORT)  # for what must not happen: a further run
    assert [run.attempt for run in fleet.runs(job)] == [1, 2, 3]
    assert fleet.bridge.dead_letters.get(job.id).attempt == 3
