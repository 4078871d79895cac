"""Celery's delays of any form wait in the store, and the job is as it was sent."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from celery import Celery, chain, chord, group
from celery.beat import Service
from kombu import Connection

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, eventually

HOURS = 7200


@pytest.fixture
def fleet(separate: Callable[..., Fleet]) -> Fleet:
    """A fleet that parks delays; it has no worker yet."""
    return separate(park_delays=True, park_after="PT1S")


def run_all(fleet: Fleet, many: int) -> None:
    """Wait until so many jobs wait in the store, and have them run now."""
    eventually(lambda: fleet.bridge.scheduled.count() == many, what=f"{many} parked delays")
    for parked in fleet.bridge.scheduled.list().jobs:
        fleet.bridge.scheduled.run(parked.id)


def test_delays_within_a_canvas(fleet: Fleet) -> None:
    """A delay of the first job, of a later one, of a member, of a body, and of a whole group."""
    fleet.start("-c", "2").await_ready()
    act, follow = fleet.task("act"), fleet.task("follow")
    chained = chain(act.si("first"), follow.s("end").set(countdown=HOURS)).apply_async(countdown=HOURS)
    grouped = group(act.si(1), act.si(2)).apply_async(countdown=HOURS)
    members = [act.si(1).set(countdown=HOURS), act.si(2)]
    chorded = chord(members, follow.s("body").set(countdown=HOURS)).delay()
    run_all(fleet, 4)
    run_all(fleet, 2)
    assert [chained.get(timeout=90), chorded.get(timeout=90)] == ["end", "body"]
    assert [fleet.end(job) for job in grouped] == ["SUCCESS", "SUCCESS"]


def test_a_delay_in_the_schedule_of_beat(fleet: Fleet, tmp_path: Path) -> None:
    """Beat has a producer of its own, to the broker of its app."""
    fleet.app.conf.beat_schedule = {
        "nightly": {"task": "act", "schedule": 1.0, "args": ["ok"], "options": {"countdown": HOURS}}
    }
    beat = Service(fleet.app, max_interval=1, schedule_filename=str(tmp_path / "beat"))
    thread = threading.Thread(target=beat.start, kwargs={"embedded_process": True})
    thread.start()
    eventually(lambda: fleet.bridge.scheduled.count() > 0, what="a parked delay")
    beat.stop(wait=True)
    thread.join()
    jobs = [fleet.app.AsyncResult(parked.id) for parked in fleet.bridge.scheduled.list().jobs]
    assert fleet.waiting() == 0
    fleet.start("-c", "1").await_ready()
    run_all(fleet, len(jobs))
    assert {fleet.end(job) for job in jobs} == {"SUCCESS"}
    assert [len(fleet.runs(job)) for job in jobs] == [1] * len(jobs)


def test_a_delayed_job_is_as_it_was_sent(fleet: Fleet) -> None:
    """What its task sees of it, what follows it, and when it expires."""
    now = datetime.now(timezone.utc)
    eta, expires = now + timedelta(hours=2), now + timedelta(hours=3)
    link = fleet.task("act").si("linked").set(task_id=f"{fleet.settings.queue}-link")
    options: dict[str, Any] = {"priority": 3, "headers": {"x-shop": "7"}, "link": link, "shadow": "shown"}
    job = fleet.send("act", "ok", eta=eta, expires=expires, **options)
    (parked,) = fleet.bridge.scheduled.list().jobs
    assert parked.next_retry_at == eta.replace(microsecond=eta.microsecond // 1000 * 1000) or (
        timedelta() < parked.next_retry_at - eta < timedelta(milliseconds=1)
    )
    fleet.start("-c", "1").await_ready()
    run_all(fleet, 1)
    assert fleet.end(job) == "SUCCESS"
    (run,) = (ran.more for ran in fleet.runs(job))
    assert "'x-shop': '7'" in run["headers"]
    assert "'priority': 3" in run["properties"]
    assert (datetime.fromisoformat(run["expires"]), run["shadow"]) == (expires, "shown")
    assert fleet.end(fleet.app.AsyncResult(link.options["task_id"])) == "SUCCESS"


def test_a_delayed_job_that_has_expired_when_it_is_due_does_not_run(fleet: Fleet) -> None:
    job = fleet.send("act", "ok", countdown=3, expires=1.5)
    fleet.start("-c", "1").await_ready()
    assert fleet.end(job) == "REVOKED"
    assert fleet.runs(job) == []


BERLIN = ZoneInfo("Europe/Berlin")


@pytest.mark.parametrize(
    ("eta", "instant"),
    [
        # The clocks go from 2:00 to 3:00 that day: half past two is half an hour after the change.
        (datetime(2027, 3, 28, 2, 30, tzinfo=BERLIN), "2027-03-28T01:30:00.000Z"),
        # They go from 3:00 to 2:00: of two times, the first one counts, unless it says that it is the second.
        (datetime(2027, 10, 31, 2, 30, tzinfo=BERLIN), "2027-10-31T00:30:00.000Z"),
        (datetime(2027, 10, 31, 2, 30, tzinfo=BERLIN, fold=1), "2027-10-31T01:30:00.000Z"),
        # Celery takes a time without a zone for one in UTC, whatever the zone of the app.
        (datetime(2027, 3, 28, 2, 30), "2027-03-28T02:30:00.000Z"),
        ("2027-03-28T02:30:00", "2027-03-28T02:30:00.000Z"),
        ("2027-07-01T12:00:00+09:00", "2027-07-01T03:00:00.000Z"),
    ],
)
def test_an_eta_is_one_instant(fleet: Fleet, eta: Any, instant: str) -> None:
    fleet.app.timezone = BERLIN
    job = fleet.send("act", "ok", eta=eta)
    assert fleet.bridge.scheduled.get(job.id).to_ojs()["scheduled_at"] == instant


@pytest.mark.parametrize("eta", ["tomorrow", "2027-13-01T00:00:00", 5, object()])
def test_an_eta_that_is_no_time_is_refused_where_the_job_is_sent(fleet: Fleet, eta: Any) -> None:
    with pytest.raises(ValueError, match=r"eta: .* must be a datetime or an ISO 8601 time"):
        fleet.send("act", "ok", eta=eta)
    assert fleet.bridge.counts() == {"retryable": 0, "scheduled": 0, "pending": 0, "discarded": 0}


def test_a_task_that_says_nothing_of_its_delays_keeps_those_of_celery(separate: Callable[..., Fleet]) -> None:
    """Nothing changes unasked."""
    fleet = separate(park_after="PT1S")
    fleet.send("act", "ok", countdown=HOURS)
    assert fleet.bridge.scheduled.count() == 0


def test_a_copy_that_comes_when_its_job_has_run_does_not_run(fleet: Fleet) -> None:
    """A worker was killed after it had parked a job, and before it acknowledged the message."""
    fleet.start("-c", "1").await_ready()
    job, act = fleet.app.AsyncResult(f"{fleet.settings.queue}-job"), fleet.task("act")
    message = {"task_id": job.id, "eta": datetime.now(timezone.utc) + timedelta(seconds=3)}

    def publish() -> None:
        with fleet.app.producer_or_acquire() as producer:
            sent = fleet.app.amqp.as_task_v2(name=act.name, args=["ok"], kwargs={}, **message)
            fleet.app.amqp.send_task_message(producer, act.name, sent, queue=fleet.settings.queue)

    publish()
    eventually(lambda: fleet.bridge.scheduled.count() == 1, what="a parked delay")
    assert fleet.end(job) == "SUCCESS"
    publish()
    fleet.end(fleet.send("act", "another one"))
    assert len(fleet.runs(job)) == 1


def test_what_is_sent_to_another_broker_is_not_parked(fleet: Fleet, rabbitmq: RabbitMQ) -> None:
    """The store's jobs go to the broker of their app."""
    with Connection(rabbitmq.url) as there:
        fleet.send("act", "ok", countdown=HOURS, connection=there)
        with fleet.app.amqp.Producer(there) as producer:
            fleet.send("act", "ok", countdown=HOURS, producer=producer)
        queue = fleet.app.amqp.queues[fleet.settings.queue].bind(there.default_channel)
        assert (fleet.bridge.scheduled.count(), queue.queue_declare(passive=True).message_count) == (0, 2)
    with fleet.app.connection_for_write() as here:
        fleet.send("act", "ok", countdown=HOURS, connection=here)
    assert fleet.bridge.scheduled.count() == 1


def test_a_job_that_the_canary_leaves_to_celery_is_not_parked(fleet: Fleet, unique: str) -> None:
    outside = Celery(broker=fleet.settings.broker)

    @outside.task(name="act", queue=unique)
    def task() -> None:
        """Do nothing."""

    install(outside, Bridge(store=fleet.settings.store, park_delays=True), canary=0)
    task.apply_async(countdown=HOURS)
    assert fleet.bridge.scheduled.count() == 0
    task.apply_async(countdown=HOURS, ojs_retry={"max_attempts": 2})
    assert fleet.bridge.scheduled.count() == 1


def test_a_store_that_does_not_answer_holds_only_the_first_delay_up(separate: Callable[..., Fleet]) -> None:
    """It takes connections, and is silent, as one that is frozen. What is sent meanwhile the broker has."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        fleet = separate(park_delays=True, park_after="PT1S", store=store)
        fleet.send("act", "ok", countdown=HOURS)
        began = time.monotonic()
        fleet.send("act", "ok", countdown=HOURS)
        assert time.monotonic() - began < 5
