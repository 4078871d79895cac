"""A broker, middleware or listener that fails loses no job."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import dramatiq
import pika
import pytest
import redis
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name
from dramatiq.errors import ConnectionClosed
from dramatiq.middleware import Middleware, Retries, SkipMessage
from dramatiq.middleware.middleware import MiddlewareError
from dramatiq.worker import ConsumerThread
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

from ojs_bridge import Bridge, DeadLetter, Event, StorageRetry
from ojs_bridge.dramatiq import consumer, delivery
from ojs_bridge.engine.engine import Engine
from tests.on_dramatiq.fleet import QUICK, Fleet, Heard
from tests.servers import RabbitMQ, Valkey, eventually


def fails(n: int) -> None:
    raise OSError("down")


def disconnect(connection: pika.BlockingConnection) -> None:
    """Cut a connection's wire, as a network does."""
    connection._impl._transport._sock.shutdown(socket.SHUT_RDWR)


def fails_once(n: int) -> None:
    if n == 1:
        raise OSError("down")


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses that Dramatiq and the bridge make in an outage."""
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    monkeypatch.setattr(consumer, "LATER_SECONDS", 0.05)


@pytest.fixture
def mortal() -> Iterator[Valkey]:
    """A Valkey of the test's own."""
    with Valkey() as server:
        yield server


def redis_fleet(server: Valkey, queue: str, **options: Any) -> Fleet:
    client = redis.Redis.from_url(server.url, retry=RedisRetry(NoBackoff(), 0))
    return Fleet(RedisBroker(client=client), queue, **options)


def test_a_job_that_cannot_be_published_while_redis_is_down_is_held(mortal: Valkey, unique: str) -> None:
    fleet = redis_fleet(mortal, unique)
    down = threading.Event()

    def fails_in_the_outage(n: int) -> None:
        if n == 1:
            assert down.wait(90)
            raise OSError("down")

    job = fleet.send(fleet.actor(fails_in_the_outage))
    with fleet.working(threads=2):
        eventually(lambda: job.runs)
        mortal.kill()
        down.set()
        time.sleep(0.3)
        mortal.start()
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 2
    assert fleet.left() == 0


def test_what_is_given_back_as_redis_goes_away_is_not_taken_from_who_gets_it(
    valkey: Valkey, unique: str
) -> None:
    """The answer is lost, it comes again and runs; Dramatiq insists, and gives nothing back a second time."""
    fleet = Fleet(RedisBroker(url=valkey.url, namespace=unique), unique)
    fleet.send(fleet.actor(fails))
    consumer.wrap(fleet.broker, fleet.bridge.engine)
    deliveries = fleet.broker.consume(unique, prefetch=2, timeout=100)
    given = next(deliveries)
    requeue = fleet.broker.do_requeue

    def answer_is_lost(*args: Any) -> None:
        requeue(*args)
        raise redis.ConnectionError

    fleet.broker.do_requeue = answer_is_lost
    delivery.delivery_of(given).exit = delivery.Exit.GIVE_BACK
    with pytest.raises(ConnectionClosed):
        deliveries.ack(given)
    fleet.broker.do_requeue = requeue
    again = next(deliveries)
    assert again is not None
    deliveries.ack(given)
    assert fleet.broker.client.llen(f"{unique}:{unique}") == 0
    deliveries.ack(again)
    eventually(lambda: fleet.left() == 0)


class KillsOnceDue(Middleware):
    """Kills a server as a delayed job is back in its queue, and its delayed message not acknowledged."""

    def __init__(self, server: Valkey) -> None:
        self._server, self.has_killed = server, threading.Event()

    def after_enqueue(self, broker: dramatiq.Broker, message: Any, delay: int | None) -> None:
        if isinstance(threading.current_thread(), ConsumerThread) and not self.has_killed.is_set():
            self._server.kill()
            self.has_killed.set()


def test_a_delayed_job_whose_redis_goes_away_as_it_is_due_runs_once(mortal: Valkey, unique: str) -> None:
    """Without a store nothing else would tell its second message apart."""
    fleet, kills = redis_fleet(mortal, unique), KillsOnceDue(mortal)
    fleet.broker.add_middleware(kills)
    with fleet.working(threads=2):
        job = fleet.send(fleet.actor(lambda n: None), delay=300)
        assert kills.has_killed.wait(90)
        # Until the thread that acknowledges tries again more seldom than the consumer.
        time.sleep(2)
        mortal.start()
        eventually(lambda: fleet.left() == 0)
        time.sleep(0.5)
        eventually(lambda: fleet.left() == 0)
    assert len(job.runs) == 1


