"""A job that succeeded has ended when what follows it is safe, not before."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
from celery import chain

from tests.on_celery.fleet import Fleet
from tests.servers import Valkey, eventually

Made = Callable[..., Fleet]


@pytest.mark.requirement("RET-12")
def test_a_chain_goes_on_though_its_worker_died_before_it_was_sent_on(separate: Made, valkey: Valkey) -> None:
    fleet = separate(broker=valkey.url, reservation="PT2S", visibility=3)
    fleet.start("-c", "1")
    act = fleet.task("act")
    second = chain(act.si("'one'"), act.si("'two'").set(headers={"deadly": True})).delay()
    assert fleet.end(second, seconds=60) == "SUCCESS"
    first = second.parent
    assert first is not None
    assert [run.attempt for run in fleet.runs(first)] == [1, 2]
    assert [run.attempt for run in fleet.runs(second)] == [1]


def test_a_soft_limit_that_strikes_while_the_store_hangs_costs_the_job_nothing(
    separate: Made, valkey: Valkey
) -> None:
    with Valkey() as store:
        fleet = separate(broker=valkey.url, store=store.url, reservation="PT6S", visibility=5)
        fleet.start("-c", "1").await_ready()
        assert fleet.end(fleet.send("act", "'warm'")) == "SUCCESS"
        os.kill(store.pid, signal.SIGSTOP)
        try:
            job = fleet.send("act", "'there'", soft_time_limit=1)
            eventually(lambda: f"[{job.id}] received" in fleet.worker.log, seconds=30, what="the delivery")
            time.sleep(2.5)  # for the limit to strike
        finally:
            os.kill(store.pid, signal.SIGCONT)
        assert fleet.end(job, seconds=90) == "SUCCESS"
        assert [run.attempt for run in fleet.runs(job)] == [1]
