"""A worker that is stopped for longer than its reservations, and wakes when its jobs have ended elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from celery.result import AsyncResult

from tests import zombies
from tests.conftest import store_url
from tests.on_celery.fleet import Fleet
from tests.on_celery.project import client
from tests.servers import eventually

AWAIT = "until(noting.url, '{}') and {}"


@pytest.mark.requirement("RET-12", "RET-13")
@pytest.mark.parametrize("kind", zombies.STORES)
def test_what_a_run_says_after_it_was_taken_over_is_not_heard(
    separate: Callable[..., Fleet], kind: str, request: pytest.FixtureRequest
) -> None:
    fleet = separate(store=store_url(kind, request), reservation="PT3S", visibility=3)
    fleet.start("-c", "6", "-n", "zombie@%h").await_ready()
    zombie = fleet.worker
    jobs = {name: send(fleet, name, words) for name, words in zombies.LAST_WORDS.items()}
    eventually(lambda: all(map(fleet.runs, jobs.values())), seconds=120, what="all first runs")
    processes = zombie.processes
    zombies.stop(processes, fleet.settings.store)
    try:
        fleet.start("-c", "4")
        assert {name: fleet.end(job, seconds=90) for name, job in jobs.items()} == dict.fromkeys(
            jobs, "SUCCESS"
        )
        for job in jobs.values():
            fleet.ending(job)
        client(fleet.settings.backend).set(f"{fleet.settings.queue}-go", "")
    finally:
        zombies.wake(processes)
    try:
        for job in jobs.values():
            line = f"job {job.id}: attempt 1 {zombies.DROPPED}"
            eventually(lambda line=line: line in zombie.log, seconds=60, what="a dropped run")
        eventually(lambda: not fleet.waiting(), seconds=30, what="an empty queue")
    finally:
        zombie.kill()
    for name, job in jobs.items():
        assert (job.state, job.result) == ("SUCCESS", "second"), name
        assert [run.attempt for run in fleet.runs(job)] == [1, 2], name
        assert types(fleet, job).count("job.completed") == 1, name
        assert not {"job.discarded", "job.snoozed", "dead_letter.added"} & {*types(fleet, job)}, name
        assert fleet.calls(job, "errback") == [], name
        assert zombie.log.count(f"job {job.id}: attempt 1 {zombies.DROPPED}") == 1, name
    assert fleet.bridge.dead_letters.list().letters == ()
    assert fleet.bridge.retries.count() == 0
    assert AsyncResult("follows-success", app=fleet.app).result == ["second"]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_a_job_goes_on_though_the_worker_that_took_it_over_died(
    separate: Callable[..., Fleet], broker: str, request: pytest.FixtureRequest
) -> None:
    fleet = separate(broker=request.getfixturevalue(broker).url, reservation="PT1S")
    fleet.start("-c", "1").await_ready()
    job = fleet.send("act", AWAIT.format(f"{fleet.settings.queue}-go", "'first'"), "'second'")
    eventually(lambda: fleet.runs(job), what="the first run")
    zombies.take_over(fleet.bridge.store, job.id)
    time.sleep(1.5)  # longer than the reservation of the first run
    client(fleet.settings.backend).set(f"{fleet.settings.queue}-go", "")
    assert (fleet.end(job), job.result) == ("SUCCESS", "second")


def send(fleet: Fleet, name: str, words: str) -> AsyncResult:
    """Send a job whose first run waits to be woken; its second one ends it."""
    follows = fleet.task("collect").s().set(task_id=f"follows-{name.replace(' ', '-')}")
    told = fleet.task("errback").s()
    steps = AWAIT.format(f"{fleet.settings.queue}-go", words), "'second'"
    return fleet.send("act", *steps, link=follows, link_error=told, ojs_retry=zombies.POLICY)


def types(fleet: Fleet, job: AsyncResult) -> list[str]:
    return [event["type"] for event in fleet.events(job)]