def test_a_worker_whose_redis_is_away_stops(mortal: Valkey, unique: str) -> None:
    """What it could not acknowledge is acknowledged, or delivered again, when Redis is back."""
    fleet = redis_fleet(mortal, unique)
    job = fleet.send(fleet.actor(lambda n: mortal.kill()))
    with fleet.working(threads=2) as worker:
        assert fleet.end(job).type == "job.completed"
    assert not any(thread.is_alive() for thread in worker.workers)
    mortal.start()
    eventually(lambda: fleet.left() == 0, seconds=60)
    assert len(job.runs) == 1


def test_a_pending_retry_survives_an_outage_of_redis(mortal: Valkey, unique: str) -> None:
    fleet = redis_fleet(mortal, unique)
    job = fleet.send(fleet.actor(fails_once, ojs_retry={"initial_interval": "PT5S"}))
    with fleet.working(threads=2):
        eventually(lambda: "job.retrying" in fleet.heard.types(job.id))
        held = fleet.broker.client.smembers
        eventually(lambda: held(f"dramatiq:__acks__.{fleet.broker.broker_id}.{dq_name(unique)}"))
        mortal.kill()
        time.sleep(0.3)
        mortal.start()
        assert fleet.end(job).type == "job.completed"
    assert job.gaps[0] >= 5.0
    assert fleet.left() == 0


def test_a_redis_that_is_full_holds_the_job_until_there_is_room(mortal: Valkey, unique: str) -> None:
    fleet = redis_fleet(mortal, unique)
    client = redis.Redis.from_url(mortal.url)

    def fills_redis(n: int) -> None:
        if n == 1:
            client.config_set("maxmemory", "1")
            raise OSError("down")

    job = fleet.send(fleet.actor(fills_redis))
    with fleet.working(threads=2):
        eventually(lambda: job.runs)
        time.sleep(0.5)
        client.config_set("maxmemory", "0")
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 2
    assert fleet.left() == 0


def test_a_retry_whose_queue_is_gone_is_not_published_into_nothing(rabbitmq: RabbitMQ, unique: str) -> None:
    fleet = Fleet(RabbitmqBroker(url=rabbitmq.url), unique)

    def loses_its_queue(n: int) -> None:
        if n == 1:
            with pika.BlockingConnection(fleet.broker.parameters) as connection:
                connection.channel().queue_delete(dq_name(unique))
            raise OSError("down")

    job = fleet.send(fleet.actor(loses_its_queue))
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 2
    fleet.broker.close()


def test_a_connection_that_idled_to_death_still_buries_the_final_state(
    rabbitmq: RabbitMQ, unique: str
) -> None:
    fleet = Fleet(RabbitmqBroker(url=rabbitmq.url), unique)

    def loses_its_connection(n: int) -> None:
        disconnect(fleet.broker.connection)
        raise DeadLetter("a.b", "kept")

    job = fleet.send(fleet.actor(loses_its_connection))
    with fleet.working(threads=1):
        eventually(lambda: fleet.dead(job))
    assert fleet.dead(job)[0].options["ojs"]["errors"][0]["message"] == "kept"
    fleet.broker.close()


def test_a_stale_delivery_tag_settles_nobody_else_s_message(rabbitmq: RabbitMQ, unique: str) -> None:
    fleet = Fleet(RabbitmqBroker(url=rabbitmq.url), unique)
    go = threading.Event()

    def slow(n: int) -> None:
        assert go.wait(90)
        raise DeadLetter("a.b")

    def follows(n: int) -> None:
        go.set()
        eventually(lambda: fleet.heard.ends(stale.id))
        time.sleep(0.2)

    before = fleet.send(fleet.actor(lambda n: None))
    with fleet.working(threads=3) as worker:
        fleet.end(before)
        stale = fleet.send(fleet.actor(slow))
        eventually(lambda: stale.runs)
        old = worker.consumers[unique].consumer
        disconnect(old.connection)
        eventually(lambda: worker.consumers[unique].consumer is not old and len(stale.runs) == 2)
        other = fleet.send(fleet.actor(follows))
        assert fleet.end(other).type == "job.completed"
    assert fleet.dead(other) == []
    assert len(other.runs) == 1
    assert fleet.left() == 0
    fleet.broker.close()


class Refusing(StubBroker):
    """A broker that takes no delayed message for a while."""

    refusals = 0

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        """Refuse the first few."""
        if delay is not None and self.refusals > 0:
            self.refusals -= 1
            raise OSError("the broker is full")
        return super().enqueue(message, delay=delay)


