"""A worker that was killed is missed within seconds. A worker that only stands still is left alone."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, await_runs, end
from tests.contract.steps import sleeps
from tests.servers import eventually

POLICY = {"initial_interval": "PT1S", "backoff_strategy": "none", "jitter": False}
Made = Callable[..., Fleet]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", SERVED)
def test_the_jobs_of_a_killed_worker_begin_elsewhere_within_seconds(made: Made, kind: str) -> None:
    """With the default settings. Without the bridge it takes a minute to an hour on Redis."""
    fleet = made(kind)
    fleet.start(4).await_ready()
    jobs = [fleet.send("act", sleeps(600), "ok", policy=POLICY) for _ in range(4)]
    await_runs(fleet, *jobs)
    first = fleet.worker
    fleet.start(4).await_ready()
    first.kill()
    killed = time.time()
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
        assert attempts(fleet, job) == [1, 2]
        # At rest it is less than ten. On Redis less than fifteen is presence alone; on RabbitMQ, whose broker
        # gives the message back, it shows that the reservation of a minute has not run out.
        assert fleet.runs(job)[1].at - killed < (40 if "rabbitmq" in kind else 15)
        assert [error["type"] for error in fleet.runs(job)[1].ojs["errors"]] == ["visibility_timeout"]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", SERVED)
def test_a_worker_that_stands_still_is_left_alone(made: Made, kind: str) -> None:
    """Its connections have not ended."""
    fleet = made(kind)
    fleet.start(2).await_ready()
    job = fleet.send("act", sleeps(3), "a second time", policy=POLICY)
    await_runs(fleet, job)
    frozen = fleet.worker
    for process in frozen.processes:
        os.kill(process, signal.SIGSTOP)
    fleet.start(2).await_ready()
    time.sleep(10)
    for process in frozen.processes:
        os.kill(process, signal.SIGCONT)
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1]
    eventually(lambda: fleet.left() == 0, what="an empty queue")
