"""A rate and slots hold across all workers of a fleet; who exceeds them waits, uncounted, in order."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest

from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, end
from tests.contract.steps import raises, sleeps
from tests.contract.test_holds import held
from tests.servers import eventually

Made = Callable[..., Fleet]


@pytest.fixture(params=SERVED)
def limited(made: Made, request: pytest.FixtureRequest) -> Callable[..., Fleet]:
    """Makes a fleet whose jobs have a dependency with these limits."""

    def fleet(**limits: Any) -> Fleet:
        return made(request.param, dependencies=({"name": "stripe", "jobs": ("act",), **limits},))

    return fleet


def most_at_once(fleet: Fleet, jobs: Sequence[str], seconds: float) -> int:
    """Return how many runs of jobs that sleep for so long were under way at a time, at the most."""
    changes: list[tuple[float, int]] = []
    for job in jobs:
        changes += [(run.at, 1) for run in fleet.runs(job)]
        changes += [(run.at + seconds, -1) for run in fleet.runs(job)]
    return max(itertools.accumulate(change for _, change in sorted(changes)))


def test_no_more_run_at_once_than_there_are_slots(limited: Callable[..., Fleet]) -> None:
    """Two workers share them; each job that waits keeps its attempt, and its place (vector EXT-RL-001)."""
    fleet = limited(concurrency=2)
    for _ in range(2):
        fleet.start(threads=4).await_ready()
    jobs = [fleet.send("act", sleeps(0.5)) for _ in range(10)]
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
    assert most_at_once(fleet, jobs, 0.5) == 2
    assert [attempts(fleet, job) for job in jobs] == [[1]] * 10
    assert fleet.bridge.waiting.count() == 0


def test_no_more_begin_than_the_rate_allows(limited: Callable[..., Fleet]) -> None:
    fleet = limited(rate="4/s")
    for _ in range(2):
        fleet.start(threads=4).await_ready()
    jobs = [fleet.send("act", "ok") for _ in range(12)]
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
    times = sorted(fleet.runs(job)[0].at for job in jobs)
    # Of jobs that come late to their turns one more may begin.
    assert times[-1] - times[0] >= 10 / 4 - 0.35
    assert [attempts(fleet, job) for job in jobs] == [[1]] * 12


def test_the_brake_of_an_incident_holds_all_jobs_until_it_ends(limited: Callable[..., Fleet]) -> None:
    """Workers that run hear of it, and those that start later; then the jobs go on, and none is counted."""
    fleet = limited(rate="100/s")
    fleet.start().await_ready()
    end(fleet, fleet.send("act", "ok"))
    until = fleet.bridge.engine.now() + timedelta(seconds=12)
    fleet.bridge.limit("stripe", concurrency=0, until=until, reason="the bank is down")
    time.sleep(2.1)
    jobs = [fleet.send("act", "ok") for _ in range(3)]
    eventually(lambda: len(held(fleet)) == 3, what="held jobs")
    assert "held by the limit of " in fleet.bridge.waiting.get(jobs[0]).reason
    fleet.replace().await_ready()
    jobs.append(fleet.send("act", "ok"))
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
        assert [run.at >= until.timestamp() for run in fleet.runs(job)] == [True]
        assert attempts(fleet, job) == [1]


def test_each_value_of_the_key_has_its_own_slots(limited: Callable[..., Fleet]) -> None:
    """Vector EXT-RL-005."""
    fleet = limited(concurrency=1, key="account")
    fleet.start(threads=4).await_ready()
    jobs = [fleet.send("act", sleeps(1), account=account) for account in ("a", "a", "b", "b")]
    for job in jobs:
        end(fleet, job)
    assert most_at_once(fleet, jobs, 1) == 2
    assert most_at_once(fleet, jobs[:2], 1) == most_at_once(fleet, jobs[2:], 1) == 1


def test_the_slot_of_a_killed_worker_is_free_in_seconds(limited: Callable[..., Fleet]) -> None:
    fleet = limited(concurrency=1)
    fleet.start().await_ready()
    first = fleet.send("act", sleeps(600), "ok")
    eventually(lambda: fleet.runs(first), what="a run")
    second = fleet.send("act", "ok")
    eventually(lambda: fleet.bridge.waiting.list(kind="held").jobs, what="a held job")
    fleet.replace().await_ready()
    assert [end(fleet, job).type for job in (first, second)] == ["job.completed"] * 2
    assert attempts(fleet, second) == [1]


def test_retries_are_a_share_of_first_attempts(limited: Callable[..., Fleet]) -> None:
    """What exceeds it is held, uncounted; first attempts let it go on sooner, and all go on in the end."""
    fleet = limited(budget=0.2)
    for _ in range(2):
        fleet.start(threads=4).await_ready()
    policy = {"max_attempts": 3, "initial_interval": "PT0.2S", "jitter": False}
    fails = raises(TimeoutError, "a bank that is down")
    jobs = [fleet.send("act", fails, fails, "ok", policy=policy) for _ in range(20)]
    eventually(lambda: fleet.bridge.waiting.list(kind="held").jobs, what="a held retry")
    reason = fleet.bridge.waiting.list(kind="held").jobs[0].reason
    assert reason.startswith(
        "held by the retry budget of stripe: retries are at most 20 % of first attempts; "
    )
    others = [fleet.send("act", "ok") for _ in range(40)]
    for job in others:
        assert end(fleet, job).type == "job.completed"
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
        assert attempts(fleet, job) == [1, 2, 3]
    retries = sorted(run.at for job in jobs for run in fleet.runs(job) if run.attempt > 1)
    # So many are saved up, so many are earned by all first attempts, and one a second there may always be.
    assert len(retries) <= 10 + 0.2 * 60 + (retries[-1] - retries[0]) + 1
    assert fleet.bridge.waiting.count() == 0


def test_a_job_that_exceeds_a_limit_waits_and_the_limit_says_so(limited: Callable[..., Fleet]) -> None:
    """It is not discarded (vector EXT-RL-003), and the state has the key (EXT-RL-002)."""
    fleet = limited(concurrency=1)
    fleet.start(threads=2).await_ready()
    first = fleet.send("act", sleeps(4))
    eventually(lambda: fleet.runs(first), what="a run")
    second = fleet.send("act", "ok")
    eventually(lambda: held(fleet) == [second], what="a held job")
    pytest.importorskip("httpx", reason="the floor has no HTTP")
    from tests.http.doors import API, client_at, unlimited

    client = client_at(fleet.bridge, unlimited())
    state = client.get(f"{API}/rate-limits/stripe").json()
    assert (state["key"], state["waiting_count"]) == ("stripe", 1)
    assert state["concurrency"] == {"limit": 1, "active": 1, "available": 0}
    assert client.get(f"{API}/admin/jobs/{second}").json()["state"] == "pending"
    assert [end(fleet, job).type for job in (first, second)] == ["job.completed"] * 2
    assert attempts(fleet, second) == [1]
    free = {"limit": 1, "active": 0, "available": 1}
    eventually(
        lambda: client.get(f"{API}/rate-limits/stripe").json()["concurrency"] == free, what="a free slot"
    )


@pytest.mark.parametrize("kind", SERVED)
def test_a_rate_of_one_a_second_is_for_all_types_of_a_queue(made: Made, kind: str) -> None:
    """What comes too soon is taken, and waits for its turn (vectors EXT-RL-004 and L4-RL-001)."""
    fleet = made(kind, dependencies=({"name": "all", "jobs": ("*",), "rate": "1/s"},))
    fleet.start(threads=4).await_ready()
    jobs = [fleet.send(type_, "ok") for type_ in ("act", "act_kept", "act")]
    assert [end(fleet, job).type for job in jobs] == ["job.completed"] * 3
    times = sorted(fleet.runs(job)[0].at for job in jobs)
    assert times[1] - times[0] >= 0.85
    assert times[2] - times[0] >= 1.85 - 1, "of jobs that come late to their turns one more may begin"


@pytest.mark.parametrize("kind", SERVED)
def test_a_heavy_job_counts_for_more_and_gets_its_slots(made: Made, kind: str) -> None:
    """While light ones keep coming."""
    weights = {"act": 3, "*": 1}
    fleet = made(kind, dependencies=({"name": "stripe", "jobs": weights, "concurrency": 3},))
    for _ in range(2):
        fleet.start(threads=4).await_ready()
    light = [fleet.send("act_kept", sleeps(0.5)) for _ in range(4)]
    heavy = [fleet.send("act", sleeps(0.5)) for _ in range(2)]
    light += [fleet.send("act_kept", sleeps(0.5)) for _ in range(6)]
    for job in (*heavy, *light):
        assert end(fleet, job).type == "job.completed"
        assert attempts(fleet, job) == [1]
    assert most_at_once(fleet, light, 0.5) <= 3
    alone = [run.at for job in heavy for run in fleet.runs(job)]
    others = [run.at for job in light for run in fleet.runs(job)] + alone
    assert [sum(abs(other - at) < 0.5 for other in others) for at in alone] == [1, 1]
