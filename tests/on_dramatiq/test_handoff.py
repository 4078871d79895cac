"""The broker, the store or both die exactly when a job's outcome is to be carried out: the job is kept."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import dramatiq
import pytest
import redis
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import dq_name, xq_name
from dramatiq.middleware import Middleware
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

from ojs_bridge import Bridge, StorageRetry
from ojs_bridge.dramatiq import consumer, receiving
from ojs_bridge.dramatiq.compat import acks_of
from tests.on_dramatiq.fleet import QUICK, Fleet, Heard, Sent, left_in
from tests.servers import RabbitMQ, Server, Valkey, eventually

#: Each actor's policy, by what its failed attempt is to become.
POLICIES = {
    "retried": {"initial_interval": "PT0.5S"},
    "parked": {"initial_interval": "PT3S", "max_interval": "PT3S"},
    "dead": {"max_attempts": 1, "on_exhaustion": "dead_letter"},
}


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses that Dramatiq and the bridge make in an outage."""
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    monkeypatch.setattr(consumer, "LATER_SECONDS", 0.1)


@pytest.fixture(scope="module")
def mortal_rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ that may be killed."""
    with RabbitMQ() as server:
        yield server


@pytest.fixture
def mortal_store() -> Iterator[Valkey]:
    """The server of the store."""
    with Valkey() as server:
        yield server


@pytest.fixture(params=["rabbitmq"])
def servers(request: pytest.FixtureRequest, mortal_store: Valkey) -> Iterator[dict[str, Server]]:
    """The servers of a broker and of a store, apart."""
    if request.param == "rabbitmq":
        yield {"broker": request.getfixturevalue("mortal_rabbitmq"), "store": mortal_store}
        return
    with Valkey() as server:
        yield {"broker": server, "store": mortal_store}


def broker_on(server: Server) -> dramatiq.Broker:
    if isinstance(server, RabbitMQ):
        return RabbitmqBroker(url=server.url, confirm_delivery=True)
    return RedisBroker(client=redis.Redis.from_url(server.url, retry=RedisRetry(NoBackoff(), 0)))


def fleet_on(servers: dict[str, Server], queue: str) -> Fleet:
    fleet = Fleet(
        broker_on(servers["broker"]),
        queue,
        store=servers["store"].url,
        reservation=timedelta(seconds=2),
        park_after=timedelta(seconds=2),
        storage_retry=StorageRetry(max_attempts=3),
    )
    fleet.declare(lambda: None)
    return fleet


def fail_together(fleet: Fleet, lights_out: Any) -> dict[str, Sent]:
    """Send a job of each fate, whose first attempts all fail right after `lights_out`."""
    barrier = threading.Barrier(len(POLICIES), action=lights_out)

    def fails_in_the_dark(n: int) -> None:
        if n == 1:
            barrier.wait(90)
            raise OSError("down")

    return {
        fate: fleet.send(fleet.actor(fails_in_the_dark, ojs_retry={**QUICK, **policy}))
        for fate, policy in POLICIES.items()
    }


def kept_dead(fleet: Fleet, job: Sent) -> list[Any]:
    """A job's dead letters in the store, and its messages in the broker's own dead queue."""
    letters = [letter for letter in fleet.bridge.dead_letters.list().letters if letter.id == job.id]
    return [*letters, *fleet.dead(job)]


@pytest.mark.parametrize("victims", [["broker"], ["store"], ["broker", "store"]], ids="+".join)
def test_whatever_dies_when_jobs_fail_they_end_as_their_policies_say(
    servers: dict[str, Server], unique: str, victims: list[str]
) -> None:
    fleet = fleet_on(servers, unique)
    dark = threading.Event()

    def lights_out() -> None:
        for victim in victims:
            servers[victim].kill()
        dark.set()

    if isinstance(servers["broker"], RabbitMQ):
        for name in (unique, dq_name(unique), xq_name(unique)):
            fleet.broker.declare_queue(unique, ensure=True)
            servers["broker"].await_declared(name)
    jobs = fail_together(fleet, lights_out)
    with fleet.working(threads=4):
        assert dark.wait(90)
        # Meanwhile all jobs find that no server answers, and give up insisting.
        threading.Event().wait(1.5)
        for victim in victims:
            servers[victim].start()
        for fate in ("retried", "parked"):
            assert fleet.end(jobs[fate], seconds=60).type == "job.completed"
        eventually(lambda: kept_dead(fleet, jobs["dead"]), seconds=60)
    assert {fate: len(job.runs) for fate, job in jobs.items()} == {"retried": 2, "parked": 2, "dead": 1}
    assert [jobs[fate].runs[1].ojs["attempt"] for fate in ("retried", "parked")] == [2, 2]
    assert jobs["retried"].gaps[0] >= 0.5
    assert jobs["parked"].gaps[0] >= 3
    assert len(kept_dead(fleet, jobs["dead"])) == 1
    fleet.broker.close()


def test_on_redis_a_retry_takes_its_message_s_place_in_one_step(valkey: Valkey, unique: str) -> None:
    class Watching(Middleware):
        """Counts the job's messages when its retry has just been published, and none of them moves."""

        def __init__(self) -> None:
            self.left: list[int] = []
            self.counted = threading.Semaphore(0)

        def before_process_message(self, broker: Any, message: Any) -> None:
            eventually(lambda: left_in(broker, dq_name(unique)) == 0, what="the end of the delayed message")

        def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            if delay is not None:
                self.left.append(fleet.left())
                self.counted.release()

        def before_delay_message(self, broker: Any, message: Any) -> None:
            self.counted.acquire(timeout=60)

    broker = RedisBroker(url=valkey.url, namespace=unique)
    broker.add_middleware(watching := Watching())
    fleet = Fleet(broker, unique, Bridge(retry=QUICK, listeners=[heard := Heard()]))
    fleet.heard = heard

    def fails(n: int) -> None:
        raise OSError("down")

    job = fleet.send(fleet.actor(fails, ojs_retry={"max_attempts": 4}))
    with fleet.working(threads=2):
        fleet.end(job)
        eventually(lambda: fleet.left() == 0)
    assert watching.left == [1, 1, 1]
    assert len(job.runs) == 4


