"""On Redis a successful job leaves nothing behind; one step is enough if a server is broker and store."""

from __future__ import annotations

import json
import multiprocessing
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware, Retries
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

from ojs_bridge import Bridge
from ojs_bridge.adapters.presence import Dead, present_key
from ojs_bridge.dramatiq import receiving
from ojs_bridge.dramatiq.consumer import wrap
from ojs_bridge.dramatiq.on_redis import Hands, present
from ojs_bridge.store import Grant, Reservation
from tests.on_dramatiq.fleet import QUICK, Fleet, Heard, Sent
from tests.servers import Valkey, eventually

STORES = {"same": "/0", "other database": "/1", "other server": ""}


@pytest.fixture(params=STORES)
def make(request: pytest.FixtureRequest, valkey: Valkey, unique: str, tmp_path: Path) -> Callable[..., Fleet]:
    """Makes a fleet on Redis whose store is there, in another database of it, or elsewhere."""
    path = STORES[request.param]
    url = valkey.url.removesuffix("/0") + path if path else f"sqlite:///{tmp_path}/ojs.db"

    def on(*middleware: Middleware) -> Fleet:
        broker = RedisBroker(url=valkey.url, namespace=unique)
        for each in middleware:
            broker.add_middleware(each, before=Retries)
        heard = Heard()
        fleet = Fleet(broker, unique, Bridge(url, QUICK, listeners=[heard], namespace=unique))
        fleet.heard = heard
        return fleet

    return on


def grant(fleet: Fleet, job: Sent, fence: int = 0) -> Grant:
    """The store's answer to a request for a job's turn."""
    store, now = fleet.bridge.store, fleet.bridge.engine.now()
    assert store is not None
    turn, until = Reservation(job.id, fence), now + timedelta(seconds=60)
    return store.reservations.reserve(
        turn, publication="", holder="me", mark="me", now=now, until=until
    ).grant


def test_a_first_run_that_succeeds_is_remembered_for_a_while(make: Callable[..., Fleet]) -> None:
    fleet = make()
    job = fleet.send(fleet.actor(lambda n: None))
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
        eventually(lambda: fleet.left() == 0)
    assert fleet.heard.types(job.id) == ["job.started", "job.completed"]
    assert grant(fleet, job) is Grant.SETTLED


def test_a_later_run_that_succeeds_is_remembered(make: Callable[..., Fleet]) -> None:
    fleet = make()

    def fails_once(n: int) -> None:
        if n == 1:
            raise OSError("down")

    job = fleet.send(fleet.actor(fails_once))
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
        eventually(lambda: fleet.left() == 0)
    assert [grant(fleet, job, fence) for fence in (0, 1)] == [Grant.SETTLED] * 2


def test_a_fork_does_not_share_what_it_fetches_with_the_process_that_made_its_broker(valkey: Valkey) -> None:
    """One would take the other's messages for strays, and give them back while they run."""
    broker, fork = RedisBroker(url=valkey.url, middleware=[]), multiprocessing.get_context("fork")
    made_as, names = broker.broker_id, fork.SimpleQueue()

    def boot() -> None:
        wrap(broker, Bridge().engine)
        names.put(broker.broker_id)

    forks = [fork.Process(target=boot) for _ in range(2)]
    for each in forks:
        each.start()
    for each in forks:
        each.join()
    assert len({made_as, names.get(), names.get()}) == 3


def test_a_run_whose_message_another_worker_has_got_is_remembered(make: Callable[..., Fleet]) -> None:
    fleet = make()

    def is_taken_away(n: int) -> None:
        acks = f"{fleet.queue}:__acks__.{fleet.broker.broker_id}.{fleet.queue}"
        assert fleet.broker.client.srem(acks, job.runs[0].options["redis_message_id"]) == 1

    job = fleet.send(fleet.actor(is_taken_away))
    with fleet.working(threads=1):
        assert fleet.end(job).type == "job.completed"
    assert (len(job.runs), fleet.left()) == (1, 1)
    assert grant(fleet, job) is Grant.SETTLED


def test_a_message_that_its_own_worker_gets_back_while_it_runs_runs_once(make: Callable[..., Fleet]) -> None:
    fleet = make()

    def is_delivered_again(n: int) -> None:
        fleet.broker.do_requeue(fleet.queue, job.runs[0].options["redis_message_id"])
        eventually(lambda: fleet.broker.client.llen(f"{fleet.queue}:{fleet.queue}") == 0)

    job = fleet.send(fleet.actor(is_delivered_again))
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
        fleet.end(fleet.send(fleet.actor(lambda n: None)))
        eventually(lambda: fleet.left() == 0)
    assert len(job.runs) == 1


