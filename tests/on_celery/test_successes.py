"""A job that succeeded has ended when what follows it is safe, not before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest

from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, Valkey, eventually

Made = Callable[..., Fleet]


def test_a_soft_limit_that_strikes_while_the_store_hangs_costs_the_job_nothing(
    separate: Made, valkey: Valkey
) -> None:
    with Valkey() as store:
        fleet = separate(broker=valkey.url, store=store.url, reservation="PT6S", visibility=5)
        fleet.start("-c", "1").await_ready()
        warm = fleet.send("act", "warm")
        assert fleet.end(warm) == "SUCCESS"
        fleet.ending(warm)  # else its settling would hang, and the next job would not begin
        os.kill(store.pid, signal.SIGSTOP)
        try:
            job = fleet.send("act", "there", soft_time_limit=4)
            eventually(lambda: f"[{job.id}] received" in fleet.worker.log, seconds=30, what="the delivery")
            struck = f"Soft time limit (4s) exceeded for act[{job.id}]"
            eventually(lambda: struck in fleet.worker.log, what=struck)
            time.sleep(2.5)  # so that the next delivery hangs as well
        finally:
            os.kill(store.pid, signal.SIGCONT)
        assert fleet.end(job, seconds=90) == "SUCCESS"
        assert [run.attempt for run in fleet.runs(job)] == [1]


@pytest.mark.requirement("RET-13")
def test_a_replacement_that_comes_a_second_time_is_no_copy_of_what_it_replaces(
    separate: Made, rabbitmq: RabbitMQ
) -> None:
    """The replacement has the same id, and RabbitMQ says of a redelivery only that it is one."""
    fleet = separate(broker=rabbitmq.url)
    worker = fleet.start("-c", "1", "-Q", fleet.settings.queue)
    other = f"{fleet.settings.queue}-other"
    with fleet.app.connection_for_write() as connection:
        queue = fleet.app.amqp.queues[other](connection.default_channel)
        queue.declare()
        job = fleet.task("replaces").apply_async(("replaced",), {"queue": other})
        eventually(lambda: (found := queue.get()) and found.requeue() is None, seconds=30)
    eventually(lambda: f"[{job.id}] ignored" in worker.log, what="the end of what is replaced")
    assert worker.stop() == 0
    fleet.start("-c", "1", "-Q", other)
    assert fleet.end(job) == "SUCCESS"
    assert job.get() == "replaced"