@pytest.mark.parametrize("early", [False, True], ids=["a retry", "a postponed job"])
def test_a_job_is_held_until_its_retry_is_taken(unique: str, early: bool) -> None:
    broker = Refusing()
    slow = {**QUICK, "initial_interval": "PT3S"}
    fleet = Fleet(broker, unique, retry=slow, storage_retry=StorageRetry.disabled())
    broker.refusals = 3
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 6))
    state = {"ojs": {"v": 1, "attempt": 1, "next_retry_at": later}} if early else {}
    times = 0 if early else 1
    job = fleet.send(fleet.actor(lambda n: fails(n) if n <= times else None), **state)
    with fleet.working():
        assert fleet.end(job).data["attempt"] == (1 if early else 2)
        eventually(lambda: fleet.left() == 0)
    assert broker.refusals == 0
    assert len(job.runs) == times + 1


def test_dramatiq_alone_loses_a_job_whose_retry_is_not_taken(unique: str) -> None:
    """It acknowledges the failed run all the same."""
    broker, ran = Refusing(), []
    broker.refusals = 1

    @dramatiq.actor(broker=broker, actor_name=unique)
    def actor() -> None:
        ran.append(1)
        raise OSError("down")

    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    actor.send()
    eventually(lambda: ran and not broker.queues["default"].unfinished_tasks)
    worker.stop()
    assert broker.refusals == 0
    assert (len(ran), broker.dead_letters, broker.queues["default.DQ"].qsize()) == (1, [], 0)


class BrokenEngine(Engine):
    """An engine with a bug."""

    broken = ""

    def begin(self, *args: Any, **options: Any) -> Any:
        """Fail, perhaps."""
        if self.broken == "begin":
            raise RuntimeError("a bug")
        return super().begin(*args, **options)

    def judge(self, *args: Any) -> Any:
        """Fail, perhaps."""
        if self.broken == "judge":
            raise RuntimeError("a bug")
        return super().judge(*args)


@pytest.mark.parametrize("where", ["begin", "judge"])
def test_a_bug_of_the_bridge_neither_loses_nor_repeats_a_job(broker: Any, unique: str, where: str) -> None:
    bridge = Bridge(retry=QUICK, listeners=[Heard()])
    engine = bridge.engine
    engine.__class__ = BrokenEngine
    fleet = Fleet(broker, unique, bridge)
    job = fleet.send(fleet.actor(fails))
    engine.broken = where  # type: ignore[attr-defined]
    with fleet.working(threads=2):
        eventually(lambda: fleet.dead(job))
    assert len(job.runs) == {"begin": 0, "judge": 1}[where]


class Raising(Middleware):
    """A middleware that raises before some messages are processed."""

    def __init__(self, error: Exception, *, times: int = 1) -> None:
        self.error = error
        self.left = times

    def before_process_message(self, broker: Any, message: Any) -> None:
        if self.left > 0:
            self.left -= 1
            raise self.error


@pytest.mark.parametrize("place", ["before", "after"])
def test_another_middleware_s_error_is_a_failed_attempt(
    stub: StubBroker, stubbed: Callable[..., Fleet], place: str
) -> None:
    error = Raising(MiddlewareError("not now"))
    if place == "before":
        stub.add_middleware(error, before=Retries)
    fleet = stubbed()
    job = fleet.send(fleet.actor(lambda n: None))
    if place == "after":
        stub.add_middleware(error)
    with fleet.working():
        assert fleet.end(job).data["attempt"] == 2
    assert len(job.runs) == 1


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_message_that_another_middleware_skips_is_dramatiq_s_own_matter(
    stub: StubBroker, stubbed: Callable[..., Fleet], place: str
) -> None:
    skip = Raising(SkipMessage("a duplicate"))
    if place == "before":
        stub.add_middleware(skip, before=Retries)
    fleet = stubbed()
    job = fleet.send(fleet.actor(lambda n: None))
    if place == "after":
        stub.add_middleware(skip)
    with fleet.working():
        eventually(lambda: fleet.left() == 0)
    assert (job.runs, fleet.dead(job)) == ([], [])


def test_a_middleware_that_fails_a_success_is_heard(stub: StubBroker, stubbed: Callable[..., Fleet]) -> None:
    class Strict(Middleware):
        def after_process_message(self, broker: Any, message: Any, **outcome: Any) -> None:
            message.fail()

    stub.add_middleware(Strict(), before=Retries)
    fleet = stubbed()
    job = fleet.send(fleet.actor(lambda n: None))
    with fleet.working():
        eventually(lambda: fleet.dead(job))