def test_what_the_answer_to_a_fetch_lost_is_fetched_again(valkey: Valkey, unique: str) -> None:
    broker = RedisBroker(url=valkey.url, namespace=unique)
    fleet = Fleet(broker, unique)
    job = fleet.send(fleet.actor(lambda n: None))
    fetch, lost = broker.do_fetch, threading.Event()

    def loses_an_answer(queue_name: str, count: int) -> Any:
        found = fetch(queue_name, count)
        if found and not lost.is_set():
            lost.set()
            raise redis.ConnectionError("reset by peer")
        return found

    broker.do_fetch = loses_an_answer
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
    assert (lost.is_set(), len(job.runs), fleet.left()) == (True, 1, 0)


@pytest.mark.parametrize("delay", [None, 300])
def test_what_a_repeated_fetch_lost_is_given_back(
    valkey: Valkey, unique: str, monkeypatch: pytest.MonkeyPatch, delay: int | None
) -> None:
    """redis-py repeats a command whose answer did not come, and nobody hears of it."""
    monkeypatch.setattr(receiving, "STRAYS_SECONDS", 0.1)
    broker = RedisBroker(url=valkey.url, namespace=unique)
    fleet = Fleet(broker, unique)
    job = fleet.send(fleet.actor(lambda n: None), delay=delay)
    fetch, lost = broker.do_fetch, threading.Event()

    def repeats(queue_name: str, count: int) -> Any:
        found = fetch(queue_name, count)
        if found and not lost.is_set():
            lost.set()
            return fetch(queue_name, count)
        return found

    broker.do_fetch = repeats
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
        eventually(lambda: fleet.left() == 0)
    assert (lost.is_set(), len(job.runs)) == (True, 1)


def test_what_a_worker_delays_or_runs_is_no_stray(
    valkey: Valkey, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiving, "STRAYS_SECONDS", 0.05)
    fleet = Fleet(RedisBroker(url=valkey.url, namespace=unique), unique)
    released: list[Any] = []
    requeue = fleet.broker.do_requeue

    def noting(queue: str, *ids: Any) -> None:
        # A message that was acknowledged a moment ago is no longer the worker's, and is not given back.
        held = acks_of(fleet.broker, queue)
        released.extend(id_ for id_ in ids if fleet.broker.client.sismember(held, id_))
        requeue(queue, *ids)

    fleet.broker.do_requeue = noting
    looked = threading.Semaphore(0)

    def sees_several_looks(n: int) -> None:
        for _ in range(4):
            assert looked.acquire(timeout=20)

    members = fleet.broker.client.smembers

    def watched(key: str) -> Any:
        looked.release()
        return members(key)

    fleet.broker.client.smembers = watched
    actor = fleet.actor(sees_several_looks)
    jobs = [fleet.send(actor), fleet.send(fleet.actor(lambda n: None), delay=1000)]
    with fleet.working(threads=2):
        for job in jobs:
            assert fleet.end(job).type == "job.completed"
        eventually(lambda: fleet.left() == 0)
        assert released == []
    assert [len(job.runs) for job in jobs] == [1, 1]
