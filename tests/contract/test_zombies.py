"""A worker that is stopped for longer than its reservations, and wakes when its jobs have ended elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import pytest

from tests import zombies
from tests.conftest import store_url
from tests.contract.conftest import FLEETS
from tests.contract.fleet import Fleet, Worker, attempts, await_runs, end
from tests.contract.notes import ELSEWHERE, client
from tests.contract.steps import Step, waits_for
from tests.servers import eventually

Made = Callable[..., Fleet]


def awaiting(fleet: Fleet, words: Step) -> tuple[Step, str]:
    """The steps of a job that waits to be woken in its first run, and succeeds in its second one."""
    return waits_for(f"{fleet.queue}-go", words), "second"


def go(fleet: Fleet) -> None:
    """Wake the jobs."""
    client(fleet.settings.backend).set(f"{fleet.queue}-go", "")


def await_drops(fleet: Fleet, zombie: Worker, jobs: Iterable[str]) -> None:
    """Wait until a worker has dropped its run of each job, and the queue is empty."""
    for job in jobs:
        line = f"job {job}: attempt 1 {zombies.DROPPED}"
        eventually(lambda line=line: line in zombie.log, seconds=60, what="a dropped run")
    eventually(lambda: not fleet.left(), seconds=30, what="an empty queue")


@pytest.mark.requirement("RET-12", "RET-13")
@pytest.mark.parametrize("store", zombies.STORES)
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_the_words_of_a_run_that_was_taken_over_are_not_heard(
    made: Made, kind: str, store: str, request: pytest.FixtureRequest
) -> None:
    fleet = made(kind, store=store_url(store, request), reservation="PT3S", visibility=3)
    zombie = fleet.start(len(zombies.LAST_WORDS))
    jobs = {
        name: fleet.send(
            "act", *awaiting(fleet, words), policy=zombies.POLICY, followed_by=f"{fleet.queue}-{name}"
        )
        for name, words in zombies.LAST_WORDS.items()
    }
    await_runs(fleet, *jobs.values())
    processes = zombie.processes
    zombies.stop(processes, fleet.store)
    try:
        fleet.start(4)
        assert {end(fleet, job, seconds=90).type for job in jobs.values()} == {"job.completed"}
        go(fleet)
    finally:
        zombies.wake(processes)
    await_drops(fleet, zombie, jobs.values())
    for name, job in jobs.items():
        assert (fleet.result(job), fleet.followed(f"{fleet.queue}-{name}")) == ("second", ["second"]), name
        assert attempts(fleet, job) == [1, 2], name
        assert fleet.types(job).count("job.completed") == 1, name
        assert not {"job.discarded", "job.snoozed", "dead_letter.added"} & {*fleet.types(job)}, name
        assert fleet.calls(job, "errback") == 0, name
        assert zombie.log.count(f"job {job}: attempt 1 {zombies.DROPPED}") == 1, name
    assert fleet.bridge.dead_letters.list().letters == ()
    assert fleet.bridge.retries.count() == 0


@pytest.mark.requirement("RET-12", "RET-13")
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_run_that_was_taken_over_long_before_its_reservation_ran_out_is_not_heard(
    made: Made, kind: str
) -> None:
    """A machine that stands still for a while has lost its connections, and another one takes it for dead."""
    fleet = made(kind)
    redis = client(fleet.settings.broker)
    others = {each["id"] for each in redis.client_list()}
    zombie = fleet.start(2)
    jobs = {
        word: fleet.send(
            "act", *awaiting(fleet, zombies.LAST_WORDS[word]), followed_by=f"{fleet.queue}-{word}"
        )
        for word in ("success", "retry")
    }
    await_runs(fleet, *jobs.values())
    processes = zombie.processes
    zombies.stop(processes, fleet.store)
    try:
        for each in redis.client_list():
            if each["id"] not in others:
                redis.client_kill_filter(_id=each["id"])
        fleet.start(4, **{ELSEWHERE: "1"})
        assert {end(fleet, job, seconds=40).type for job in jobs.values()} == {"job.completed"}
        go(fleet)
    finally:
        zombies.wake(processes)
    await_drops(fleet, zombie, jobs.values())
    for word, job in jobs.items():
        assert fleet.followed(f"{fleet.queue}-{word}") == ["second"], word
        assert fleet.types(job).count("job.completed") == 1, word


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", FLEETS)
def test_a_job_goes_on_though_the_worker_that_took_it_over_died(made: Made, kind: str) -> None:
    fleet = made(kind, reservation="PT1S")
    fleet.start(1).await_ready()
    job = fleet.send("act", *awaiting(fleet, "first"))
    await_runs(fleet, job)
    assert fleet.bridge.store is not None
    zombies.take_over(fleet.bridge.store, job)
    time.sleep(1.5)  # longer than the reservation of the first run
    go(fleet)
    assert end(fleet, job).type == "job.completed"
    eventually(lambda: not fleet.left(), seconds=30, what="an empty queue")
    assert len(fleet.runs(job)) == 2
