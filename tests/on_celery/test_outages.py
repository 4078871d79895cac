"""No job is lost without a store, with a store that fails, or with a broker that is down."""

from __future__ import annotations

import functools
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from kombu import Producer
from kombu.exceptions import OperationalError

from ojs_bridge import Bridge, StorageRetry
from ojs_bridge.celery import install
from ojs_bridge.celery.installation import installation
from tests.contract.steps import Step, dies, raises, retries, sleeps
from tests.on_celery.by_hand import by_hand, natively
from tests.on_celery.fleet import Fleet
from tests.on_celery.project import SlowToSay
from tests.servers import RabbitMQ, Valkey, eventually


def dead(fleet: Fleet) -> list:
    found: list = []
    eventually(
        lambda: found.extend(fleet.buried(fleet.settings.queue)) or found, seconds=20, what="a dead letter"
    )
    return found


def test_a_channel_that_an_outage_has_closed_is_an_outage(valkey: Valkey, unique: str) -> None:
    """Kombu trips over it once, with an AttributeError; the next attempt has a channel of its own."""
    app = Celery(unique, broker=valkey.url, set_as_current=False)
    with app.producer_pool.acquire(block=True) as producer:
        producer.publish({}, routing_key=unique, exchange="")
        channel = producer.channel
    channel._disconnect_pools()
    vars(channel).pop("client", None)
    channel.close()

    def publish() -> None:
        with installation(app).broker.producer() as producer:
            producer.publish({}, routing_key=unique, exchange="", retry=True, retry_policy={"max_retries": 2})

    with pytest.raises(OperationalError, match="was closed"):
        publish()
    publish()
    with redis.Redis.from_url(valkey.url) as client:
        assert client.llen(unique) == 2


@pytest.mark.requirement("RET-17", "DLQ-001")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_without_a_store_a_dead_letter_goes_whole_to_the_dead_queue(
    separate, broker: str, request: pytest.FixtureRequest
) -> None:
    fleet = separate(store=None, broker=request.getfixturevalue(broker).url)
    worker = fleet.start("-c", "2")
    job = fleet.task("act_kept").apply_async(
        (raises(OSError, "down"),),
        serializer="pickle",
        compression="zlib",
        priority=3,
        headers={"x-mine": "yes"},
    )
    assert fleet.end(job) == "FAILURE"
    (message,) = dead(fleet)
    assert message.content_type == "application/x-python-serialize"
    assert message.payload[0] == (raises(OSError, "down"),)
    assert (message.headers["id"], message.headers["task"]) == (job.id, "act_kept")
    assert (message.headers["x-mine"], message.properties["priority"]) == ("yes", 3)
    state = json.loads(message.headers["ojs"])
    assert (state["attempt"], [error["attempt"] for error in state["errors"]]) == (2, [1, 2])
    assert "next_retry_at" not in state
    assert fleet.ending(job)["dead_lettered"]
    assert "no store: the attempt of a killed worker does not count" in worker.log
    discarded = fleet.send("act", raises(OSError))
    huge = json.dumps({"v": 1, "retry": {"non_retryable_errors": ["x" * 100] * 200}})
    unwritable = fleet.send("act", raises(OSError), headers={"ojs": huge})
    assert [fleet.end(discarded), fleet.end(unwritable)] == ["FAILURE", "FAILURE"]
    (message,) = dead(fleet)
    assert (message.headers["id"], message.headers["ojs"]) == (unwritable.id, huge)


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("broker", [Valkey, RabbitMQ])
def test_a_retry_that_cannot_be_published_is_parked(separate, broker: type[Valkey | RabbitMQ]) -> None:
    with broker() as server:
        # Celery 5.4 itself tries to publish for 6 s each time.
        fleets = [separate(broker=server.url, acks_late=late, insist=2) for late in (True, False)]
        for fleet in fleets:
            fleet.start("-c", "2").await_ready()
            if isinstance(server, RabbitMQ):
                server.await_declared(fleet.settings.queue)
        steps = (sleeps(5, raises(OSError, "down")), raises(OSError, "down"))
        jobs = [fleet.send("act_kept", *steps) for fleet in fleets]
        for fleet, job in zip(fleets, jobs, strict=True):
            eventually(lambda fleet=fleet, job=job: fleet.runs(job), seconds=20, what="a run")
        server.kill()
        for fleet, job in zip(fleets, jobs, strict=True):
            parked = fleet.bridge.store.parked.get
            eventually(lambda parked=parked, job=job: parked(job.id), seconds=40, what="a parked retry")
            told = functools.partial(types, fleet, job)
            eventually(lambda told=told: "job.retrying" in told(), what="the event of the retry")
        # Celery 5.7 ends workers that lose their connection to Valkey.
        anew = fleets if isinstance(server, Valkey) else []
        for fleet in anew:
            # Kill it before it gets the retry: the messages of a killed worker come back in an hour.
            fleet.worker.kill()
        server.start()
        for fleet in anew:
            fleet.start("-c", "2")
        for fleet, job in zip(fleets, jobs, strict=True):
            # The killed worker may have claimed the retry for a minute.
            assert_two_attempts(fleet, job, seconds=90 if anew else 45)


