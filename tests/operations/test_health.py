"""The health of a fleet: real stores and brokers, away, silent, and well."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
import sqlalchemy as sa
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker

import ojs_bridge.celery
import ojs_bridge.dramatiq
from ojs_bridge import Bridge
from ojs_bridge.engine import holds
from ojs_bridge.engine.context import Context
from ojs_bridge.engine.runs import Backlog
from ojs_bridge.instrumentation.metrics import gauges_text
from ojs_bridge.messages import CREATED
from ojs_bridge.operations import health, retention
from ojs_bridge.operations.health import Beat, Check
from ojs_bridge.rules.job import format_time
from tests.cli.running import run
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.servers import RabbitMQ, Valkey, eventually
from tests.servers.ports import free_port
from tests.store.test_parked import parked

Lives = tuple[Bridge, Outbox]


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def statuses(bridge: Bridge, seconds: float = 30) -> dict[str, str]:
    found = bridge.health.check(seconds)
    return {"all": found.status, **{name: check.status for name, check in found.checks.items()}}


def test_all_is_well(fleet: Lives) -> None:
    """A worker that started tells that it lives; without one, and with an overdue retry, all is not well."""
    bridge, _ = fleet
    assert bridge.store is not None
    assert statuses(bridge) == {
        "all": "degraded", "store": "ok", "broker": "ok", "workers": "degraded", "backlog": "ok",
        "waiting": "ok", "holds": "ok",
    }  # fmt: skip
    worker = Bridge(bridge.store)
    worker.start()
    try:
        eventually(lambda: statuses(bridge)["all"] == "ok", what="the first beat")
    finally:
        worker.stop()
    # The worker has said goodbye.
    assert statuses(bridge)["workers"] == "degraded"
    Beat(bridge.engine.context, FRAMEWORK).tell()
    now = bridge.engine.now()
    bridge.store.parked.park(parked("soon", next_retry_at=now - timedelta(seconds=30)))
    assert statuses(bridge)["waiting"] == "ok"
    bridge.store.parked.park(parked("late", next_retry_at=now - timedelta(seconds=300)))
    found = bridge.health.check()
    assert (found.status, found.checks["waiting"].status) == ("degraded", "degraded")
    assert found.checks["waiting"].message.startswith("the oldest parked retry is 30")


def test_a_pause_is_told_and_one_that_may_be_forgotten_is_a_note(fleet: Lives) -> None:
    """Neither makes a fleet unwell."""
    bridge, _ = fleet
    assert bridge.store is not None
    assert bridge.health.check().checks["holds"] == Check(
        "ok", "none is on", {"on": 0, "held": 0, "note": "", "breakers": {}}
    )
    hold = bridge.pause("billing.*", queue="mail")
    bridge.store.parked.park(parked("h-1", kind="held"))
    assert bridge.health.check().checks["holds"] == Check(
        "ok", "1 on, 1 held", {"on": 1, "held": 1, "note": "", "breakers": {}}
    )
    holds.write(bridge.store.documents, replace(hold, since=hold.since - timedelta(days=2, hours=1)))
    note = "jobs of billing.* of the queue mail: still on after 2 d 1 h"
    told = bridge.health.check().checks["holds"]
    assert (told.status, told.message, told.facts["note"]) == ("ok", f"1 on, 1 held; {note}", note)
    text = gauges_text(bridge).decode()
    assert "ojs_holds 1.0" in text
    assert "ojs_jobs_held 1.0" in text
    bridge.resume("billing.*", queue="mail")
    assert bridge.health.check().checks["holds"].facts["on"] == 0


def test_workers_of_long_ago(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker counts once, while it has told within the last ninety seconds; old beats are deleted."""
    bridge, _ = fleet
    for n in range(3):
        monkeypatch.setattr(health.os, "getpid", lambda n=n: n)
        beat = Beat(bridge.engine.context, FRAMEWORK)
        beat.tell()
        beat.tell()
    monkeypatch.setattr(health, "_PAGE", 2)
    assert bridge.health.check().checks["workers"].facts["seen"] == 3
    monkeypatch.setattr(health, "LATELY", timedelta(0))
    assert bridge.health.check().checks["workers"].status == "degraded"
    monkeypatch.setitem(retention.RECORDS, health.KIND, timedelta(seconds=-1))
    bridge.dead_letters.prune_once_a_period()
    assert bridge.store is not None
    assert bridge.store.documents.list(health.KIND, limit=9, cursor=None).documents == ()