def test_a_message_that_comes_again_just_as_its_job_ends_does_not_stay(
    make: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other workers have taken the worker for dead, and its consumer fetches what was its own."""
    monkeypatch.setattr(receiving, "STRAYS_SECONDS", 0.1)
    fleet, put, again = make(), Hands.put, threading.Event()
    client, queue = fleet.broker.client, f"{fleet.queue}:{fleet.queue}"

    def is_taken_away(n: int) -> None:
        acks = f"{fleet.queue}:__acks__.{fleet.broker.broker_id}.{fleet.queue}"
        assert client.srem(acks, job.runs[0].options["redis_message_id"]) == 1

    def put_after_it_has_come_again(hands: Hands, message: Any) -> None:
        if not again.is_set() and message.message_id == job.id:
            again.set()
            client.rpush(queue, message.options["redis_message_id"])
            eventually(lambda: client.llen(queue) == 0, what="the consumer")
        put(hands, message)

    monkeypatch.setattr(Hands, "put", put_after_it_has_come_again)
    job = fleet.send(fleet.actor(is_taken_away))
    with fleet.working(threads=2):
        assert fleet.end(job).type == "job.completed"
        assert again.wait(90)
        eventually(lambda: fleet.left() == 0)
    assert len(job.runs) == 1


def test_a_success_that_another_middleware_fails_is_dead_and_settled(make: Callable[..., Fleet]) -> None:
    class Strict(Middleware):
        def after_process_message(self, broker: Any, message: Any, **outcome: Any) -> None:
            message.fail()

    fleet = make(Strict())
    job = fleet.send(fleet.actor(lambda n: None))
    with fleet.working(threads=2):
        eventually(lambda: fleet.dead(job))
        eventually(lambda: fleet.heard.types(job.id)[-1:] == ["job.completed"])
    assert grant(fleet, job) is Grant.SETTLED


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_redis_that_dies_before_the_acknowledgement_gets_it_when_it_is_back(
    unique: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, elsewhere: bool
) -> None:
    """The job's end has one event, also when a store on another server has already settled the job."""
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    with Valkey() as server:
        client = redis.Redis.from_url(server.url, retry=RedisRetry(NoBackoff(), 0))
        store = f"sqlite:///{tmp_path}/ojs.db" if elsewhere else server.url
        fleet = Fleet(RedisBroker(client=client), unique, store=store)
        dark = threading.Event()

        def turns_off_the_light(n: int) -> None:
            server.kill()
            dark.set()

        job = fleet.send(fleet.actor(turns_off_the_light))
        with fleet.working(threads=2):
            assert dark.wait(90)
            eventually(lambda: not elsewhere or fleet.heard.ends(job.id))
            server.start()
            assert fleet.end(job).type == "job.completed"
            eventually(lambda: fleet.left() == 0)
        assert len(job.runs) == 1
        assert fleet.heard.types(job.id) == ["job.started", "job.completed"]
        assert grant(fleet, job) is Grant.SETTLED


@pytest.mark.parametrize("stored", [False, True])
def test_a_thread_leaves_its_acknowledgement_to_the_one_that_sends_and_none_is_lost_with_redis(
    unique: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stored: bool
) -> None:
    """Redis stands still, and one thread waits for it. The other ends all that the worker has fetched.

    With a store, all of them are settled before they are acknowledged.
    """
    store = {"store": f"sqlite:///{tmp_path}/ojs.db"} if stored else {}
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    with Valkey() as server:
        client = redis.Redis.from_url(server.url, retry=RedisRetry(NoBackoff(), 0))
        fleet, begin = Fleet(RedisBroker(client=client), unique, **store), threading.Event()
        actor = fleet.actor(lambda n: begin.wait(90))
        jobs = [fleet.send(actor) for _ in range(4)]
        with fleet.working(threads=2):
            held = f"dramatiq:__acks__.{fleet.broker.broker_id}.{unique}"
            eventually(lambda: client.scard(held) == len(jobs), what="all messages")
            client.client_pause(60_000, all=False)
            begin.set()
            eventually(lambda: all(job.runs for job in jobs), seconds=30, what="every job")
            eventually(
                lambda: not stored or all(grant(fleet, job) is Grant.SETTLED for job in jobs),
                what="all settled",
            )
            server.kill()
            server.start()
            eventually(lambda: fleet.left() == 0)
        assert [len(job.runs) for job in jobs] == [1] * 4


@pytest.mark.parametrize("odd", [None, {}, "\ud800"], ids=["none", "an object", "half a character"])
def test_a_message_that_cannot_be_acknowledged_keeps_no_other_from_it(
    valkey: Valkey, unique: str, odd: object
) -> None:
    """Many acknowledgements travel in one trip. No producer of Dramatiq's writes such a message."""
    fleet = Fleet(RedisBroker(url=valkey.url, namespace=unique), unique)
    actor = fleet.actor(lambda n: None)
    message = {**actor.message("odd").asdict(), "options": {"redis_message_id": odd}}
    queue = f"{unique}:{unique}"
    fleet.broker.client.hset(f"{queue}.msgs", "its id in Redis", json.dumps(message))
    fleet.broker.client.rpush(queue, "its id in Redis")
    jobs = [fleet.send(actor) for _ in range(8)]
    with fleet.working(threads=2):
        eventually(lambda: fleet.left() == 0)
    assert [len(job.runs) for job in jobs] == [1] * 8
    assert fleet.broker.client.hkeys(f"{queue}.XQ.msgs") == [b"its id in Redis"]


def test_a_redis_that_refuses_to_write_for_a_while_gets_every_acknowledgement(
    unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dramatiq would give the last one up, and with it those of other threads."""
    monkeypatch.setattr("dramatiq.worker.POST_PROCESS_MESSAGE_RETRY_DELAY_SECS", 0.1)
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        fleet = Fleet(RedisBroker(url=server.url), unique)

        def loses_the_replicas(n: int) -> None:
            client.config_set("min-replicas-to-write", 1)

        job = fleet.send(fleet.actor(loses_the_replicas))
        with fleet.working(threads=2):
            eventually(lambda: client.info("errorstats").get("errorstat_NOREPLICAS"), what="a refusal")
            client.config_set("min-replicas-to-write", 0)
            eventually(lambda: fleet.left() == 0, what="the acknowledgement")
        assert len(job.runs) == 1


def test_a_worker_that_has_said_that_it_lives_keeps_its_messages(valkey: Valkey, unique: str) -> None:
    """It was silent when another one looked, and spoke before its messages went back."""
    slow = RedisBroker(url=valkey.url, namespace=unique)
    fleet = Fleet(RedisBroker(url=valkey.url, namespace=unique), unique)
    fleet.send(fleet.actor(lambda n: None))
    assert len(slow.do_fetch(unique, 1)) == 1
    here = present(fleet.broker, fleet.bridge.engine.reservations, lambda: [unique], {})
    here.stop()
    slow.client.zadd(present_key(f"{unique}:"), {slow.broker_id: 2.5})
    assert here._give_back(Dead(slow.broker_id, [unique], 1.5)) == 0
    assert here._give_back(Dead(slow.broker_id, [unique], 2.5)) == 1


def test_a_store_that_may_not_touch_the_broker_s_keys_settles_by_itself(valkey: Valkey, unique: str) -> None:
    admin = redis.Redis.from_url(valkey.url)
    admin.acl_setuser(unique, enabled=True, passwords=["+p"], keys=[f"ojs:{{{unique}}}*"], commands=["+@all"])
    url = valkey.url.replace("://", f"://{unique}:p@")
    heard = Heard()
    bridge = Bridge(url, QUICK, listeners=[heard], namespace=unique)
    fleet = Fleet(RedisBroker(url=valkey.url, namespace=unique), unique, bridge)
    fleet.heard = heard
    job = fleet.send(fleet.actor(lambda n: None))
    try:
        with fleet.working(threads=2):
            assert fleet.end(job).type == "job.completed"
            eventually(lambda: fleet.left() == 0)
        assert len(job.runs) == 1
    finally:
        admin.acl_deluser(unique)


def test_a_fleet_s_own_do_ack_hears_of_each_message(make: Callable[..., Fleet]) -> None:
    """Also if it is replaced while a worker runs."""
    fleet = make()
    actor = fleet.actor(lambda n: None)
    asked: set[str] = set()
    native = fleet.broker.do_ack  # type: ignore[attr-defined]

    def do_ack(queue: str, redis_id: str) -> None:
        asked.add(redis_id)
        native(queue, redis_id)

    with fleet.working():
        fleet.end(fleet.send(actor))
        eventually(lambda: fleet.left() == 0)
        fleet.broker.do_ack = do_ack  # type: ignore[attr-defined]
        jobs = [fleet.send(actor) for _ in range(3)]
        for job in jobs:
            fleet.end(job)
        eventually(lambda: len(asked) == 3)
        eventually(lambda: fleet.left() == 0)
    assert [len(job.runs) for job in jobs] == [1, 1, 1]
