"""A job that Celery delivers a second time: the copy is dropped, and starts no second chain of retries."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from celery.result import AsyncResult

from ojs_bridge.store import Grant, Reservation
from tests.contract.notes import client
from tests.contract.steps import raises, sleeps, waits_for
from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, eventually
from tests.servers.proxy import Proxy

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
        job = fleet.send("act", sleeps(15, "ran"))
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
    job = fleet.send("hard", raises(OSError), "ok", ojs_retry={"initial_interval": "PT14S"}, **lingering)
    assert fleet.end(job, seconds=60) == "SUCCESS"
    assert any("failed with timeout" in line for line in fleet.lines(job))
    dropped(fleet, job)
    fleet.ending(job)
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]
    assert types(fleet, job).count("job.completed") == 1


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_a_copy_that_another_worker_has_had_for_long_does_not_run_again(
    made: Made, broker: str, request: pytest.FixtureRequest
) -> None:
    """Its first worker loses its connection, runs it to the end, and believes that it has acknowledged it."""
    server = request.getfixturevalue(broker)
    fleet = made(broker=server.url, forget_after=1)
    steps = [waits_for(f"{fleet.settings.queue}:{name}") for name in "ab"]
    with Proxy(server.port) as proxy, ExitStack() as stack:
        far = replace(fleet.settings, broker=proxy.to(server.url)).to_env()
        name = f"{fleet.settings.queue}-far@%h"
        first = fleet.start("-c", "1", "--prefetch-multiplier", "1", "-n", name, env=far)
        stack.callback(first.kill)
        first.await_ready()
        job = fleet.send("act", steps[0])
        eventually(lambda: fleet.runs(job), seconds=30, what="a run")
        fleet.start("-c", "1").await_ready()
        long = fleet.send("act", steps[1])
        eventually(lambda: fleet.runs(long), seconds=30, what="a run of the long job")
        proxy.cut()
        received = f"Task act[{job.id}] received"
        eventually(lambda: fleet.worker.log.count(received) == 2, seconds=60, what="a copy")
        proxy.mend()
        client(fleet.settings.backend).set(f"{fleet.settings.queue}:a", 1)
        assert fleet.ending(job)
        eventually(lambda: fleet.worker.log.count(" Connected to ") == 3, seconds=60, what="its return")
        time.sleep(SHORT)  # for what must not happen: the store forgets the job
        client(fleet.settings.backend).set(f"{fleet.settings.queue}:b", 1)
        dropped(fleet, job)
        assert len(fleet.runs(job)) == 1


@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_the_store_forgets_a_success_that_surely_has_no_copy(
    made: Made, broker: str, request: pytest.FixtureRequest
) -> None:
    """Otherwise a store would hold a day's jobs."""
    fleet = made(broker=request.getfixturevalue(broker).url, forget_after=1, visibility=60)
    fleet.start("-c", "2").await_ready()
    job = fleet.send("act", "ran")
    assert fleet.end(job) == "SUCCESS"
    # The next acknowledgements ask about this one.
    assert [fleet.end(fleet.send("act", "ran")) for _ in range(2)] == ["SUCCESS"] * 2
    eventually(lambda: grant(fleet, job) is Grant.TAKEN, what="it was forgotten")


def grant(fleet: Fleet, job: AsyncResult) -> Grant:
    store, now = fleet.bridge.store, datetime.now(timezone.utc)
    assert store
    until = now + timedelta(seconds=SHORT)
    turn = Reservation(job.id, 0)
    return store.reservations.reserve(
        turn, publication="", holder="me", mark="me", now=now, until=until
    ).grant


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
    job = fleet.send("act_kept", raises(OSError), headers={"linger": 8}, ojs_retry=policy)
    for n in (1, 2):
        eventually(lambda n=n: len(fleet.runs(job)) >= n, seconds=60, what=f"run {n}")
        eventually(lambda n=n: len(fleet.calls(job, "after_publish")) >= n, seconds=60, what=f"retry {n}")
        fleet.replace("-c", "4")
    assert fleet.end(job, seconds=60) == "FAILURE"
    dropped(fleet, job)
    time.sleep(SHORT)  # for what must not happen: a further run
    assert [run.attempt for run in fleet.runs(job)] == [1, 2, 3]
    assert fleet.bridge.dead_letters.get(job.id).attempt == 3
