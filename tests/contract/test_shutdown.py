"""A worker that shuts down in good order uses no attempt of its jobs, which go on elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import version

import pytest

from ojs_bridge.operations import health
from ojs_bridge.operations.health import Check
from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, await_runs, end
from tests.contract.steps import naps, raises
from tests.servers import eventually

Made = Callable[..., Fleet]
#: The options of a worker that starts its processes anew now and then.
RECYCLING = {"celery": ("--max-tasks-per-child", "3"), "dramatiq": ()}


#: Seconds for which a worker lets jobs end: Celery 5.5 brought that.
SOFT = [("celery-valkey", 3), ("celery-rabbitmq", 3)] if version("celery") >= "5.5" else []


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("kind", "soft"), [*((kind, 0) for kind in SERVED), *SOFT])
def test_a_hurried_shutdown_gives_the_attempt_back(made: Made, kind: str, soft: int) -> None:
    fleet = made(kind, visibility=5, soft_shutdown=soft)
    fleet.start(2).await_ready()
    steps = (naps(60), raises(OSError), "ok")
    jobs = [fleet.send("interruptible", *steps, policy={"max_attempts": 2}) for _ in range(2)]
    await_runs(fleet, *jobs)
    short = fleet.send("act", "ok")
    fleet.worker.process.send_signal(fleet.hurry)
    fleet.worker.process.wait(90)
    fleet.start(2).await_ready()
    began = time.time()
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
        assert attempts(fleet, job) == [1, 1, 2]
        again = fleet.runs(job)[1]
        # At once, not when the reservation of a minute has run out.
        assert (again.retries, again.at - began < 30) == (0, True)
        eventually(lambda job=job: failures(fleet, job), what="the event of the failure")
        assert failures(fleet, job) == ["builtins.OSError"]
    assert end(fleet, short).type == "job.completed"


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-rabbitmq"])
def test_a_killed_fleet_is_missed_and_a_stopped_one_is_not(
    made: Made, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its health counts the framework, and the queue that the workers take."""
    fleet = made(kind, visibility=5)

    def workers() -> Check:
        return fleet.bridge.health.check(30).checks["workers"]

    def is_served() -> bool:
        rows = [row for row in workers().facts["queues"] if row["queue"] == fleet.queue]
        return any(row["framework"] == fleet.framework and row["seen"] for row in rows)

    def soon_dead() -> Check:
        with monkeypatch.context() as patch:
            patch.setattr(health, "LATELY", timedelta(0))
            return workers()

    fleet.start(2).await_ready()
    eventually(is_served, what="a worker that takes the queue")
    assert fleet.worker.stop() == 0
    assert soon_dead().message == "none in the last 0 s"
    fleet.start(2).await_ready()
    eventually(is_served, what="a worker that takes the queue")
    fleet.worker.kill()
    assert f"{fleet.framework}: none since 20" in soon_dead().message


def failures(fleet: Fleet, job: str) -> list[str]:
    """The error types that listeners have heard of, each from the process that it happened in."""
    return [event.data["error"]["type"] for event in fleet.events(job) if event.type == "job.failed"]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", SERVED)
def test_a_rolling_deploy_loses_nothing_and_counts_nothing(made: Made, kind: str) -> None:
    fleet = made(kind, visibility=5)
    options = RECYCLING[fleet.framework]
    fleet.start(2, *options)
    jobs: dict[str, list[str]] = {"act": [], "interruptible": []}
    for _ in range(3):
        for task, sent in jobs.items():
            sent += [fleet.send(task, naps(0.3, raises(OSError)), "ok") for _ in range(5)]
        await_runs(fleet, jobs["act"][-5])
        old = fleet.worker
        fleet.start(2, *options)
        # An ending child waits up to 30 s where Celery has forgotten the job that it had just begun.
        assert old.stop() == 0
    for job in (*jobs["act"], *jobs["interruptible"]):
        assert end(fleet, job).type == "job.completed"
        assert fleet.types(job).count("job.completed") == 1
    assert {tuple(attempts(fleet, job)) for job in jobs["act"]} == {(1, 2)}
    # A run that hears of the shutdown gives its attempt back, and the next one succeeds.
    assert {tuple({*attempts(fleet, job)}) for job in jobs["interruptible"]} <= {(1,), (1, 2)}
    assert fleet.bridge.dead_letters.list().letters == ()
