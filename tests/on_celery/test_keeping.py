"""A worker that cannot begin or end its jobs now keeps them; what only Celery's meets."""

from __future__ import annotations

import re
import time
from pathlib import Path

import celery
import pytest

from ojs_bridge.celery.ends import Keep, Kept, Unsettled, portable
from ojs_bridge.celery.keeping import QUIET
from ojs_bridge.celery.wire import Wire
from ojs_bridge.rules.decision import DeadLettered
from ojs_bridge.rules.failures import Failure
from tests.contract.steps import dies, raises, retries, sleeps
from tests.on_celery.project import Unpicklable
from tests.servers import RabbitMQ, eventually

#: RabbitMQ drops a message after so many deliveries; Celery before 5.5 has no queues that count.
DELIVERIES = 5 if celery.VERSION >= (5, 5) else None
BEGINS, ENDS = "jobs and retries wait for the store or the broker", "jobs and retries go on"


def test_a_worker_that_was_cut_off_gives_back_once_what_waits_in_it(separate, tmp_path: Path) -> None:
    with RabbitMQ() as server:
        store = f"sqlite:///{tmp_path}/later/ojs.db"  # there is no such folder yet
        fleet = separate(broker=server.url, store=store, insist=1, deliveries=DELIVERIES)
        worker = fleet.start("-c", "2")
        worker.await_ready()
        jobs = [fleet.send("act", "ok") for _ in range(4)]
        eventually(lambda: BEGINS in worker.log, seconds=30, what="the word of the outage")
        server.await_declared(fleet.settings.queue)
        server.kill()
        server.start()
        eventually(lambda: "Trying again" in worker.log or "Connected" in worker.log, seconds=30)
        assert worker.stop() == 0
        fleet.start("-c", "2")
        (tmp_path / "later").mkdir()
        assert [fleet.end(job) for job in jobs] == ["SUCCESS"] * len(jobs)
        assert [len(fleet.runs(job)) for job in jobs] == [1] * len(jobs)


def test_a_store_that_is_away_is_not_there_again_because_the_broker_is_away_too(
    separate, tmp_path: Path
) -> None:
    """With its connection a worker loses what waits in it."""
    with RabbitMQ() as server:
        fleet = separate(broker=server.url, store=f"sqlite:///{tmp_path}/later/ojs.db", insist=1)
        worker = fleet.start("-c", "1")
        worker.await_ready()
        job = fleet.send("act", "ok")
        eventually(lambda: f"[{job.id}] received" in worker.log, seconds=30, what="the delivery")
        server.await_declared(fleet.settings.queue)
        time.sleep(2)  # its child has asked the store meanwhile
        server.kill()
        time.sleep(QUIET + 5)
        assert (worker.log.count(BEGINS), worker.log.count(ENDS)) == (1, 0)
        server.start()
        (tmp_path / "later").mkdir()
        assert fleet.end(job) == "SUCCESS"
        eventually(lambda: ENDS in worker.log, seconds=30, what="the word of its end")
        assert (worker.log.count(BEGINS), worker.log.count(ENDS)) == (1, 1)


@pytest.mark.parametrize("end", [raises(OSError, "down"), retries()])
def test_a_job_whose_outcome_has_no_place_is_named_if_it_was_acknowledged_before_it_ran(
    separate, end: str
) -> None:
    """There is nothing to hold, as under Celery alone; and the worker goes on."""
    with RabbitMQ() as server:
        fleet = separate(broker=server.url, store=None, acks_late=False, insist=1)
        worker = fleet.start("-c", "1")
        worker.await_ready()
        server.await_declared(fleet.settings.queue)
        job = fleet.send("act_kept", sleeps(3, end), "ok")
        eventually(lambda: fleet.runs(job), seconds=20, what="a run")
        server.kill()
        lost = re.compile(rf"CRITICAL.*job {job.id}.* is lost, being acknowledged before it ran: ")
        eventually(lambda: lost.search(worker.log), seconds=40, what=lost.pattern)
        server.start()
        assert fleet.end(fleet.send("act", "ok")) == "SUCCESS"


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("pool", ["prefork", "threads"])
@pytest.mark.parametrize("end", [raises(OSError, "full"), dies()])
def test_a_retry_that_its_full_queue_refuses_is_not_lost(
    separate, rabbitmq: RabbitMQ, pool: str, end: str
) -> None:
    if (pool, end) == ("threads", dies()):
        pytest.skip("it would kill the worker")
    fleet = separate(broker=rabbitmq.url, store=None, limit=1)
    fleet.start("-P", pool, "-c", "1").await_ready()
    job = fleet.send("handled", sleeps(8, end), raises(OSError, "not full"), "ok")
    eventually(lambda: fleet.runs(job), seconds=20, what="a run")
    others = []
    for _ in range(3):  # these jobs wait in the worker
        others.append(fleet.send("act", sleeps(2)))
        received = f"[{others[-1].id}] received"
        eventually(lambda said=received: said in fleet.worker.log, what=received)
    others.append(fleet.send("act", "ok"))  # fills the queue
    assert len(fleet.runs(job)) == 1
    assert [fleet.end(one) for one in (job, *others)] == ["SUCCESS"] * 5
    assert [run.attempt for run in fleet.runs(job)] == [1, 2, 3]
    # Celery stores the result before it calls these handlers.
    eventually(lambda: len(fleet.calls(job)) >= 4, what="the handlers of the end")
    assert [name for name, *_ in fleet.calls(job)] == ["on_retry"] * 2 + ["on_success", "after_return"]
    assert fleet.worker.log.count(BEGINS) == 1


def test_an_outcome_that_no_process_can_be_sent_is_told_in_words() -> None:
    decision = DeadLettered("exhausted", Failure("a.b", "c"), "d")
    sent = portable(Unsettled(1, decision, Unpicklable("what")))
    assert sent is not None
    assert (sent.decision, str(sent.shown)) == (decision, "Unpicklable: what")
    wire = Wire(b"", "application/json", "utf-8", {}, {"queue": lambda: 0})
    assert portable(Unsettled(1, decision, OSError("x"), wire)) is None


def test_a_request_of_another_class_gives_what_is_to_be_held_back() -> None:
    assert Keep(Kept("why")).requeue
