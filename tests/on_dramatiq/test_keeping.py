"""Waiting uses up no deliveries: a worker keeps what it cannot begin or end, and tries again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import TimeLimit

from ojs_bridge import StorageRetry
from ojs_bridge.dramatiq import brokers, consumer
from ojs_bridge.engine import storage_retry
from tests.on_dramatiq.fleet import QUICK, Fleet
from tests.servers import RabbitMQ, Valkey, eventually

#: The number of deliveries after which RabbitMQ drops a message.
LIMIT = 5
#: Seconds of an outage, in which a delivery could come again far more often than that.
AWAY = 3.0


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses that Dramatiq and the bridge make in an outage."""
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    monkeypatch.setattr(consumer, "LATER_SECONDS", 0.05)
    monkeypatch.setattr(storage_retry, "MOST", 0.2)


class Limited(RabbitmqBroker):
    """A broker whose queues are of the kind that drops what was delivered too often."""

    taking = True

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        arguments = super()._build_queue_arguments(queue_name)
        return {**arguments, "x-queue-type": "quorum", "x-delivery-limit": LIMIT}

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        """Take a message, unless nothing is taken at the moment."""
        if not self.taking:
            raise OSError("blocked")
        return super().enqueue(message, delay=delay)


@pytest.fixture
def store() -> Iterator[Valkey]:
    """A server of a store that may be killed."""
    with Valkey() as server:
        yield server


@pytest.fixture
def limited(rabbitmq: RabbitMQ) -> Iterator[Limited]:
    """A broker with limited queues."""
    broker = Limited(url=rabbitmq.url, confirm_delivery=True)
    yield broker
    broker.close()


@pytest.fixture
def fleet(limited: Limited, store: Valkey, unique: str) -> Fleet:
    """A fleet on them, which hears at once that its store is away."""
    fleet = Fleet(limited, unique, store=store.url, storage_retry=StorageRetry.disabled())
    fleet.declare(lambda: None)
    return fleet


def said(caplog: pytest.LogCaptureFixture, word: str) -> int:
    """Count the lines of the bridge's log that hold a word."""
    return sum(word in r.getMessage() for r in caplog.records if r.name == "ojs_bridge")


def test_an_outcome_that_neither_broker_nor_store_takes_is_held(
    fleet: Fleet, limited: Limited, store: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    def fails_in_the_dark(n: int) -> None:
        if n == 1:
            store.kill()
            limited.taking = False
            raise OSError("down")

    job = fleet.send(fleet.actor(fails_in_the_dark))
    with fleet.working(threads=2):
        eventually(lambda: job.runs)
        time.sleep(AWAY)
        limited.taking = True
        eventually(lambda: said(caplog, "jobs and retries go on"))
        store.start()
        assert fleet.end(job).type == "job.completed"
    assert [run.ojs.get("attempt", 1) for run in job.runs] == [1, 2]
    assert len(job.runs[1].ojs["errors"]) == 1
    assert fleet.left() == 0


def test_a_long_delay_travels_in_hops_that_rabbitmq_has_patience_for(
    limited: Limited, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(brokers.OnRabbitMQ, "kept_at_most", 0.5)
    fleet = Fleet(limited, unique, retry={**QUICK, "initial_interval": "PT2S"})
    delays: list[int] = []
    enqueue = limited.enqueue

    def watched(message: Any, *, delay: int | None = None) -> Any:
        delays.append(delay or 0)
        return enqueue(message, delay=delay)

    limited.enqueue = watched  # type: ignore[method-assign]

    def fails_once(n: int) -> None:
        if n == 1:
            raise OSError("down")

    job = fleet.send(fleet.actor(fails_once))
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 2
    assert job.gaps[0] >= 2
    assert max(delays) <= 502
    assert fleet.left() == 0


def test_a_time_limit_counts_from_when_the_job_begins(
    stub: StubBroker, store: Valkey, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    stub.middleware = [m for m in stub.middleware if not isinstance(m, TimeLimit)]
    stub.add_middleware(TimeLimit(interval=50))
    stub.emit_after("process_boot")
    fleet = Fleet(stub, unique, store=store.url, storage_retry=StorageRetry.disabled())

    def hangs(n: int) -> None:
        for _ in range(1000):
            time.sleep(0.01)

    quick = fleet.actor(lambda n: time.sleep(0.5), time_limit=1000)
    endless = fleet.actor(hangs, time_limit=1000, max_retries=0)
    with fleet.working(threads=2):
        store.kill()
        jobs = [fleet.send(quick), fleet.send(endless)]
        time.sleep(2.5)
        store.start()
        assert fleet.end(jobs[0]).type == "job.completed"
        assert fleet.end(jobs[1]).type == "job.discarded"
    assert [len(job.runs) for job in jobs] == [1, 1]
    assert said(caplog, "failed with timeout") == 1


def test_a_postponed_job_that_nothing_takes_begins_when_its_time_comes(limited: Limited, unique: str) -> None:
    fleet = Fleet(limited, unique, storage_retry=StorageRetry.disabled())
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + AWAY))
    job = fleet.send(fleet.actor(lambda n: None), ojs={"v": 1, "attempt": 1, "next_retry_at": later})
    limited.taking = False
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 1
    assert fleet.left() == 0
