"""A worker that shuts down in good order uses no attempt of what it runs, and the job goes on elsewhere."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import celery
import pytest
from celery.result import AsyncResult

from tests.on_celery.fleet import Fleet
from tests.servers import eventually

SOFT = celery.VERSION >= (5, 5)
Made = Callable[..., Fleet]


@pytest.fixture(params=["valkey", "rabbitmq"])
def made(separate: Made, request: pytest.FixtureRequest) -> Made:
    """Makes fleets on each broker, whose reservations outlast the test."""
    server = request.getfixturevalue(request.param)
    return lambda **options: separate(**{"broker": server.url, "visibility": 5, **options})


def running(fleet: Fleet, *options: str, **more: object) -> list[AsyncResult]:
    """Start a worker, and jobs that take longer than a test does and fail once before they succeed."""
    fleet.start("-c", "2", *options, **more).await_ready()
    steps = ("time.sleep(60)", "OSError()", "'ok'")
    jobs = [fleet.send("act", *steps, ojs_retry={"max_attempts": 2}) for _ in range(2)]
    eventually(lambda: all(fleet.runs(job) for job in jobs), seconds=40, what="two runs")
    return jobs


def assert_given_back(fleet: Fleet, jobs: list[AsyncResult]) -> None:
    """Each job runs its first attempt again, at once, and has its second one still."""
    fleet.start("-c", "2").await_ready()
    began = time.time()
    assert [fleet.end(job) for job in jobs] == ["SUCCESS", "SUCCESS"]
    for job in jobs:
        assert [run.attempt for run in fleet.runs(job)] == [1, 1, 2]
        assert fleet.runs(job)[1].at - began < 30
        fleet.ending(job)
        eventually(lambda job=job: failures(fleet, job), what="the event of the failure")
        assert failures(fleet, job) == ["builtins.OSError"]


def failures(fleet: Fleet, job: AsyncResult) -> list[str]:
    """The error types that listeners have heard of, each from the process that it happened in."""
    failed = [event["data"] for event in fleet.events(job) if event["type"] == "job.failed"]
    return [data["error"]["type"] for data in failed]


@pytest.mark.requirement("RET-12")
def test_a_cold_shutdown_gives_the_attempt_back(made: Made) -> None:
    fleet = made()
    jobs = running(fleet)
    fleet.worker.process.send_signal(signal.SIGQUIT)
    fleet.worker.process.wait(60)
    assert_given_back(fleet, jobs)


@pytest.mark.requirement("RET-12")
@pytest.mark.skipif(not SOFT, reason="Celery 5.5 brought the soft shutdown")
def test_a_soft_shutdown_lets_a_job_end_or_gives_its_attempt_back(made: Made) -> None:
    fleet = made(soft_shutdown=3)
    jobs = running(fleet)
    short = fleet.send("act", "'ok'")
    fleet.worker.process.send_signal(signal.SIGQUIT)
    fleet.worker.process.wait(60)
    assert_given_back(fleet, jobs)
    assert fleet.end(short) == "SUCCESS"


@pytest.mark.requirement("RET-12")
def test_a_child_that_is_terminated_counts_once(made: Made) -> None:
    fleet = made()
    (job, _) = running(fleet)
    os.kill(fleet.runs(job)[0].more["pid"], signal.SIGTERM)
    assert fleet.end(job) == "FAILURE"
    fleet.worker.kill()
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]


@pytest.mark.requirement("RET-12")
@pytest.mark.timeout(240)
def test_a_rolling_deploy_loses_nothing_and_counts_nothing(made: Made) -> None:
    fleet = made()
    options = ("-c", "2", "--max-tasks-per-child", "3", "-n")
    fleet.start(*options, "w0@%h")
    jobs = []
    for n in range(1, 4):
        jobs += [fleet.send("act", "time.sleep(0.3) or OSError()", "'ok'") for _ in range(10)]
        eventually(lambda job=jobs[-10]: fleet.runs(job), seconds=40, what="a run")
        old = fleet.worker
        # RabbitMQ refuses a worker of the same name for as long as the old one is there.
        fleet.start(*options, f"w{n}@%h")
        old.ask_to_stop()
        # A child of billiard 4.2 waits up to 30 s at its end for a main process that reads no more.
        assert old.process.wait(60) == 0
    assert [fleet.end(job) for job in jobs] == ["SUCCESS"] * len(jobs)
    assert {tuple(run.attempt for run in fleet.runs(job)) for job in jobs} == {(1, 2)}
