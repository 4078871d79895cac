"""A worker that dies has used an attempt: a job starts as often as its policy says, at the policy's pace."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import pytest

from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, await_runs, end, gaps, retries
from tests.contract.steps import sleeps
from tests.lives import reserve_and_die
from tests.servers import eventually

#: A pause that no redelivery has by chance.
POLICY = {"initial_interval": "PT1.5S", "backoff_strategy": "none", "max_attempts": 3}
Made = Callable[..., Fleet]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", SERVED)
def test_a_job_that_takes_its_whole_worker_along_runs_as_often_as_its_policy_says(
    made: Made, kind: str
) -> None:
    fleet = made(kind, reservation="PT2S", visibility=3)
    fleet.start(1).await_ready()
    job = fleet.send("act_kept", sleeps(60), policy=POLICY)
    for n in (1, 2, 3):
        await_runs(fleet, job, runs=n)
        fleet.replace(1)
    assert end(fleet, job, seconds=90).data["dead_lettered"]
    assert end(fleet, fleet.send("act", "after")).type == "job.completed"
    assert attempts(fleet, job) == [1, 2, 3]
    assert min(gaps(fleet, job)) >= 1.5
    errors = fleet.bridge.dead_letters.get(job).errors
    assert [(entry["attempt"], entry["type"]) for entry in errors] == [
        (n, "visibility_timeout") for n in (1, 2, 3)
    ]


@pytest.mark.requirement("RET-12")
def test_a_lost_attempt_is_retried_after_its_reservation_and_the_policys_delay(fleet: Fleet) -> None:
    job = str(uuid4())
    until = reserve_and_die(fleet.bridge, job, seconds=2)
    fleet.send("act", "ok", id=job, policy={"initial_interval": "PT1S"})
    assert end(fleet, job).type == "job.completed"
    (run,) = fleet.runs(job)
    assert run.at >= until + 1
    assert ([entry["type"] for entry in run.ojs["errors"]], run.attempt) == (["visibility_timeout"], 2)
    (told,) = retries(fleet, job)
    assert told["duration_ms"] >= 2000


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", SERVED)
def test_the_next_job_is_sent_though_the_worker_died_before_it_was(made: Made, kind: str) -> None:
    """A job that succeeded has ended when the job that follows it is safe, not before."""
    fleet = made(kind, reservation="PT2S", visibility=3)
    fleet.start(1)
    job = fleet.send("act", "done", followed_by=fleet.queue, deadly=True)
    if fleet.framework == "dramatiq":  # Celery starts a child that has died anew
        fleet.worker.process.wait(90)
        fleet.start(1)
    eventually(lambda: fleet.followed(fleet.queue), seconds=60, what="the next job")
    assert attempts(fleet, job) == [1, 2]
    assert fleet.followed(fleet.queue) == ["done"]
