"""A hold keeps jobs from their begin: they use no attempt, wait in the store, and go on when it ends."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from ojs_bridge import HoldNotFound
from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, end
from tests.contract.steps import raises
from tests.faults import HELD, Faults
from tests.on_dramatiq.test_waking import IN_ORDER
from tests.servers import eventually

Made = Callable[..., Fleet]


@pytest.fixture(params=SERVED)
def fleet(made: Made, request: pytest.FixtureRequest) -> Fleet:
    """A fleet that has no worker yet."""
    return made(request.param)


def held(fleet: Fleet) -> list[str]:
    """Return the ids of the held jobs, in their order."""
    return [job.id for job in fleet.bridge.waiting.list(kind="held").jobs]


def test_a_held_job_that_finds_no_place_keeps_its_only_attempt(fleet: Fleet, tmp_path: Path) -> None:
    """Neither store nor broker answers: it waits in its worker."""
    faults = Faults(tmp_path)
    fleet.bridge.pause("act")
    with faults.at(" ".join(HELD[:2]), "OddStoreError"):
        fleet.start(1, **faults.env).await_ready()
        job = fleet.send("act", "ok", policy={"max_attempts": 1})
        eventually(lambda: "a fault of the test's" in fleet.worker.log, what="the word of the outage")
    eventually(lambda: held(fleet) == [job], what="a held job")
    fleet.bridge.resume("act")
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1]


def test_a_held_job_that_the_store_does_not_take_asks_again_soon(fleet: Fleet, tmp_path: Path) -> None:
    """In the broker nobody looks after it when nothing holds it any more."""
    faults = Faults(tmp_path)
    fleet.bridge.pause("act")
    with faults.at(HELD[2], "OddStoreError"):
        fleet.start(1, **faults.env).await_ready()
        job = fleet.send("act", "ok")
        eventually(lambda: "it is kept the other way" in fleet.worker.log, what="the word of the outage")
    eventually(lambda: held(fleet) == [job], seconds=60, what="a held job")
    fleet.bridge.resume("act")
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1]


def test_a_paused_job_waits_uncounted_and_goes_on_in_its_order(fleet: Fleet) -> None:
    """Other jobs of the queue run on (vectors L4-PAUSE-001 and L4-PAUSE-002)."""
    bridge = fleet.bridge
    hold = bridge.pause("act", reason="the bank is down")
    jobs = [fleet.send("act", "ok") for _ in range(3)]
    other = fleet.send("act_kept", "ok")
    fleet.start(threads=1).await_ready()
    assert end(fleet, other).type == "job.completed"
    eventually(lambda: sorted(held(fleet)) == sorted(jobs), what="held jobs")
    eventually(lambda: fleet.left() == 0, what="an empty queue")
    waiting = bridge.waiting.get(jobs[0])
    assert (waiting.attempt, waiting.kind, waiting.to_ojs()["state"]) == (1, "held", "pending")
    assert waiting.reason == f"held by {hold.reason}"
    assert "the bank is down" in hold.reason
    (shown,) = bridge.holds.list()
    assert (shown.hold.id, shown.held, shown.hold.by) == ("pause:type=act", 3, hold.by)
    assert bridge.counts()["pending"] == 3
    assert "job.held" in fleet.types(jobs[0])
    eventually(lambda: f"holds jobs of act: {hold.reason}" in fleet.worker.log, what="a line of the log")
    order = held(fleet)
    bridge.resume("act")
    assert [end(fleet, job).type for job in jobs] == ["job.completed"] * 3
    ran = sorted(jobs, key=lambda job: fleet.runs(job)[0].at)
    assert ran == order or (fleet.framework == "dramatiq" and not IN_ORDER)
    assert [attempts(fleet, job) for job in jobs] == [[1]] * 3
    assert (bridge.holds.list(), held(fleet)) == ([], [])
    eventually(lambda: "holds jobs of act no more: " in fleet.worker.log, what="another line")
    assert fleet.worker.log.count("holds jobs of act: ") == 1
    with pytest.raises(HoldNotFound, match="there is no pause of"):
        bridge.resume("act")


def test_a_retry_of_a_paused_error_type_waits(fleet: Fleet) -> None:
    """Its next attempt is the one that would have come, and a first attempt runs."""
    fleet.bridge.pause(error_type="builtins.OS*")
    fleet.start().await_ready()
    job = fleet.send("act", raises(OSError, "down"), "ok")
    eventually(lambda: held(fleet) == [job], what="a held retry")
    assert fleet.bridge.waiting.get(job).attempt == 2
    fleet.bridge.resume(error_type="builtins.OS*")
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1, 2]


def test_a_pause_ends_by_itself_and_outlives_its_workers(fleet: Fleet) -> None:
    until = fleet.bridge.engine.now() + timedelta(seconds=6)
    fleet.bridge.pause(queue=fleet.queue, until=until)
    fleet.start().await_ready()
    job = fleet.send("act", "ok")
    eventually(lambda: held(fleet) == [job], what="a held job")
    fleet.replace().await_ready()
    assert end(fleet, job).type == "job.completed"
    (run,) = fleet.runs(job)
    assert run.at >= until.timestamp()


def test_many_go_on_no_faster_than_the_rate_of_their_resume(fleet: Fleet) -> None:
    fleet.bridge.pause("*")
    fleet.start().await_ready()
    jobs = [fleet.send("act", "ok") for _ in range(12)]
    eventually(lambda: len(held(fleet)) == 12, what="held jobs")
    fleet.bridge.resume("*", rate="4/s")
    for job in jobs:
        end(fleet, job)
    times = sorted(fleet.runs(job)[0].at for job in jobs)
    assert times[-1] - times[0] >= 11 / 4 - 0.5
    assert all(attempts(fleet, job) == [1] for job in jobs)


def test_a_worker_killed_as_it_holds_jobs_neither_loses_nor_doubles_one(fleet: Fleet) -> None:
    """Whatever was held, each job runs once after the resume."""
    fleet.bridge.pause("*")
    fleet.start().await_ready()
    jobs = [fleet.send("act", "ok") for _ in range(30)]
    eventually(lambda: len(held(fleet)) > 3, what="some held jobs")
    fleet.replace().await_ready()
    eventually(lambda: len(held(fleet)) == 30, seconds=90, what="all held jobs")
    fleet.bridge.resume("*")
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
    assert [len(fleet.runs(job)) for job in jobs] == [1] * 30
