"""Other threads settle and acknowledge what a worker's threads have ended; nothing is lost with them."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
import redis
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

from ojs_bridge.dramatiq.brokers import kind_of
from ojs_bridge.store import Grant
from tests.forking import Forked, code
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet, Sent, broker_of
from tests.on_dramatiq.test_acknowledging import grant
from tests.on_dramatiq.test_outages import disconnect
from tests.servers import RabbitMQ, Valkey, eventually

THREADS = 2
#: Dramatiq's own window. On RabbitMQ a message keeps its place in it until it is acknowledged.
WINDOW = 2 * THREADS
#: The most that a worker has ended, and not settled.
MOST = {"redis": 2 * WINDOW, "rabbitmq": WINDOW}
#: Keeps the runs that there are from being settled.
LOCK = "SELECT * FROM ojs_reservations WHERE NOT key LIKE 'ojs-bridge:%' FOR UPDATE"

#: The number of sessions that wait for this one.
WAITS = "SELECT count(*) FROM pg_stat_activity WHERE pg_backend_pid() = ANY(pg_blocking_pids(pid))"


@pytest.fixture(params=MOST)
def kind(request: pytest.FixtureRequest) -> str:
    """A kind of broker."""
    return str(request.param)


@pytest.fixture
def url(request: pytest.FixtureRequest, kind: str) -> str:
    """The URL of a broker."""
    return url_of(request, kind)


@pytest.fixture
def fleet(kind: str, url: str, postgres_url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A fleet whose settlements a test can hold up."""
    monkeypatch.setattr("dramatiq.worker.QUEUE_PREFETCH", WINDOW)
    return Fleet(broker_of(kind, url, unique), unique, store=postgres_url)


def hold_up(fleet: Fleet, url: str) -> Callable[[], None]:
    """Keep a job from being settled, and what ends after it; return the function that lets them go on.

    A lock of PostgreSQL's does that.
    """
    connection, is_held = psycopg.connect(url.replace("+psycopg", "")), threading.Event()

    def holds(n: int) -> None:
        connection.execute(LOCK)
        is_held.set()

    fleet.send(fleet.actor(holds))
    assert is_held.wait(90)
    return connection.close


def waiting(fleet: Fleet) -> int:
    """The number of messages that have ended, and are not acknowledged."""
    acks = kind_of(fleet.broker).acks
    assert acks is not None
    return acks.pending()


def ended(jobs: list[Sent]) -> int:
    """The number of jobs that have run."""
    return sum(len(job.runs) for job in jobs)


def test_a_worker_ends_a_bounded_number_of_jobs_while_none_can_be_settled(
    fleet: Fleet, kind: str, postgres_url: str
) -> None:
    most = MOST[kind]
    with fleet.working(threads=THREADS):
        release = hold_up(fleet, postgres_url)
        jobs = [fleet.send(fleet.actor(lambda n: None)) for _ in range(5 * most)]
        eventually(lambda: ended(jobs) == most - 1, what="as many as may wait")
        time.sleep(0.5)
        assert (ended(jobs), waiting(fleet)) == (most - 1, most)
        release()
        eventually(lambda: ended(jobs) == len(jobs) and fleet.left() == 0)
    assert fleet.left() == 0
    assert [len(job.runs) for job in jobs] == [1] * len(jobs)


def test_a_worker_that_stops_has_settled_and_acknowledged_all_that_it_ended(
    fleet: Fleet, postgres_url: str
) -> None:
    with fleet.working(threads=THREADS):
        release = hold_up(fleet, postgres_url)
        jobs = [fleet.send(fleet.actor(lambda n: None)) for _ in range(WINDOW - 1)]
        eventually(lambda: waiting(fleet) == len(jobs) + 1)
        threading.Timer(0.5, release).start()
    assert fleet.left() == 0
    assert [grant(fleet, job) for job in jobs] == [Grant.SETTLED] * len(jobs)
    assert [fleet.heard.types(job.id) for job in jobs] == [["job.started", "job.completed"]] * len(jobs)


def test_a_store_that_goes_away_while_ended_jobs_wait_costs_none_of_them(
    kind: str, url: str, unique: str
) -> None:
    with Valkey() as store:
        fleet, go = Fleet(broker_of(kind, url, unique), unique, store=store.url), threading.Event()
        actor = fleet.actor(lambda n: go.wait(90))
        jobs = [fleet.send(actor) for _ in range(8)]
        with fleet.working(threads=8):
            eventually(lambda: ended(jobs) == len(jobs))
            store.kill()
            go.set()
            eventually(lambda: waiting(fleet) == 0, seconds=60, what="the acknowledgements")
            store.start()
            later = fleet.send(fleet.actor(lambda n: None))
            fleet.end(later, seconds=60)
            eventually(lambda: all(grant(fleet, job) is Grant.SETTLED for job in jobs), seconds=60)
        assert fleet.left() == 0
        assert [len(job.runs) for job in jobs] == [1] * len(jobs)
        assert [fleet.heard.types(job.id) for job in jobs] == [["job.started", "job.completed"]] * len(jobs)


