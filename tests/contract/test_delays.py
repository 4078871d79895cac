"""A job that its user delays waits in the store: it runs once and never early, and nothing loses it."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from ojs_bridge.errors import StoreError, Unstorable
from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.steps import raises
from tests.servers import Valkey, eventually
from tests.transactions import WAYS

Made = Callable[..., Fleet]
HOURS = 7200


@pytest.fixture(params=SERVED)
def fleet(made: Made, request: pytest.FixtureRequest) -> Fleet:
    """A fleet that parks delays of more than a second; it has no worker yet."""
    return made(request.param, park_delays=True, park_after="PT1S")


def test_a_delay_waits_in_the_store_and_its_job_runs_once_on_time(fleet: Fleet) -> None:
    """Its producer publishes nothing (vectors L2-DEL-002 and L2-DEL-003)."""
    sent = fleet.bridge.engine.now()
    job = fleet.send("act", "ok", delay=3)
    (waiting,) = fleet.bridge.scheduled.list().jobs
    assert (waiting.id, waiting.attempt, waiting.max_attempts, waiting.queue) == (job, 1, 3, fleet.queue)
    assert sent + timedelta(seconds=3) <= waiting.next_retry_at <= sent + timedelta(seconds=3 + fleet.late)
    assert (waiting.to_ojs()["state"], fleet.bridge.jobs.get(job).attempts) == ("scheduled", 0)
    assert (fleet.left(), fleet.bridge.retries.count(), fleet.bridge.counts()["scheduled"]) == (0, 0, 1)
    fleet.start().await_ready()
    assert end(fleet, job).type == "job.completed"
    (run,) = fleet.runs(job)
    assert run.at >= waiting.next_retry_at.timestamp()
    eventually(lambda: fleet.bridge.scheduled.count() == 0, what="an empty store")


def test_a_delay_that_is_over_is_none(fleet: Fleet) -> None:
    """The job runs at once (vector L2-DEL-004)."""
    job = fleet.send("act", "ok", delay=-5)
    assert fleet.bridge.scheduled.count() == 0
    fleet.start().await_ready()
    assert end(fleet, job).type == "job.completed"
    assert len(fleet.runs(job)) == 1


def test_a_delayed_job_runs_unless_it_has_expired(fleet: Fleet) -> None:
    """One that has expired when it is due never runs (vectors L2-TTL-001 and L2-TTL-002)."""
    expired, lives = (
        fleet.send("act", "ok", delay=1.5, lives=1),
        fleet.send("act", "ok", delay=1.5, lives=3600),
    )
    assert fleet.bridge.scheduled.count() == 2
    fleet.start().await_ready()
    assert end(fleet, lives).type == "job.completed"
    eventually(lambda: fleet.left() == 0, what="an empty queue")
    assert (fleet.runs(expired), len(fleet.runs(lives)), fleet.bridge.waiting.count()) == ([], 1, 0)


def test_a_worker_takes_over_the_delay_of_a_producer_without_the_bridge(fleet: Fleet) -> None:
    """A kill -9 of that worker does not matter to it."""
    fleet.start().await_ready()
    due = fleet.bridge.engine.now() + timedelta(seconds=HOURS)
    job = fleet.put_delayed(due)
    eventually(lambda: fleet.bridge.scheduled.count() == 1, what="a parked delay")
    eventually(lambda: fleet.left() == 0, what="an empty queue")
    (waiting,) = fleet.bridge.scheduled.list().jobs
    assert waiting.id == job
    assert abs(waiting.next_retry_at - due) < timedelta(milliseconds=2)
    fleet.replace().await_ready()
    fleet.bridge.scheduled.run(job)
    assert end(fleet, job).type == "job.completed"
    assert len(fleet.runs(job)) == 1


def test_a_delay_that_is_cancelled_never_runs(fleet: Fleet) -> None:
    job = fleet.send("act", "ok", delay=HOURS)
    fleet.bridge.scheduled.cancel(job)
    fleet.start().await_ready()
    end(fleet, fleet.send("act", "another one"))
    assert (fleet.runs(job), fleet.bridge.scheduled.count()) == ([], 0)


def test_two_delays_under_one_id_are_two_jobs_and_so_is_one_that_runs_at_once(fleet: Fleet) -> None:
    """As natively."""
    job = fleet.send("act", "ok", delay=HOURS)
    for _ in range(2):
        fleet.send("act", "ok", delay=HOURS, id=job)
    fleet.start().await_ready()
    fleet.send("act", "ok", id=job)
    await_runs(fleet, job)
    assert fleet.bridge.scheduled.count() == 3
    for left in (2, 1, 0):
        fleet.bridge.scheduled.run(job)
        eventually(lambda left=left: fleet.bridge.scheduled.count() == left, what="one job less")
    await_runs(fleet, job, runs=4)


def test_a_delay_that_fails_is_retried_and_is_a_dead_letter_as_any_job(fleet: Fleet) -> None:
    fleet.start().await_ready()
    job = fleet.send("act_kept", raises(OSError, "one"), raises(OSError, "two"), delay=1.5)
    assert end(fleet, job).data["dead_lettered"]


def test_without_its_store_a_producer_leaves_a_delay_to_the_broker(made: Made, fleet: Fleet) -> None:
    options = {"park_delays": True, "park_after": "PT1S", "insist": 1}
    away = made(f"{fleet.framework}-valkey", store="redis://127.0.0.1:1/0", **options)
    job = away.send("act", "ok", delay=1.5)
    assert away.left() == 1 and job


def test_what_a_producer_has_left_to_the_broker_is_taken_over_until_its_own_time(
    made: Made, fleet: Fleet
) -> None:
    """The broker has it for a shorter time, because Redis and RabbitMQ hold nothing for long."""
    options = {"park_delays": True, "park_after": "PT1S", "insist": 1}
    same = {"queue": fleet.queue, "broker": fleet.settings.broker}
    away = made(f"{fleet.framework}-valkey", store="redis://127.0.0.1:1/0", **options, **same)
    due = fleet.bridge.engine.now() + timedelta(seconds=HOURS)
    job = away.send("act", "ok", delay=HOURS)
    fleet.start().await_ready()
    eventually(lambda: fleet.bridge.scheduled.count() == 1, what="a parked delay")
    late = fleet.bridge.scheduled.get(job).next_retry_at - due
    assert timedelta(milliseconds=-1) < late < timedelta(seconds=60)


@pytest.fixture
def small() -> Iterator[None]:
    """Each connection to SQLite takes texts of 100,000 bytes at most, not of 1,000,000,000."""

    def limit(connection: Any, _record: object) -> None:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 100_000)

    sa.event.listen(sa.pool.Pool, "connect", limit)
    yield
    sa.event.remove(sa.pool.Pool, "connect", limit)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="SQLite has no limit there")
@pytest.mark.usefixtures("small")
def test_what_is_too_long_for_the_store_is_an_error_at_the_send(fleet: Fleet) -> None:
    """Nothing of it is anywhere, and the store takes the next job."""
    long = "x" * 100_000
    with pytest.raises(Unstorable, match=r"the store 'sqlite:.*' cannot keep this: string or blob too big"):
        fleet.send("act", long, delay=HOURS)
    _, begin = WAYS["sqlalchemy-sqlite"]
    with begin(fleet.store) as given:
        with pytest.raises(StoreError, match=r"is not in the transaction: DataError: string or blob too big"):
            fleet.send("act", long, within=given)
        kept = fleet.send("act", "ok", within=given)
    later = fleet.send("act", "ok", delay=HOURS)
    eventually(lambda: fleet.left() == 1, what="the job that was sent in the transaction")
    assert [waiting.id for waiting in fleet.bridge.scheduled.list().jobs] == [later]
    fleet.start().await_ready()
    assert end(fleet, kept).type == "job.completed"
    fleet.bridge.engine.close()


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_what_is_too_long_for_a_postgresql_is_an_error_at_the_send(
    made: Made, kind: str, postgres_url: str
) -> None:
    """Its own limit is a gigabyte; a column that takes less stands for it."""
    fleet = made(kind, store=postgres_url, park_delays=True, park_after="PT1S")
    fleet.bridge.store.prepare()
    with sa.create_engine(postgres_url).begin() as connection:
        connection.execute(sa.text("ALTER TABLE ojs_parked ALTER COLUMN record TYPE varchar(100000)"))
    long = "x" * 100_000
    with pytest.raises(Unstorable, match=r"the store 'postgresql.*' cannot keep this: value too long"):
        fleet.send("act", long, delay=HOURS)
    _, begin = WAYS["psycopg"]
    with (
        pytest.raises(StoreError, match=r"is not in the transaction: .*value too long"),
        begin(fleet.store) as given,
    ):
        fleet.send("act", "not this one either", within=given)
        fleet.send("act", long, within=given)
    later = fleet.send("act", "ok", delay=HOURS)
    assert (fleet.left(), [waiting.id for waiting in fleet.bridge.waiting.list().jobs]) == (0, [later])
    fleet.bridge.engine.close()


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_what_is_too_long_for_a_redis_is_an_error_at_the_send(made: Made, kind: str) -> None:
    """It is no outage: the next delay waits in the store again."""
    with Valkey(proto_max_bulk_len="1mb") as server:
        small = made(kind, store=server.url, park_delays=True, park_after="PT1S")
        for length in (1_100_000, 20_000_000):
            with pytest.raises(Unstorable, match=r"bytes are more than its proto-max-bulk-len, 1,048,576"):
                small.send("act", "x" * length, delay=HOURS)
        small.send("act", "ok", delay=HOURS)
        assert (small.left(), small.bridge.scheduled.count()) == (0, 1)
