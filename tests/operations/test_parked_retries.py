"""Retries wait in the store: parked, listed, and published when they are due, by the first worker."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

import pytest

from ojs_bridge import Bridge, ConfigurationError, Event, JobNotFound, StorageRetry
from ojs_bridge.engine import scheduler
from ojs_bridge.engine.runs import Drop, Onward, Run
from ojs_bridge.engine.scheduler import BATCH
from ojs_bridge.errors import StoreError, Unpublishable, Unreachable
from ojs_bridge.rules.decision import RetryAt, later
from ojs_bridge.rules.job import Job, parse_time
from ojs_bridge.store import Parked
from tests.lives import FRAMEWORK, Outbox
from tests.servers.process import eventually

QUICK = StorageRetry(2, "PT0.01S")
POLICY = {"max_attempts": 3, "initial_interval": "PT2H", "backoff_strategy": "none", "jitter": False,
          "max_interval": "PT3H"}  # fmt: skip


class Worker:
    """A bridge whose publisher keeps its messages."""

    def __init__(self, url: str) -> None:
        self.heard: list[Event] = []
        self.bridge = Bridge(url, POLICY, listeners=[self.heard.append], polling_retry=QUICK)
        self.outbox = self.bridge.engine.context.publishers[FRAMEWORK] = Outbox()

    def park(self, job_id: str, type_: str = "billing.charge", queue: str = "default") -> Parked:
        """Have a job fail; its retry is due in two hours."""
        job = Job(job_id, type_, queue)
        begun = self.bridge.engine.begin(job, job, self.bridge.engine.task())
        assert isinstance(begun, Run)
        decision = self.bridge.engine.judge(begun, ConnectionError("down"))
        assert isinstance(decision, RetryAt)
        assert self.bridge.engine.storing.parks(decision.at)
        after = self.bridge.engine.carrying.after(begun.job, decision)
        onward = Onward(after, self.bridge.engine.storing.header(after), decision.at, decision)
        self.bridge.engine.storing.park(begun, onward, FRAMEWORK, {"args": [job_id]})
        self.bridge.engine.settling.settle(begun, decision)
        return self.bridge.retries.get(job_id)

    @property
    def published(self) -> list[str]:
        """Return the jobs whose messages were published."""
        return [parked.id for parked, _ in self.outbox.retried]


@pytest.fixture
def worker(url: str) -> Iterator[Worker]:
    """A worker."""
    worker = Worker(url)
    yield worker
    worker.bridge.stop()


def test_a_parked_retry_says_what_it_is(worker: Worker) -> None:
    """The retry has its time, its reason and its attempt."""
    before = worker.bridge.engine.now()
    parked = worker.park("j-1")
    assert (parked.id, parked.type, parked.queue, parked.framework) == (
        "j-1", "billing.charge", "default", FRAMEWORK)  # fmt: skip
    assert (parked.attempt, parked.max_attempts, parked.fence) == (2, 3, 1)
    assert timedelta(hours=2) <= parked.next_retry_at - before < timedelta(hours=2, minutes=1)
    assert "retry 1 in 7200.000 s" in parked.reason
    assert parse_time(parked.state["next_retry_at"]) == parked.next_retry_at
    assert [error["attempt"] for error in parked.state["errors"]] == [1]
    assert parked.message == {"args": ["j-1"]}


def test_parking_settles_the_attempt(worker: Worker) -> None:
    """Both happen in one step: the job's message is a late copy from then on."""
    worker.park("j-1")
    job = Job("j-1", "billing.charge", "default")
    assert isinstance(worker.bridge.engine.begin(job, job, worker.bridge.engine.task()), Drop)


def test_they_are_listed_in_pages(worker: Worker) -> None:
    """The retry that is due first comes first; filters by queue and type count."""
    for n, (type_, queue) in enumerate([("a.x", "one"), ("a.y", "two"), ("b", "one")]):
        worker.park(f"j-{n}", type_, queue)
    retries = worker.bridge.retries
    assert retries.count() == 3
    first = retries.list(limit=2)
    rest = retries.list(limit=2, cursor=first.next_cursor)
    assert [p.id for p in (*first.jobs, *rest.jobs)] == ["j-0", "j-1", "j-2"]
    assert rest.next_cursor is None
    assert [p.id for p in retries.list(type="a.*").jobs] == ["j-0", "j-1"]
    assert [p.id for p in retries.list(queue="one").jobs] == ["j-0", "j-2"]
    for limit in (0, 1001, "1"):
        with pytest.raises(ValueError, match="limit"):
            retries.list(limit=limit)  # type: ignore[arg-type]