def test_a_redis_that_goes_away_while_ended_jobs_wait_has_one_line_in_the_log(
    unique: str, postgres_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    with Valkey() as server:
        client = redis.Redis.from_url(server.url, retry=RedisRetry(NoBackoff(), 0))
        fleet, go = Fleet(RedisBroker(client=client), unique, store=postgres_url), threading.Event()
        actor = fleet.actor(lambda n: go.wait(90))
        jobs = [fleet.send(actor) for _ in range(4)]
        with fleet.working(threads=4):
            eventually(lambda: ended(jobs) == len(jobs))
            server.kill()
            go.set()
            eventually(lambda: all(fleet.heard.ends(job.id) for job in jobs), what="all settled")
            eventually(lambda: lines(caplog, "wait for the store or the broker"), what="the line")
            server.start()
            eventually(lambda: fleet.left() == 0, what="the acknowledgements")
            eventually(lambda: lines(caplog, "jobs and retries go on"), what="the end of the outage")
        assert [len(job.runs) for job in jobs] == [1] * len(jobs)
    assert (lines(caplog, "wait for the store or the broker"), lines(caplog, "go on, after")) == (1, 1)


def test_a_connection_that_is_lost_while_ended_jobs_wait_makes_none_of_them_run_again(
    rabbitmq: RabbitMQ, postgres_url: str, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RabbitMQ delivers them again, and the bridge drops what is settled."""
    monkeypatch.setattr("dramatiq.worker.CONSUMER_RESTART_DELAY_SECS", 0.1)
    fleet = Fleet(RabbitmqBroker(url=rabbitmq.url), unique, store=postgres_url)
    with fleet.working(threads=THREADS) as worker:
        release = hold_up(fleet, postgres_url)
        jobs = [fleet.send(fleet.actor(lambda n: None)) for _ in range(WINDOW - 1)]
        eventually(lambda: waiting(fleet) == len(jobs) + 1)
        old = worker.consumers[unique].consumer
        disconnect(old.connection)
        eventually(lambda: worker.consumers[unique].consumer is not old, what="a new connection")
        release()
        eventually(lambda: waiting(fleet) == 0, what="the settlements")
        fleet.end(fleet.send(fleet.actor(lambda n: None)), seconds=60)
        # A second delivery may wait until it sees that its job has ended.
        worker.join()
    assert fleet.left() == 0
    assert [len(job.runs) for job in jobs] == [1] * len(jobs)
    assert [grant(fleet, job) for job in jobs] == [Grant.SETTLED] * len(jobs)
    assert [fleet.heard.types(job.id) for job in jobs] == [["job.started", "job.completed"]] * len(jobs)


def lines(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """The number of lines of the bridge's log with some words."""
    return sum(words in record.getMessage() for record in caplog.records if record.name == "ojs_bridge")


#: A worker in a process of its own. Its first job ends when it is told.
WORKER = """
import sys, time
import dramatiq.worker
from tests.on_dramatiq.fleet import Fleet, broker_of
from tests.on_dramatiq.test_ended import THREADS, WINDOW, notes
kind, url, store, queue, redis_url = sys.argv[1:]
dramatiq.worker.QUEUE_PREFETCH = WINDOW
fleet = Fleet(broker_of(kind, url, queue), queue, store=store)
fleet.actor(notes(redis_url, queue), name="notes")
with fleet.working(threads=THREADS):
    time.sleep(3600)
"""


def notes(redis_url: str, queue: str) -> Callable[[int, str], None]:
    """An actor that notes each of its runs in Redis; the first run waits for a word there."""
    client = redis.Redis.from_url(redis_url)

    def run(n: int, word: str) -> None:
        runs = client.rpush(f"{queue}:ran", word)
        if runs == 1:
            client.blpop(f"{queue}:go", 90)

    return run


def test_a_worker_killed_with_ended_jobs_that_wait_loses_none_of_them(
    fleet: Fleet, kind: str, url: str, valkey: Valkey, postgres_url: str, tmp_path: Path
) -> None:
    """An attempt that was not settled has lost its worker, and is made again, once.

    PostgreSQL has got the settlement of the first job, and carries it out.
    """
    client, ran = redis.Redis.from_url(valkey.url), f"{fleet.queue}:ran"
    actor = fleet.actor(notes(valkey.url, fleet.queue), name="notes")
    words = [f"job {n}" for n in range(WINDOW)]
    jobs = [fleet.send(actor, words[0])]
    arguments = (kind, url, postgres_url, fleet.queue, valkey.url)
    worker = Forked(code, WORKER, *arguments, env=os.environ, log=tmp_path / "log")
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        eventually(lambda: client.llen(ran) == 1, what="the first run")
        connection.execute(LOCK)
        client.rpush(f"{fleet.queue}:go", 1)
        eventually(lambda: connection.execute(WAITS).fetchone() != (0,), what="the first settlement")
        jobs += [fleet.send(actor, word) for word in words[1:]]
        eventually(lambda: client.llen(ran) == len(jobs), what="every run")
        worker.kill()
        worker.wait(90)
    with fleet.working(threads=THREADS):
        eventually(lambda: client.llen(ran) == 2 * len(jobs) - 1, seconds=60)
        eventually(lambda: fleet.left() == 0)
    assert fleet.left() == 0
    runs = client.lrange(ran, 0, -1)
    assert [runs.count(word.encode()) for word in words] == [1] + [2] * (WINDOW - 1)
    assert [fleet.heard.types(job.id)[-1] for job in jobs[1:]] == ["job.completed"] * (WINDOW - 1)
    assert [grant(fleet, job, int(n > 0)) for n, job in enumerate(jobs)] == [Grant.SETTLED] * WINDOW


def test_a_worker_in_a_fork_of_one_that_has_worked_has_threads_of_its_own(fleet: Fleet) -> None:
    actor = fleet.actor(lambda n: None)
    with fleet.working(threads=THREADS):
        fleet.send(actor)
        eventually(lambda: fleet.left() == 0)
    for _ in range(WINDOW):
        fleet.send(actor)

    def work() -> None:
        with fleet.working(threads=THREADS):
            eventually(lambda: fleet.left() == 0)

    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(90)
    assert child.exitcode == 0
    assert fleet.left() == 0
