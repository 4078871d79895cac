"""On Redis two threads settle and acknowledge what other threads have ended; nothing is lost with them."""

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
from dramatiq.brokers.redis import RedisBroker
from redis.backoff import NoBackoff
from redis.retry import Retry as RedisRetry

from ojs_bridge.store import Grant
from tests.forking import Forked, code
from tests.on_dramatiq.fleet import Fleet, Sent
from tests.on_dramatiq.test_acknowledging import grant
from tests.servers import Valkey, eventually

THREADS = 2
#: Dramatiq's own window, and the most that a worker has ended, and not settled.
WINDOW, MOST = 2 * THREADS, 4 * THREADS
#: Keeps the runs that there are from being settled.
LOCK = "SELECT * FROM ojs_reservations WHERE NOT key LIKE 'ojs-bridge:%' FOR UPDATE"


@pytest.fixture
def fleet(valkey: Valkey, postgres_url: str, unique: str, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """A fleet whose settlements a test can hold up."""
    monkeypatch.setattr("dramatiq.worker.QUEUE_PREFETCH", WINDOW)
    broker = RedisBroker(url=valkey.url, namespace=unique)
    return Fleet(broker, unique, store=postgres_url)


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


def ended(jobs: list[Sent]) -> int:
    """The number of jobs that have run."""
    return sum(len(job.runs) for job in jobs)


def test_a_worker_ends_a_bounded_number_of_jobs_while_none_can_be_settled(
    fleet: Fleet, postgres_url: str
) -> None:
    with fleet.working(threads=THREADS):
        release = hold_up(fleet, postgres_url)
        jobs = [fleet.send(fleet.actor(lambda n: None)) for _ in range(5 * MOST)]
        eventually(lambda: ended(jobs) == MOST - 1, what="as many as may wait")
        time.sleep(0.5)
        assert ended(jobs) == MOST - 1
        release()
        eventually(lambda: ended(jobs) == len(jobs) and fleet.left() == 0)
    assert [len(job.runs) for job in jobs] == [1] * len(jobs)


def test_a_worker_that_stops_has_settled_and_acknowledged_all_that_it_ended(
    fleet: Fleet, postgres_url: str
) -> None:
    with fleet.working(threads=THREADS):
        release = hold_up(fleet, postgres_url)
        jobs = [fleet.send(fleet.actor(lambda n: None)) for _ in range(WINDOW)]
        eventually(lambda: ended(jobs) == len(jobs))
        assert fleet.left() == len(jobs) + 1
        threading.Timer(0.5, release).start()
    assert fleet.left() == 0
    assert [grant(fleet, job) for job in jobs] == [Grant.SETTLED] * len(jobs)
    assert [fleet.heard.types(job.id) for job in jobs] == [["job.started", "job.completed"]] * len(jobs)


def test_a_store_that_goes_away_while_ended_jobs_wait_costs_none_of_them(valkey: Valkey, unique: str) -> None:
    with Valkey() as store:
        fleet, go = (
            Fleet(RedisBroker(url=valkey.url, namespace=unique), unique, store=store.url),
            threading.Event(),
        )
        actor = fleet.actor(lambda n: go.wait(90))
        jobs = [fleet.send(actor) for _ in range(8)]
        with fleet.working(threads=8):
            eventually(lambda: ended(jobs) == len(jobs))
            store.kill()
            go.set()
            eventually(lambda: fleet.left() == 0, seconds=60, what="the acknowledgements")
            store.start()
            later = fleet.send(fleet.actor(lambda n: None))
            fleet.end(later, seconds=60)
            eventually(lambda: all(grant(fleet, job) is Grant.SETTLED for job in jobs), seconds=60)
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


def lines(caplog: pytest.LogCaptureFixture, words: str) -> int:
    """The number of lines of the bridge's log with some words."""
    return sum(words in record.getMessage() for record in caplog.records if record.name == "ojs_bridge")


#: A worker in a process of its own. Its first job ends when it is told.
WORKER = """
import sys, time
from dramatiq.brokers.redis import RedisBroker
from tests.forking import Forked, code
from tests.on_dramatiq.fleet import Fleet
from tests.on_dramatiq.test_ended import THREADS, notes
url, store, queue = sys.argv[1:]
fleet = Fleet(RedisBroker(url=url, namespace=queue), queue, store=store)
fleet.actor(notes(fleet), name="notes")
with fleet.working(threads=THREADS):
    time.sleep(3600)
"""


def notes(fleet: Fleet) -> Callable[[int, str], None]:
    """An actor that notes each of its runs in Redis; the first run waits for a word there."""

    def run(n: int, word: str) -> None:
        runs = fleet.broker.client.rpush(f"{fleet.queue}:ran", word)
        if runs == 1:
            fleet.broker.client.blpop(f"{fleet.queue}:go", 90)

    return run


def test_a_worker_killed_with_ended_jobs_that_wait_loses_none_of_them(
    fleet: Fleet, valkey: Valkey, postgres_url: str, tmp_path: Path
) -> None:
    """An attempt that was not settled has lost its worker, and is made again, once.

    PostgreSQL has got the settlement of the first job, and carries it out.
    """
    client, ran = fleet.broker.client, f"{fleet.queue}:ran"
    actor, words = fleet.actor(notes(fleet), name="notes"), [f"job {n}" for n in range(WINDOW)]
    jobs = [fleet.send(actor, words[0])]
    worker = Forked(code, WORKER, valkey.url, postgres_url, fleet.queue, env=os.environ, log=tmp_path / "log")
    with psycopg.connect(postgres_url.replace("+psycopg", "")) as connection:
        eventually(lambda: client.llen(ran) == 1, what="the first run")
        connection.execute(LOCK)
        client.rpush(f"{fleet.queue}:go", 1)
        jobs += [fleet.send(actor, word) for word in words[1:]]
        eventually(lambda: client.llen(ran) == len(jobs), what="every run")
        worker.kill()
        worker.wait(90)
    with fleet.working(threads=THREADS):
        eventually(lambda: fleet.left() == 0, seconds=60)
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