def test_what_is_not_due_stays(worker: Worker) -> None:
    worker.park("j-1")
    worker.bridge.start()
    worker.bridge.stop()
    assert worker.published == []
    assert worker.bridge.retries.count() == 1


def test_no_error_of_a_chore_ends_the_scheduler(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread lives after any error, and due retries are published."""
    swept = []

    def broken(*_: object, **__: object) -> int:
        swept.append(1)
        raise RuntimeError("no store raises this")

    monkeypatch.setattr(worker.bridge.store.reservations, "expire_before", broken)
    worker.park("j-1")
    worker.bridge.start()
    eventually(lambda: swept, what="a sweep")
    worker.bridge.retries.run("j-1")
    eventually(lambda: worker.published, what="the retry was published")


def test_the_log_names_a_chore_that_fails_though_the_store_answers(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """In an outage of the store, one line tells of all."""

    def broken() -> None:
        raise StoreError("the statement took too long")

    at_work = scheduler_of(worker, scheduler.Chore("prune", 60, broken))
    at_work.start()
    told = "prune: not done this time: StoreError: the statement took too long"
    eventually(lambda: caplog.messages == [told], what=told)
    at_work.stop()


def scheduler_of(worker: Worker, *chores: scheduler.Chore) -> scheduler.Scheduler:
    """Return another scheduler of a worker."""
    engine = worker.bridge.engine
    assert engine.store is not None
    return scheduler.Scheduler(
        *(engine.store.parked, engine.store.reservations, engine.context.publishers),
        *(engine.now, engine.give_up, chores),
    )


def test_one_that_is_claimed_ahead_is_published_when_it_is_due(worker: Worker) -> None:
    engine, parked = worker.bridge.engine, worker.park("j-1")
    assert engine.store is not None
    due = later(engine.now(), 0.3)
    assert engine.store.parked.reschedule(parked, due)
    assert scheduler_of(worker).publish_due(FRAMEWORK, worker.outbox, timedelta(minutes=1)) == 1
    assert engine.now() >= due
    assert worker.published == ["j-1"]


def test_a_clock_that_is_set_back_does_not_stop_a_scheduler(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "CLAIM", timedelta(seconds=0.4))
    worker.park("j-1")
    assert scheduler_of(worker).publish_due(FRAMEWORK, worker.outbox, timedelta(hours=3)) == 1
    assert worker.published == []
    worker.bridge.retries.cancel("j-1")


def test_a_scheduler_that_stops_gives_back_what_it_has_claimed_ahead(worker: Worker) -> None:
    worker.park("j-1")
    at_work = scheduler_of(worker)
    at_work.stop()
    at_work.publish_due(FRAMEWORK, worker.outbox, timedelta(hours=3))
    assert worker.published == []
    worker.bridge.retries.cancel("j-1")


def test_one_that_is_run_now_is_published_once(worker: Worker) -> None:
    """The new state does not send the retry back to its first time."""
    worker.park("j-1")
    worker.park("j-2")
    worker.bridge.start()
    worker.bridge.retries.run("j-1")
    eventually(lambda: worker.published, what="the retry was published")
    (parked, state), *more = worker.outbox.retried
    assert (parked.id, more) == ("j-1", [])
    assert parse_time(state["next_retry_at"]) <= worker.bridge.engine.now()
    assert (state["attempt"], len(state["errors"])) == (2, 1)
    eventually(lambda: worker.bridge.retries.count() == 1, what="it left the store")
    with pytest.raises(JobNotFound, match="no parked retry 'j-1'"):
        worker.bridge.retries.run("j-1")


def test_one_that_is_cancelled_never_runs(worker: Worker) -> None:
    """A listener hears of it."""
    worker.park("j-1")
    worker.bridge.retries.cancel("j-1")
    assert worker.bridge.retries.count() == 0
    for action in (worker.bridge.retries.get, worker.bridge.retries.run, worker.bridge.retries.cancel):
        with pytest.raises(JobNotFound):
            action("j-1")
    assert worker.bridge.flush(30)
    assert [event.type for event in worker.heard][-2:] == ["job.cancelled", "operator.action"]


def test_while_the_broker_is_gone_they_wait(worker: Worker) -> None:
    """The retries are published when the broker is back."""
    worker.park("j-1")
    worker.outbox.raises = Unreachable("the broker is gone")
    worker.bridge.retries.run("j-1")
    worker.bridge.start()
    eventually(lambda: worker.outbox.refused >= 2, what="it was tried")
    assert worker.bridge.retries.get("j-1").attempt == 2
    worker.outbox.raises = None
    eventually(lambda: worker.published == ["j-1"], what="the retry was published")


def test_one_that_nobody_can_publish_becomes_a_dead_letter(worker: Worker) -> None:
    """If not, the retry would be tried for ever; the other retries go on."""
    worker.park("j-1")
    worker.outbox.raises = Unpublishable("this message has no queue")
    worker.bridge.retries.run("j-1")
    worker.bridge.start()
    eventually(lambda: worker.bridge.retries.count() == 0, what="it left the parked ones")
    letter = worker.bridge.dead_letters.get("j-1")
    assert "this message has no queue" in letter.reason
    assert letter.message == {"args": ["j-1"]}
    assert [error["attempt"] for error in letter.errors] == [1, 2]


def test_one_that_fails_for_a_reason_of_its_own_stands_in_nobodys_way(worker: Worker) -> None:
    """The retry is tried again when its claim has ended, and the others go on."""
    for job in ("j-1", "j-2"):
        worker.park(job)
    worker.outbox.refuses = {"j-1": OSError("a full disk")}
    for job in ("j-1", "j-2"):
        worker.bridge.retries.run(job)
    worker.bridge.start()
    eventually(lambda: worker.published == ["j-2"], what="the other was published")
    eventually(lambda: worker.bridge.retries.count() == 1, what="it left the store")
    assert worker.bridge.retries.get("j-1").attempt == 2


def test_what_this_process_does_not_serve_waits_for_another(url: str, worker: Worker) -> None:
    """Celery's workers leave Dramatiq's retries to Dramatiq's, however many stand before their own."""
    store = worker.bridge.store
    assert store is not None
    own = worker.park("j-1")
    for n in range(BATCH + 1):
        foreign = replace(own, id=f"f-{n}", key=f"f-{n}", framework="other", next_retry_at=own.parked_at)
        store.parked.park(foreign)
    worker.bridge.retries.run("j-1")
    worker.bridge.start()
    eventually(lambda: worker.published == ["j-1"], what="its own was published")
    eventually(lambda: worker.bridge.retries.count() == BATCH + 1, seconds=20, what="it left the store")
    other = Bridge(url, polling_retry=QUICK)
    outbox = other.engine.context.publishers["other"] = Outbox()
    other.start()
    eventually(lambda: len(outbox.retried) == BATCH + 1, seconds=20, what="the others were published")
    other.stop()
    assert worker.published == ["j-1"]


def test_four_schedulers_publish_each_once(url: str) -> None:
    workers = [Worker(url) for _ in range(4)]
    store = workers[0].bridge.store
    assert store is not None
    template = workers[0].park("j")
    for n in range(1500):
        due = replace(template, id=f"j-{n}", key=f"j-{n}", next_retry_at=template.parked_at)
        store.parked.park(due)
    gate = threading.Barrier(4)

    def start(worker: Worker) -> None:
        gate.wait()
        worker.bridge.start()

    threads = [threading.Thread(target=start, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(lambda: workers[0].bridge.retries.count() == 1, seconds=30, what="all were published")
    for worker in workers:
        worker.bridge.stop()
    published = Counter(job for worker in workers for job in worker.published)
    assert len(published) == 1500
    assert set(published.values()) == {1}


def test_without_a_store_nothing_is_parked() -> None:
    """The error says why."""
    bridge = Bridge()
    assert not bridge.engine.storing.parks(bridge.engine.now() + timedelta(days=1))
    with pytest.raises(ConfigurationError, match="waiting jobs need a store"):
        bridge.retries.list()


def test_what_is_due_soon_is_the_brokers() -> None:
    """`park_after` is the limit."""
    bridge = Bridge("sqlite:///unused.db", park_after="PT5M")
    assert not bridge.engine.storing.parks(bridge.engine.now() + timedelta(minutes=4))
    assert bridge.engine.storing.parks(bridge.engine.now() + timedelta(minutes=6))
