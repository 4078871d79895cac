"""A job that RabbitMQ delivers again while it runs, and one that a user sends twice."""

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
from dramatiq.common import dq_name

from ojs_bridge.dramatiq.delivery import DELAYED_AS
from ojs_bridge.messages import OWN_META
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet, broker_of
from tests.servers import RabbitMQ, Valkey, eventually

#: A loaded machine may hold a heartbeat up for some seconds.
RESERVATION = timedelta(seconds=6)
#: Seconds that outlast it.
LONG = 8.0


class Replicated(RabbitmqBroker):
    """A broker with quorum queues: on others RabbitMQ 4.3 waits for ever."""

    def _build_queue_arguments(self, queue_name: str) -> dict[str, Any]:
        return {**super()._build_queue_arguments(queue_name), "x-queue-type": "quorum"}


@pytest.fixture
def impatient_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ that takes a message back after a second, or a little more."""
    with RabbitMQ(consumer_timeout=1000, channel_tick_interval=1000) as server:
        yield server


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
    broker = Replicated(url=impatient_rabbitmq.url)
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db", reservation=RESERVATION)
    taken_back = threading.Event()

    def outlives_both(n: int) -> None:
        time.sleep(LONG)
        assert taken_back.wait(90)

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


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_message_that_a_user_sends_twice_runs_twice(
    request: pytest.FixtureRequest, kind: str, unique: str, tmp_path: Path
) -> None:
    broker: dramatiq.Broker = broker_of(kind, url_of(request, kind), unique)
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db")
    message = fleet.actor(lambda n: None).message("key")
    broker.enqueue(message)
    with fleet.working():
        eventually(lambda: len(fleet.runs["key"]) == 1)
        broker.enqueue(message)
        eventually(lambda: len(fleet.runs["key"]) == 2)
    broker.close()


def test_a_delayed_message_whose_worker_died_as_it_came_due_runs_once(
    valkey: Valkey, unique: str, tmp_path: Path
) -> None:
    """Dramatiq first puts it into its queue, and acknowledges the delayed message later."""
    broker: Any = broker_of("redis", valkey.url, unique)
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db")
    delayed = dq_name(unique)
    list_key, messages_key = f"{unique}:{delayed}", f"{unique}:{delayed}.msgs"
    message = fleet.actor(lambda n: None).message("key")
    broker.enqueue(message, delay=100)
    kept = broker.client.hgetall(messages_key)
    assert len(kept) == 1
    with fleet.working():
        eventually(lambda: len(fleet.runs["key"]) == 1 and not fleet.left())
        # What another worker does for the dead one.
        broker.client.hset(messages_key, mapping=kept)
        broker.client.rpush(list_key, *kept)
        eventually(lambda: not broker.client.exists(messages_key, list_key), what="a copy in the queue")
        eventually(lambda: not fleet.left())
        assert len(fleet.runs["key"]) == 1
        # No operator sees the note, and a user who sends it again has another job.
        assert DELAYED_AS in OWN_META
        broker.enqueue(message, delay=100)
        eventually(lambda: len(fleet.runs["key"]) == 2)
    broker.close()