def test_a_publisher_s_middleware_that_refuses_the_retry_buries_the_job(
    stubbed: Callable[..., Fleet],
) -> None:
    class NoRetries(Middleware):
        def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
            if delay is not None:
                raise MiddlewareError("no delays here")

    fleet = stubbed()
    fleet.broker.add_middleware(NoRetries())
    job = fleet.send(fleet.actor(fails))
    with fleet.working():
        assert fleet.end(job).data["dead_lettered"]
    assert "no delays here" in fleet.bridge.dead_letters.get(job.id).reason
    assert len(job.runs) == 1


# --- listeners and the log ---


def test_listeners_that_raise_or_block_harm_no_job_and_hear_things_in_order(unique: str) -> None:
    blocked = threading.Event()

    def raises(event: Event) -> None:
        raise RuntimeError("a bad listener")

    def blocks(event: Event) -> None:
        blocked.wait(90)

    heard = Heard()
    bridge = Bridge(retry=QUICK, listeners=[raises, blocks, heard])
    fleet = Fleet(StubBroker(), unique, bridge)
    jobs = [fleet.send(fleet.actor(fails)) for _ in range(5)]
    # One thread only: the events of a retry in another thread may come before those that led to it.
    with fleet.working(threads=1):
        eventually(lambda: all(len(job.runs) == 3 for job in jobs) and fleet.left() == 0)
        assert not heard.events
        blocked.set()
    assert bridge.flush(30)
    attempt = ["job.started", "job.failed", "job.retrying"]
    for job in jobs:
        assert heard.types(job.id) == [*attempt, *attempt, "job.started", "job.failed", "job.discarded"]


def test_workers_of_another_thread_count_do_not_matter(broker: dramatiq.Broker, unique: str) -> None:
    fleet = Fleet(broker, unique)
    jobs = [fleet.send(fleet.actor(fails_once)) for _ in range(12)]
    with fleet.working(threads=1):
        for job in jobs:
            assert fleet.end(job).type == "job.completed"
    assert all(len(job.runs) == 2 for job in jobs)


# --- a bridge without listeners reads only what it must before an actor runs ---


@pytest.fixture
def unheard(stub: StubBroker, unique: str) -> Fleet:
    """A fleet whose bridge has no listener."""
    return Fleet(stub, unique, Bridge(retry=QUICK))


def test_jobs_nobody_listens_to_are_retried_and_buried(broker: dramatiq.Broker, unique: str) -> None:
    fleet = Fleet(broker, unique, Bridge(retry=QUICK))
    actor = fleet.actor(fails, ojs_retry={"on_exhaustion": "dead_letter"})
    jobs = [
        fleet.send(actor),
        fleet.send(actor, ojs_retry={"max_attempts": 5}),
        fleet.send(actor, max_retries=1),
    ]
    fine = fleet.send(fleet.actor(lambda n: None))
    with fleet.working(threads=2):
        eventually(lambda: fine.runs and all(fleet.dead(job) for job in jobs))
    assert [len(job.runs) for job in jobs] == [3, 5, 2]
    assert (len(fine.runs), fleet.dead(fine), fleet.left()) == (1, [], 0)


@pytest.mark.parametrize("options", [{"ojs": {}}, {"ojs": {"v": 9}}])
def test_what_nobody_can_read_is_not_run_unheard_either(unheard: Fleet, options: dict[str, Any]) -> None:
    job = unheard.send(unheard.actor(lambda n: None), **options)
    with unheard.working():
        eventually(lambda: unheard.dead(job))
    assert job.runs == []


def test_a_message_s_odd_throws_costs_no_worker_thread_unheard_either(unheard: Fleet) -> None:
    job = unheard.send(unheard.actor(fails), throws=["OSError"])
    probe = unheard.send(unheard.actor(lambda n: None), delay=300)
    with unheard.working(threads=1):
        eventually(lambda: probe.runs)
        eventually(lambda: unheard.left() == 0)
    assert len(job.runs) == 3


def test_a_postponed_job_that_cannot_be_published_is_held_unheard_either(unique: str) -> None:
    broker = Refusing()
    fleet = Fleet(broker, unique, Bridge(retry=QUICK))
    broker.refusals = 3
    later = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 6))
    job = fleet.send(fleet.actor(lambda n: None), ojs={"v": 1, "attempt": 1, "next_retry_at": later})
    with fleet.working():
        eventually(lambda: job.runs)
        eventually(lambda: fleet.left() == 0)
    assert broker.refusals == 0
