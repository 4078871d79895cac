"""Long delays wait in the store: listed, run now, cancelled, and published once by many workers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import CurrentMessage, Middleware

from ojs_bridge import Retry, Snooze
from ojs_bridge.store import Parked
from tests.on_dramatiq.application import Application
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet, Sent, broker_of
from tests.servers import Valkey, eventually

TWO_HOURS = {"initial_interval": "PT2H", "max_interval": "PT2H", "jitter": False}


def fails_once(n: int) -> str:
    if n == 1:
        raise OSError("down")
    return "done"


def parked(fleet: Fleet, job: Sent) -> Parked:
    """Wait until a job's retry is parked, and its message gone from the broker."""
    eventually(lambda: fleet.bridge.retries.count() and fleet.heard.types(job.id)[-1:] == ["job.retrying"])
    (found,) = fleet.bridge.retries.list().jobs
    return found


class Held:
    """A publisher that publishes parked retries once it may."""

    system = "held"

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher
        self.may = threading.Event()

    def publish(self, *args: Any) -> None:
        """Publish."""
        assert self.may.wait(90)
        self.publisher.publish(*args)


@pytest.mark.parametrize("response", [Retry("a.b", after="PT3S"), Snooze("PT3S")], ids=["retry", "snooze"])
def test_what_is_parked_is_published_when_it_is_due(
    broker: dramatiq.Broker, unique: str, tmp_path: Path, response: Any
) -> None:
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db", park_after=timedelta(seconds=1))

    def responds_once(n: int) -> None:
        if n == 1:
            raise response

    job = fleet.send(fleet.actor(responds_once))
    held: Any = Held(fleet.bridge.engine.context.publishers["dramatiq"])
    fleet.bridge.engine.context.publishers["dramatiq"] = held
    with fleet.working():
        eventually(lambda: fleet.bridge.retries.count() == 1)
        held.may.set()
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 2
    assert job.runs[1].at >= fleet.due(job)[0]
    assert fleet.left() == 0


def test_without_a_store_a_long_delay_waits_in_the_broker(unique: str, valkey: Valkey) -> None:
    from dramatiq.brokers.redis import RedisBroker

    fleet = Fleet(RedisBroker(url=valkey.url, namespace=unique), unique)
    job = fleet.send(fleet.actor(fails_once, ojs_retry=TWO_HOURS))
    with fleet.working():
        eventually(lambda: "job.retrying" in fleet.heard.types(job.id))
    assert (len(job.runs), fleet.left()) == (1, 1)


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_four_processes_publish_what_is_due_once(
    request: pytest.FixtureRequest, kind: str, unique: str, tmp_path: Path, valkey: Valkey
) -> None:
    count = 1000
    application = Application(
        url_of(request, kind), unique, tmp_path, "tests.on_dramatiq.parking", store=valkey.url
    )
    application.produce(f"park_many({count})")
    assert application.store.parked.count() == count
    with application.working(fault="published", processes=4):
        eventually(lambda: len(application.times("many")) >= count, seconds=60)
        eventually(lambda: application.store.parked.count() == 0)
    published = [word for word in application.counts() if word.startswith("published-")]
    assert len(published) == count
    assert set(application.counts().values()) == {1, count}


@pytest.mark.requirement("RET-11")
@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_what_is_drained_runs_at_its_time_without_the_bridge(
    request: pytest.FixtureRequest, kind: str, unique: str, tmp_path: Path
) -> None:
    url = url_of(request, kind)
    fleet = Fleet(
        broker_of(kind, url, unique), unique, store=f"sqlite:///{tmp_path}/ojs.db", park_after="PT0.5S"
    )
    actor = fleet.actor(fails_once, ojs_retry={"initial_interval": "PT2S", "jitter": False})
    job = fleet.send(actor)
    with fleet.working():
        found = parked(fleet, job)
    assert fleet.bridge.retries.drain().published == 1
    fleet.broker.close()

    runs: list[tuple[float, dict[str, Any]]] = []

    def run(key: str) -> None:
        message = CurrentMessage.get_current_message()
        assert message is not None
        runs.append((time.time(), dict(message.options)))

    plain = broker_of(kind, url, unique)
    plain.add_middleware(CurrentMessage())
    dramatiq.actor(run, broker=plain, actor_name=actor.actor_name, queue_name=unique)
    worker = dramatiq.Worker(plain, worker_timeout=20)
    worker.start()
    eventually(lambda: runs)
    worker.stop()
    plain.close()
    ((at, options),) = runs
    assert at >= found.next_retry_at.timestamp()
    assert (options["retries"], options["ojs"]["attempt"]) == (1, 2)


class Told(Middleware):
    """Notes what a middleware is told of enqueued and skipped messages, and marks the messages."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        self.told.append(("before_enqueue", bool(delay), message.options.get("mark", 0)))
        message.options["mark"] = message.options.get("mark", 0) + 1

    def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        self.told.append(("after_enqueue", bool(delay), message.options.get("mark", 0)))

    def after_process_message(self, *_: Any, **__: Any) -> None:
        self.told.append("processed")

    def after_skip_message(self, *_: Any) -> None:
        self.told.append("skipped")


@pytest.mark.parametrize("response", [OSError("down"), Snooze("PT2S")], ids=["retry", "snooze"])
def test_a_middleware_is_told_of_what_is_parked_as_of_what_the_broker_delays(
    broker: dramatiq.Broker, unique: str, tmp_path: Path, response: Exception
) -> None:
    """And what it changes in the message is kept."""
    told = Told()
    broker.add_middleware(told)
    fleet = Fleet(
        broker,
        unique,
        store=f"sqlite:///{tmp_path}/ojs.db",
        park_after=timedelta(seconds=1),
        retry={"max_attempts": 2, "initial_interval": "PT2S", "jitter": False},
    )

    def responds_once(n: int) -> None:
        if n == 1:
            raise response

    job = fleet.send(fleet.actor(responds_once))
    with fleet.working():
        assert fleet.end(job).type == "job.completed"
        eventually(lambda: len(told.told) == 8)
    # The first is the job itself; the broker, too, tells twice of a message that it delays.
    assert told.told[:6] == [
        ("before_enqueue", False, 0), ("after_enqueue", False, 1), "processed",
        ("before_enqueue", True, 1), ("after_enqueue", True, 2), ("before_enqueue", False, 2),
    ]  # fmt: skip
    # The message may run before its publisher goes on.
    assert sorted(told.told[6:], key=str) == [("after_enqueue", False, 3), "processed"]
    assert [run.options["mark"] for run in job.runs] == [1, 3]


@pytest.mark.parametrize("ends", ["retry", "snooze"])
@pytest.mark.parametrize("is_bridged", [False, True], ids=["native", "bridged"])
def test_django_dramatiq_shows_a_job_that_waits_as_delayed(
    valkey: Valkey, tmp_path: Path, is_bridged: bool, ends: str
) -> None:
    pytest.importorskip("django_dramatiq")
    if ends == "snooze" and not is_bridged:
        pytest.skip("Dramatiq knows no snooze")
    store = f"sqlite:///{tmp_path}/ojs.db" if is_bridged else ""
    command = [sys.executable, "-m", "tests.on_dramatiq.admin", valkey.url, store, str(tmp_path), ends]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["delayed"], done.stderr
