"""A job that still runs is not started again, however long it takes; one that has ended is not run again."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from celery.result import AsyncResult

from tests.on_celery.fleet import Fleet
from tests.on_celery.project import client
from tests.servers import RabbitMQ, Valkey, eventually

#: Seconds of the broker's visibility timeout and of the reservation, and of a job that takes far longer.
SHORT, LONG = 6, 18
Made = Callable[..., Fleet]


@pytest.fixture
def made(separate: Made) -> Made:
    """Makes fleets with short reservations and visibility timeouts."""
    return lambda **options: separate(**{"reservation": f"PT{SHORT}S", "visibility": SHORT, **options})


def dropped(fleet: Fleet, job: AsyncResult, *, seconds: float = 40) -> None:
    """Wait until a copy of a job was dropped, by a worker that has long started."""
    fleet.worker.await_ready()
    eventually(lambda: f"[{job.id}] ignored" in fleet.worker.log, seconds=seconds, what="a dropped copy")


def give_out_again(fleet: Fleet) -> None:
    """Have Valkey give out what a worker has not acknowledged, as after its visibility timeout."""
    with fleet.app.connection_for_write() as connection:
        channel = connection.default_channel
        for tag in client(fleet.settings.broker).hkeys(channel.unacked_key):
            channel.qos.restore_by_tag(tag)


@pytest.mark.requirement("RET-13")
def test_a_copy_of_a_running_job_waits_and_is_dropped_on_valkey(made: Made) -> None:
    fleet = made()
    fleet.start("-c", "2").await_ready()
    job = fleet.send("act", f"time.sleep({LONG}) or 'ran'")
    eventually(lambda: fleet.runs(job), seconds=30, what="a run")
    give_out_again(fleet)
    assert_one_run(fleet, job)


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
        assert_one_run(fleet, job)


def assert_one_run(fleet: Fleet, job: AsyncResult) -> None:
    assert fleet.end(job) == "SUCCESS"
    dropped(fleet, job)
    fleet.ending(job)
    assert len(fleet.runs(job)) == 1
    assert [event["type"] for event in fleet.events(job)] == ["job.started", "job.completed"]


#: a job's first step, the event after which its worker is killed, and the attempts there are in the end
ENDS = {
    "success": ("time.sleep(5) or 'ran'", "job.completed", [1]),
    "dead letter": ("time.sleep(5) or DeadLetter('a', 'b')", "dead_letter.added", [1]),
    "retry": ("time.sleep(5) or OSError()", "job.retrying", [1, 2, 3]),
}


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_what_was_settled_but_not_acknowledged_does_not_run_again(
    made: Made, broker: str, request: pytest.FixtureRequest, valkey: Valkey
) -> None:
    # Not on SQLite, whose lock a stopped worker may hold for as long as it is stopped.
    url, store = request.getfixturevalue(broker).url, f"{valkey.url.removesuffix('/0')}/6"
    fleets = {name: made(broker=url, store=store) for name in ENDS}
    policy = {"initial_interval": "PT3S", "max_attempts": 3}
    for fleet in fleets.values():
        fleet.start("-c", "1")
    for fleet in fleets.values():
        fleet.worker.await_ready()
    sent = {
        name: fleet.send("act_kept", ENDS[name][0], "OSError()", ojs_retry=policy)
        for name, fleet in fleets.items()
    }
    for name, fleet in fleets.items():
        eventually(lambda f=fleet, n=name: f.runs(sent[n]), seconds=40, what=f"a run: {name}")
        os.kill(fleet.worker.process.pid, signal.SIGSTOP)
    for name, fleet in fleets.items():
        eventually(lambda f=fleet, n=name: ENDS[n][1] in types(f, sent[n]), seconds=20, what=ENDS[name][1])
        fleet.replace("-c", "1")
    for name, fleet in fleets.items():
        dropped(fleet, sent[name])
    assert fleets["retry"].end(sent["retry"]) == "FAILURE"
    time.sleep(SHORT)  # for what must not happen: a further run
    for name, fleet in fleets.items():
        assert [run.attempt for run in fleet.runs(sent[name])] == ENDS[name][2], name
    assert len(fleets["retry"].bridge.dead_letters.get(sent["retry"].id).errors) == 3


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
