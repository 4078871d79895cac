"""A worker that takes nothing, though it is free and its queues have messages, says so and ends."""

from __future__ import annotations

import os
import time

import pytest

from tests.contract.steps import sleeps
from tests.on_celery.fleet import Fleet
from tests.servers import eventually

SILENT, ENDS = "is free and takes nothing", "its supervisor is to start it anew"
#: Seconds between two looks: enough for a worker on a loaded machine to take its messages.
LOOK = 1.5


def tell(fleet: Fleet, command: str) -> None:
    """Send the worker a command, once it hears commands, and wait until it has come."""
    control = fleet.app.control
    # A worker on Redis says that it is ready before it listens.
    eventually(
        lambda: control.ping(destination=[fleet.node]), seconds=30, what="a worker that hears commands"
    )
    control.broadcast(command, destination=[fleet.node])
    time.sleep(2)


@pytest.mark.parametrize(("broker", "pool"), [("valkey", "prefork"), ("rabbitmq", "threads")])
def test_a_worker_that_takes_nothing_more_says_so_and_ends(
    separate, broker: str, pool: str, request: pytest.FixtureRequest
) -> None:
    fleet = separate(broker=request.getfixturevalue(broker).url, look=LOOK, store=None)
    worker = fleet.start("-P", pool, "-c", "2")
    worker.await_ready()
    assert fleet.end(fleet.send("act", "ok")) == "SUCCESS"
    tell(fleet, "go_silent")
    jobs = [fleet.send("act", "ok") for _ in range(3)]
    assert worker.process.wait(90) == os.EX_TEMPFAIL
    assert (worker.log.count(SILENT), worker.log.count(ENDS)) == (1, 1)
    fleet.start("-c", "2")
    assert [fleet.end(job) for job in jobs] == ["SUCCESS"] * 3


def test_a_worker_whose_main_thread_hears_nothing_ends_at_once(separate) -> None:
    fleet = separate(look=LOOK, store=None)
    worker = fleet.start("-c", "1")
    worker.await_ready()
    tell(fleet, "block")
    job = fleet.send("act", "ok")
    assert worker.process.wait(90) == os.EX_TEMPFAIL
    assert "ends at once" in worker.log
    fleet.start("-c", "1")
    assert fleet.end(job) == "SUCCESS"


@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_a_worker_that_is_to_take_nothing_goes_on(
    separate, broker: str, request: pytest.FixtureRequest
) -> None:
    fleet = separate(broker=request.getfixturevalue(broker).url, look=LOOK, store=None)
    worker = fleet.start("-c", "1")
    worker.await_ready()
    control, to = fleet.app.control, [fleet.node]
    long = 7 * LOOK

    # A job in a queue that the worker does not consume.
    control.cancel_consumer(fleet.settings.queue, destination=to, reply=True)
    paused = fleet.send("act", "ok")
    time.sleep(long)
    control.add_consumer(fleet.settings.queue, destination=to, reply=True)
    assert fleet.end(paused) == "SUCCESS"

    # More jobs than the worker has places for.
    busy = [fleet.send("act", sleeps(long)), *(fleet.send("act", "ok") for _ in range(6))]
    assert [fleet.end(job) for job in busy] == ["SUCCESS"] * 7

    # Jobs that the worker may not run yet: it holds as many as it prefetches, and the rest waits.
    control.rate_limit("ping", "1/h", destination=to, reply=True)
    for _ in range(8):
        fleet.send("ping")
    time.sleep(long)

    assert worker.process.poll() is None
    assert SILENT not in worker.log