def worker(bridge: Bridge, name: str, framework: str, *queues: str, ago: float = 0) -> Beat:
    """A worker process on a host, named `host:process`, that has told so many seconds ago that it lives."""
    host, _, process = name.partition(":")
    at = bridge.engine.now() - timedelta(seconds=ago)
    beat = Beat(Context(bridge.store, lambda: at, *[None] * 5), framework, lambda: queues)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health.os, "getpid", lambda: process)
        patch.setattr(health.socket, "gethostname", lambda: host)
        beat.tell()
    return beat


def test_a_framework_whose_workers_are_dead_is_missed(fleet: Lives) -> None:
    """While the workers of another one live; each framework, host and queue is counted."""
    bridge, _ = fleet
    worker(bridge, "a:1", "dramatiq", "mail")
    worker(bridge, "a:2", "celery", "slow", "fast", ago=300)
    worker(bridge, "b:1", "celery", "slow", ago=3600)
    found = bridge.health.check()
    assert (found.status, found.checks["workers"].status) == ("degraded", "degraded")
    facts = found.checks["workers"].facts
    assert (facts["seen"], facts["frameworks"]) == (1, {"celery": 0, "dramatiq": 1})
    assert facts["hosts"] == [
        {"framework": "celery", "host": "a", "seen": 0},
        {"framework": "celery", "host": "b", "seen": 0},
        {"framework": "dramatiq", "host": "a", "seen": 1},
    ]
    assert [(row["queue"], row["seen"]) for row in facts["queues"]] == [("fast", 0), ("slow", 0), ("mail", 1)]
    assert "; celery: none since 20" in found.checks["workers"].message


def test_a_queue_whose_workers_are_dead_is_missed(fleet: Lives) -> None:
    """Until another worker takes it; a dead worker that others replace is not missed."""
    bridge, _ = fleet
    worker(bridge, "a:1", "celery", "fast")
    worker(bridge, "a:2", "celery", "slow", "fast", ago=300)
    missed = bridge.health.check().checks["workers"]
    assert (missed.status, "celery, queue slow: none since 20" in missed.message) == ("degraded", True)
    worker(bridge, "b:1", "celery", "slow")
    assert statuses(bridge)["workers"] == "ok"


def test_a_worker_that_has_ended_by_itself_is_not_missed(fleet: Lives) -> None:
    """It has said so, and is no longer counted."""
    bridge, _ = fleet
    worker(bridge, "a:1", "dramatiq", "mail")
    beat = worker(bridge, "a:2", "celery", "slow", ago=300)
    assert statuses(bridge)["workers"] == "degraded"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(health.os, "getpid", lambda: "2")
        patch.setattr(health.socket, "gethostname", lambda: "a")
        beat.end()
    assert statuses(bridge)["workers"] == "ok"


