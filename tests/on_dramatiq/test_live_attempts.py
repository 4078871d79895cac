"""A live attempt is left alone, and what was settled does not run again (RET-13)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker

from tests.on_dramatiq.application import Application
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet
from tests.servers import RabbitMQ, Valkey, eventually

#: A loaded machine may hold a heartbeat up for some seconds.
RESERVATION = timedelta(seconds=6)
#: Seconds that outlast it.
LONG = 8.0


@pytest.fixture
def impatient_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ that takes a message back after a second, or a little more."""
    with RabbitMQ(consumer_timeout=1000, channel_tick_interval=1000) as server:
        yield server


def works_for(seconds: float) -> Any:
    return lambda n: time.sleep(seconds)


def is_drained(fleet: Fleet) -> bool:
    """Work for longer than a reservation, and return whether duplicates are still put aside."""
    with fleet.working():
        time.sleep(RESERVATION.total_seconds() * 1.2)
    return fleet.left() == 0


@pytest.mark.requirement("RET-13")
def test_a_job_that_outlives_rabbitmq_s_patience_and_its_reservation_runs_once(
    impatient_rabbitmq: RabbitMQ, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    broker = RabbitmqBroker(url=impatient_rabbitmq.url)
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db", reservation=RESERVATION)
    taken_back = threading.Event()

    def outlives_both(n: int) -> None:
        time.sleep(LONG)
        assert taken_back.wait(60)

    actor = fleet.actor(outlives_both)
    with fleet.working(threads=3) as worker:
        eventually(lambda: worker.consumers[unique].consumer)
        first = worker.consumers[unique].consumer
        job = fleet.send(actor)
        eventually(lambda: worker.consumers[unique].consumer is not first, seconds=60)
        taken_back.set()
        assert fleet.end(job).type == "job.completed"
        assert worker.consumers[unique].consumer is not first
    eventually(lambda: is_drained(fleet), seconds=30)
    assert fleet.heard.types(job.id) == ["job.started", "job.completed"]
    assert len(job.runs) == 1
    broker.close()


@pytest.mark.requirement("RET-13")
def test_a_job_that_redis_delivers_again_while_it_runs_runs_once(
    valkey: Valkey, unique: str, tmp_path: Path
) -> None:
    broker = RedisBroker(url=valkey.url, namespace=unique)
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db", reservation=RESERVATION)
    job = fleet.send(fleet.actor(works_for(LONG)))
    with fleet.working(threads=3):
        eventually(lambda: job.runs)
        # As another worker's maintenance does, when this one was not heard of for a while.
        broker.do_requeue(unique, job.runs[0].options["redis_message_id"])
        assert fleet.end(job).type == "job.completed"
        eventually(lambda: fleet.left() == 0)
    assert fleet.heard.types(job.id) == ["job.started", "job.completed"]
    assert len(job.runs) == 1


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_settled_job_whose_acknowledgement_was_lost_does_not_run_again(
    request: pytest.FixtureRequest, kind: str, unique: str, tmp_path: Path
) -> None:
    module = "tests.on_dramatiq.mortal"
    application = Application(url_of(request, kind), unique, tmp_path, module, heartbeat="1000")
    application.produce('slow.send("once", 0)')
    with application.working(fault="settled") as process:
        assert process.wait(30) != 0
    assert application.counts() == {"once": 1, "once-end": 1}
    with application.working():
        application.produce('slow.send("after", 0)')
        eventually(lambda: "Message slow('once', 0) was skipped" in application.log.read_text(), seconds=20)
        eventually(lambda: application.times("after-end"), seconds=20)
    assert application.counts()["once"] == 1


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_message_that_a_user_sends_twice_runs_twice(
    request: pytest.FixtureRequest, kind: str, unique: str, tmp_path: Path
) -> None:
    from tests.on_dramatiq.fleet import broker_of

    broker: dramatiq.Broker = broker_of(kind, url_of(request, kind), unique)
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db")
    message = fleet.actor(works_for(0)).message("key")
    broker.enqueue(message)
    with fleet.working():
        eventually(lambda: len(fleet.runs["key"]) == 1)
        broker.enqueue(message)
        eventually(lambda: len(fleet.runs["key"]) == 2)
    broker.close()