@pytest.mark.parametrize("bridged", [False, True], ids=["celery alone", "the bridge"])
def test_a_retry_while_the_broker_blinks(
    unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bridged: bool
) -> None:
    """Celery alone rejects the message, and the job is gone; the bridge parks the retry."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker blinks")

    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", storage_retry=StorageRetry.disabled())
    hand = by_hand(functools.partial(install, bridge=bridge) if bridged else natively, unique)
    job = hand.send("plain", retries(), "ok")
    monkeypatch.setattr(Producer, "publish", refuse)
    hand.deliver_all()
    assert hand.runs(job) == [0]
    ended = hand.notes[-1][0], [parked.id for parked in bridge.retries.list().jobs]
    assert ended == (("ack", [job]) if bridged else ("reject", []))


def test_a_worker_that_judges_a_dead_child_does_not_wait_for_a_store_that_hangs(separate) -> None:
    """If the main process waited, deliveries, results and heartbeats would wait, too."""
    with Valkey() as store:
        fleet = separate(store=f"{store.url}?socket_timeout=3", insist=9, reservation="PT2S")
        fleet.start("-c", "2").await_ready()
        assert fleet.end(fleet.send("act", "warm")) == "SUCCESS"
        job = fleet.send("act_kept", sleeps(3, dies()), "ok")
        eventually(lambda: fleet.runs(job), seconds=20, what="a run")
        with paused(store):
            eventually(lambda: "signal 9 (SIGKILL)" in fleet.worker.log, seconds=20, what="the death")
            assert fleet.end(fleet.send("ping"), seconds=25) == "SUCCESS"
        assert fleet.end(job, seconds=90) == "SUCCESS"
        assert [run.attempt for run in fleet.runs(job)] == [1, 2]


@contextmanager
def paused(server: RabbitMQ | Valkey) -> Iterator[None]:
    os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(IndexError):  # killed meanwhile
            os.kill(server.pid, signal.SIGCONT)


def running(fleet: Fleet, *steps: Step, **options: object) -> AsyncResult:
    """A job in its first run, in a process that has published before."""
    fleet.start("-c", "1").await_ready()
    assert fleet.end(fleet.send("act", raises(OSError), "ok")) == "SUCCESS"
    job = fleet.send("act_kept", *steps, **options)
    eventually(lambda: fleet.runs(job), seconds=20, what="a run")
    return job


def types(fleet: Fleet, job: AsyncResult) -> list[str]:
    return [event["type"] for event in fleet.events(job)]


def assert_two_attempts(fleet: Fleet, job: AsyncResult, *, seconds: float = 45) -> None:
    assert fleet.end(job, seconds=seconds) == "FAILURE"
    fleet.ending(job)
    eventually(lambda: "dead_letter.added" in types(fleet, job), what="the event of the dead letter")
    time.sleep(0.5)  # for what must not happen: a further run
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]
    letter = fleet.bridge.dead_letters.get(job.id)
    assert (letter.cause, len(letter.errors)) == ("exhausted", 2)
    ends = [type_ for type_ in types(fleet, job) if type_ != "job.started"]
    assert ends == ["job.failed", "job.retrying", "job.failed", "job.discarded", "dead_letter.added"]


@pytest.mark.requirement("RET-01")
def test_no_soft_time_limit_strikes_while_a_retry_is_published(separate) -> None:
    with RabbitMQ() as server:
        fleet = separate(broker=server.url)
        job = running(fleet, sleeps(6, raises(OSError, "down")), raises(OSError, "down"), soft_time_limit=8)
        with paused(server):
            limit = f"Soft time limit (8s) exceeded for act_kept[{job.id}]"
            eventually(lambda: limit in fleet.worker.log, seconds=20, what="the soft time limit")
            time.sleep(0.5)  # for what must not happen: an end without the broker
            assert types(fleet, job) == ["job.started"]
        assert_two_attempts(fleet, job)


@pytest.mark.requirement("RET-01")
def test_no_soft_time_limit_strikes_while_an_error_is_read(separate) -> None:
    fleet = separate()
    fleet.start("-c", "1")
    job = fleet.send("act_kept", raises(SlowToSay), raises(OSError, "down"), soft_time_limit=4)
    assert_two_attempts(fleet, job)
    assert f"Soft time limit (4s) exceeded for act_kept[{job.id}]" in fleet.worker.log
    assert fleet.bridge.dead_letters.get(job.id).errors[0]["message"] == "at last"


def test_a_soft_time_limit_that_strikes_in_an_instrument_is_the_jobs(separate) -> None:
    fleet = separate(instruments=("failing.lingering",))
    fleet.start("-c", "1")
    job = fleet.send("act_kept", raises(OSError, "down"), soft_time_limit=4)
    eventually(lambda: "dead_letter.added" in types(fleet, job), seconds=60, what="the dead letter")
    letter = fleet.bridge.dead_letters.get(job.id)
    assert [error["type"] for error in letter.errors] == ["timeout", "builtins.OSError"]


@pytest.mark.requirement("RET-01")
def test_a_retry_that_a_dying_broker_did_not_confirm_is_not_lost(separate) -> None:
    with RabbitMQ() as server:
        fleet = separate(broker=server.url, store=None)
        job = running(fleet, sleeps(6, raises(OSError, "down")), raises(OSError, "down"))
        server.await_declared(fleet.settings.queue)
        with paused(server):
            eventually(lambda: fleet.calls(job, "before_publish"), what="the publishing of the retry")
            time.sleep(3)
            assert types(fleet, job) == ["job.started"]
            server.kill()
        time.sleep(3)  # the publishing is tried five times
        server.start()
        assert fleet.end(job, seconds=60) == "FAILURE"
        assert [run.attempt for run in fleet.runs(job)] == [1, 1, 2]
        (message,) = dead(fleet)
        assert json.loads(message.headers["ojs"])["attempt"] == 2


def test_a_listener_that_blocks_delays_no_job(separate) -> None:
    fleet = separate()
    fleet.app.conf.task_always_eager = True
    release = threading.Event()
    fleet.bridge.engine.context.events.listeners = (lambda event: release.wait(),)
    # The job would not end, if it waited for the listener.
    assert fleet.send("act", raises(OSError), raises(OSError), "ok").get() == "ok"
    release.set()