def test_a_worker_has_one_record_for_some_hours(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that another release has deleted is written again."""
    bridge, _ = fleet
    assert bridge.store is not None
    beat, store = Beat(bridge.engine.context, FRAMEWORK), bridge.store

    def records() -> int:
        return len(store.documents.list(health.KIND, limit=9, cursor=None).documents)

    for _ in range(3):
        beat.tell()
    assert records() == 1
    store.documents.forget(health.KIND, before=bridge.engine.now() + timedelta(days=1))
    assert records() == 0
    beat.tell()
    assert (records(), statuses(bridge)["workers"]) == (1, "ok")
    monkeypatch.setattr(health, "RENEWED", timedelta(0))
    beat.tell()
    assert records() == 2
    assert bridge.health.check().checks["workers"].facts["seen"] == 1


def test_a_backlog_that_no_worker_takes(fleet: Lives) -> None:
    """A queue with jobs and without a worker is not well; a worker that tells no queue may take any."""
    bridge, outbox = fleet
    outbox.waiting = {"slow": 7, "fast": 2, "none": 0}
    worker(bridge, "a:1", "outbox", "slow")
    backlog = bridge.health.check().checks["backlog"]
    assert (backlog.status, backlog.facts["depth"]) == ("degraded", 9)
    assert backlog.message == "9 wait; outbox, queue fast: 2 wait, and no worker takes them"
    worker(bridge, "a:2", "outbox", "fast")
    assert statuses(bridge)["backlog"] == "ok"


def test_a_worker_whose_clock_goes_ahead(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen if it is a little ahead; otherwise it would be seen long after its death."""
    bridge, _ = fleet
    now = bridge.engine.now()
    for ahead, seen in ((3600, 0), (60, 1)):
        late = Context(bridge.store, lambda ahead=ahead: now + timedelta(seconds=ahead), *[None] * 5)  # type: ignore[arg-type]
        monkeypatch.setattr(health.os, "getpid", lambda ahead=ahead: ahead)
        Beat(late, FRAMEWORK).tell()
        assert bridge.health.check().checks["workers"].facts["seen"] == seen


def test_a_store_that_is_away(silent: int) -> None:
    """One that refuses is told with its words; one that keeps silent is told in time, and asked once."""
    for port, told in ((free_port(), "refused"), (silent, "no answer within 0.5 s")):
        bridge, _ = bridge_with_outbox(f"redis://127.0.0.1:{port}")
        begun = time.monotonic()
        for _ in range(3):
            found = bridge.health.check(0.5)
            assert (found.status, found.checks["store"].status) == ("away", "away")
            assert told in found.checks["store"].message
            assert found.checks["workers"].status == "unknown"
            assert found.checks["broker"].status == "ok"
        assert time.monotonic() - begun < 30
        asking = [thread for thread in threading.enumerate() if thread.name == "ojs-health-store"]
        assert len(asking) == (1 if port == silent else 0)


@pytest.mark.parametrize("broker", ["redis", "amqp"])
@pytest.mark.parametrize("framework", ["celery", "dramatiq"])
def test_a_broker_that_refuses_is_told_with_its_words(framework: str, broker: str, tmp_path: Path) -> None:
    """In time, though the clients try again; and what waits in it only the broker knows."""
    bridge, port = Bridge(f"sqlite:///{tmp_path}/ojs.db"), free_port()
    if framework == "celery":
        ojs_bridge.celery.install(Celery("shop", broker=f"{broker}://127.0.0.1:{port}"), bridge)
    else:
        classes = {"redis": RedisBroker, "amqp": RabbitmqBroker}
        ojs_bridge.dramatiq.install(classes[broker](url=f"{broker}://127.0.0.1:{port}"), bridge)

    def told() -> bool:
        found = bridge.health.check()
        assert found.to_ojs()["backend"] == {"status": "disconnected"}
        assert (found.checks["broker"].status, found.checks["backlog"].status) == ("away", "unknown")
        assert found.checks["backlog"].message in ("only the broker knows", "no broker was asked")
        assert bridge.health.check().checks["store"].status == "ok"
        return "refused" in found.checks["broker"].message.lower()

    # A busy machine may not answer within the three seconds of a check.
    eventually(told)


def test_a_store_of_a_newer_version(tmp_path: Path) -> None:
    """Also where the store was of this version when the process began."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge = Bridge(url)
    assert bridge.health.check().checks["store"].message == "empty"
    bridge.dead_letters.stats()
    assert bridge.health.check().checks["store"].facts == {"schema": 1}
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE ojs_schema SET version = 99"))
    engine.dispose()
    found = bridge.health.check()
    assert (found.status, found.checks["store"].status) == ("away", "away")
    assert "the store has schema 99" in found.checks["store"].message


def test_a_broker_that_is_away(fleet: Lives) -> None:
    bridge, outbox = fleet
    outbox.raises = ConnectionError("down")
    found = bridge.health.check()
    assert (found.status, found.checks["broker"].message) == ("away", "down")
    since = found.checks["broker"].facts["away_since"]
    assert bridge.health.check().checks["broker"].facts["away_since"] == since
    outbox.raises = None
    assert "away_since" not in bridge.health.check().checks["broker"].facts
    outbox.raises = ConnectionError("down")
    assert bridge.health.check().checks["broker"].facts["away_since"] > since
    bridge.engine.context.publishers["other"] = Outbox()
    both = bridge.health.check().checks["broker"]
    assert (both.status, both.message) == ("away", f"{FRAMEWORK}: down")
    assert both.facts["frameworks"] == {FRAMEWORK: "away", "other": "ok"}
    assert statuses(Bridge(bridge.store))["broker"] == "unknown"
    assert statuses(Bridge())["store"] == "unknown"


@pytest.mark.parametrize("kind", ["valkey", "rabbitmq"])
def test_brokers_of_celery(kind: str, request: pytest.FixtureRequest) -> None:
    server: Valkey | RabbitMQ = request.getfixturevalue(kind)
    for url, status in (
        (server.url, "ok"),
        (f"{server.url.partition(':')[0]}://127.0.0.1:{free_port()}", "away"),
    ):
        bridge = Bridge()
        ojs_bridge.celery.install(Celery(broker=url), bridge)
        assert statuses(bridge)["broker"] == status


@pytest.mark.parametrize("kind", ["valkey", "rabbitmq"])
def test_brokers_of_dramatiq(kind: str, request: pytest.FixtureRequest) -> None:
    server: Valkey | RabbitMQ = request.getfixturevalue(kind)
    made: Any = RedisBroker if kind == "valkey" else RabbitmqBroker
    for url, status in (
        (server.url, "ok"),
        (f"{server.url.partition(':')[0]}://127.0.0.1:{free_port()}", "away"),
    ):
        bridge, broker = Bridge(), made(url=url)
        ojs_bridge.dramatiq.install(broker, bridge)
        assert statuses(bridge)["broker"] == status
    bridge = Bridge()
    ojs_bridge.dramatiq.install(StubBroker(), bridge)
    assert statuses(bridge)["broker"] == "unknown"


@pytest.mark.parametrize("kind", ["valkey", "rabbitmq"])
def test_the_backlog_of_celery(kind: str, request: pytest.FixtureRequest) -> None:
    """Of all priorities, of queues that the app names and of others; one that does not exist is empty."""
    server: Valkey | RabbitMQ = request.getfixturevalue(kind)
    name, bridge = f"q-{uuid.uuid4().hex}", Bridge()
    app = Celery(broker=server.url)
    app.conf.task_default_queue = name
    ojs_bridge.celery.install(app, bridge)

    def waits() -> None: ...

    task = app.task(waits, name="t.waits")
    begun = bridge.engine.now()
    for priority in (0, 9, 0):
        task.apply_async(priority=priority, headers={CREATED: format_time(begun)})
    found = backlog_with(bridge, name, 3)
    assert (found["none"].depth, found["none"].oldest_at) == (0, None)
    if kind == "valkey":
        assert begun - timedelta(seconds=1) <= told(found[name].oldest_at) <= bridge.engine.now()


@pytest.mark.parametrize("kind", ["valkey", "rabbitmq"])
def test_the_backlog_of_dramatiq(kind: str, request: pytest.FixtureRequest) -> None:
    """Of queues that the broker has declared, and of others."""
    server: Valkey | RabbitMQ = request.getfixturevalue(kind)
    made: Any = RedisBroker if kind == "valkey" else RabbitmqBroker
    name, bridge, broker = f"q-{uuid.uuid4().hex}", Bridge(), made(url=server.url)
    ojs_bridge.dramatiq.install(broker, bridge)
    actor = dramatiq.actor(lambda: None, actor_name="waits", queue_name=name, broker=broker)
    begun = bridge.engine.now()
    for _ in range(3):
        actor.send()
    found = backlog_with(bridge, name, 3)
    assert (found["none"].depth, found["none"].oldest_at) == (0, None)
    if kind == "valkey":
        assert begun - timedelta(seconds=1) <= told(found[name].oldest_at) <= bridge.engine.now()


def backlog_with(bridge: Bridge, name: str, depth: int) -> dict[str, Backlog]:
    """The backlogs, "none" among them, once RabbitMQ has taken so many messages of a queue."""
    found = dict[str, Backlog]()

    def has_all() -> bool:
        found.update({each.queue: each for each in backlog(bridge, ["none"])})
        return found[name].depth == depth

    eventually(has_all)
    return found


def backlog(bridge: Bridge, queues: list[str]) -> Sequence[Backlog]:
    """What the only broker of a bridge answers."""
    [publisher] = bridge.engine.context.publishers.values()
    found = publisher.backlog(queues)
    assert found is not None
    return found


def told(at: datetime | None) -> datetime:
    """A time that is known."""
    assert at is not None
    return at


def test_on_the_command_line(fleet: Lives, url: str, silent: int) -> None:
    bridge, _ = fleet
    Beat(bridge.engine.context, FRAMEWORK).tell()
    well = run("health", store=url)
    assert (well.code, "1 in the last 90 s" in well.out, "no app" in well.out) == (0, True, True), well.out
    assert bridge.store is not None
    bridge.store.parked.park(parked("late", next_retry_at=bridge.engine.now() - timedelta(hours=1)))
    late = run("health", "--json", store=url)
    assert (late.code, late.json[0]["checks"]["waiting"]["status"]) == (1, "degraded")
    away = run("health", "--timeout", "0.3", store=f"redis://127.0.0.1:{silent}")
    assert (away.code, "no answer within 0.3 s" in away.out) == (3, True)
