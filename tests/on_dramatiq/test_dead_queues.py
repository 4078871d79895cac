"""The brokers' own dead queues: listed, replayed and emptied as the store's dead letters are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from dramatiq.brokers.redis import RedisBroker
from dramatiq.brokers.stub import StubBroker
from dramatiq.common import dq_name, xq_name

from ojs_bridge import Bridge, ConfigurationError, StorageRetry, open_store
from ojs_bridge.dramatiq import install
from ojs_bridge.dramatiq.brokers import kind_of
from ojs_bridge.errors import Unreachable, Unroutable
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet, Sent, broker_of, dead_messages
from tests.on_dramatiq.test_dead_letters import graveless
from tests.servers import eventually

KEEP = {"max_attempts": 2, "on_exhaustion": "dead_letter"}
#: One attempt, so that a test need not wait for a retry.
ONCE = {**KEEP, "max_attempts": 1}


def fails(n: int, *args: Any) -> None:
    raise OSError(f"down for the {n}. time")


def succeeds_later(times: int) -> Callable[..., None]:
    """Make a handler that fails so many times."""
    return lambda n, *args: fails(n) if n <= times else None


def bury(fleet: Fleet, *jobs: Sent) -> None:
    """Have a worker run jobs until they are in the dead queue."""
    with fleet.working(threads=2):
        for job in jobs:
            fleet.end(job)
            eventually(lambda job=job: fleet.dead(job))


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_native_dead_letters_from_before_the_bridge(
    request: pytest.FixtureRequest, kind: str, unique: str
) -> None:
    url, runs = url_of(request, kind), []
    native = broker_of(kind, url, unique)

    def charge(n: int) -> None:
        runs.append(n)
        if len(runs) <= 2:
            raise OSError(f"native {len(runs)}")

    options = {"queue_name": unique, "actor_name": f"{unique}.charge"}
    actor = dramatiq.actor(charge, broker=native, max_retries=1, min_backoff=1, max_backoff=1, **options)
    sent = actor.send(5)
    worker = dramatiq.Worker(native, worker_timeout=20, worker_threads=2)
    worker.start()
    eventually(lambda: dead_messages(native, unique))
    worker.stop()
    native.close()
    fleet = Fleet(broker_of(kind, url, unique), unique)
    dramatiq.actor(charge, broker=fleet.broker, **options)
    (letter,) = fleet.bridge.broker_letters.list().letters
    assert (letter.id, letter.type, letter.reading.args) == (sent.message_id, f"{unique}.charge", [5])
    # Dramatiq keeps the message of the last attempt as it was sent, with the error of the attempt before.
    assert (letter.attempt, letter.cause) == (2, "exhausted")
    assert [(e["attempt"], e["type"], e["message"]) for e in letter.errors] == [(1, "OSError", "native 1")]
    fleet.bridge.broker_letters.replay(letter.id)
    with fleet.working(threads=2):
        assert fleet.end(Sent(letter.id)).type == "job.completed"
    assert runs == [5, 5, 5]
    assert dead_messages(fleet.broker, unique) == []
    fleet.broker.close()


def test_no_look_uses_up_the_deliveries_of_a_quorum_queue(
    request: pytest.FixtureRequest, unique: str
) -> None:
    """RabbitMQ counts what is read and put back, and drops it at a limit, which RabbitMQ 4 sets to 20."""
    broker = broker_of("rabbitmq", url_of(request, "rabbitmq"), unique)
    name, places = xq_name(unique), kind_of(broker).dead_places
    limited = {"x-queue-type": "quorum", "x-delivery-limit": 20}
    broker.channel.queue_declare(name, durable=True, arguments=limited)
    for body in (b"one", b"two"):
        broker.channel.basic_publish("", name, body)
    eventually(lambda: len(places.read([unique], 9)) == 2)
    for _ in range(30):
        assert sorted(body for body, _ in places.read([unique], 9)) == [b"one", b"two"]
    assert places.take(unique, lambda body: body == b"one", lambda: None)
    assert [body for body, _ in places.read([unique], 9)] == [b"two"]
    broker.close()


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_what_nobody_can_read_stays(
    request: pytest.FixtureRequest, kind: str, unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = Fleet(broker_of(kind, url_of(request, kind), unique), unique)
    job = fleet.send(fleet.actor(fails, ojs_retry=ONCE))
    bury(fleet, job)
    put_garbage(fleet.broker, unique)
    assert [letter.id for letter in fleet.bridge.broker_letters.list().letters] == [job.id]
    assert "cannot be read, and stays there" in caplog.text
    fleet.bridge.broker_letters.delete(job.id)
    assert fleet.bridge.broker_letters.list().letters == ()
    fleet.broker.close()


def put_garbage(broker: Any, queue: str) -> None:
    """Put what is no message into a dead queue."""
    if isinstance(broker, RedisBroker):
        key = f"{broker.namespace}:{xq_name(queue)}"
        broker.client.zadd(key, {"x": 1})
        broker.client.hset(f"{key}.msgs", "x", b"\xff{")
    else:
        broker.channel.basic_publish("", xq_name(queue), b"\xff{")


def test_a_broker_that_is_out_of_reach(unique: str) -> None:
    broker: dramatiq.Broker
    for broker in (RedisBroker(url="redis://127.0.0.1:1/0"), RabbitmqBroker(url="amqp://127.0.0.1:1")):
        bridge = Bridge()
        install(broker, bridge)
        broker.declare_queue(unique)
        with pytest.raises(Unreachable, match="onnect"):
            bridge.broker_letters.list()


@pytest.mark.parametrize("kind", ["redis", "rabbitmq"])
def test_a_queue_where_nothing_ever_died(request: pytest.FixtureRequest, kind: str, unique: str) -> None:
    broker = broker_of(kind, url_of(request, kind), unique)
    bridge = Bridge()
    install(broker, bridge)
    broker.declare_queue(unique)
    assert bridge.broker_letters.list().letters == ()
    broker.close()


def test_with_a_store_the_whole_history_comes_along(
    stub: StubBroker, unique: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store refused the dead letter, but had taken errors for which the job's header had no room."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    fleet = Fleet(stub, unique, store=graveless(url, monkeypatch), storage_retry=StorageRetry.disabled())
    quick = {"initial_interval": "PT0.001S", "max_interval": "PT0.001S"}
    job = fleet.send(fleet.actor(succeeds_later(13), ojs_retry={**KEEP, **quick, "max_attempts": 13}))
    bury(fleet, job)
    letters = fleet.bridge.broker_letters
    assert len(letters.list().letters[0].errors) == 10
    # The third error had no room in the last header; the store would have got it with the dead letter.
    assert [e["attempt"] for e in letters.get(job.id).errors] == [1, 2, *range(4, 14)]
    letters.replay(job.id)
    assert [entry["attempt"] for _, entry in open_store(url).letters.kept_errors(job.id)] == [1, 2]
    with fleet.working():
        assert fleet.end(job, nth=2).type == "job.completed"
    assert fleet.bridge.dead_letters.list().letters == ()


def test_one_whose_actor_is_gone_is_not_published(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed(store=None)
    job = fleet.send(fleet.actor(fails, ojs_retry=ONCE))
    bury(fleet, job)
    del fleet.broker.actors[fleet.bridge.broker_letters.get(job.id).type]
    fleet.actor(fails)
    with pytest.raises(ConfigurationError, match="which dramatiq here does not know"):
        fleet.bridge.broker_letters.replay(job.id)
    assert fleet.bridge.broker_letters.get(job.id).id == job.id


def test_a_refused_declaration_is_no_outage(request: pytest.FixtureRequest, unique: str) -> None:
    """The queue of one letter exists with other arguments; the others are replayed, and the first stays."""
    url, odd = url_of(request, "rabbitmq"), f"{unique}-odd"
    fleet = Fleet(broker_of("rabbitmq", url, unique), unique)
    actor = fleet.actor(succeeds_later(1), ojs_retry=ONCE)
    jobs = [fleet.send(actor) for _ in range(2)]
    bury(fleet, *jobs)
    fleet.broker.channel.queue_declare(odd, durable=True, arguments={"x-max-length": 9})
    letters = fleet.bridge.broker_letters
    with pytest.raises(Unroutable, match="PRECONDITION_FAILED"):
        letters.replay(jobs[0].id, queue=odd)
    letters.replay(jobs[1].id)
    assert [letter.id for letter in letters.list().letters] == [jobs[0].id]
    fleet.broker.close()


def test_a_retry_whose_queue_cannot_be_declared_waits_for_nobody(
    request: pytest.FixtureRequest, unique: str
) -> None:
    """Its queue was replaced by another one while it ran: the job is a dead letter with its reason."""
    fleet = Fleet(broker_of("rabbitmq", url_of(request, "rabbitmq"), unique), unique)

    def replaces_its_queues(n: int) -> None:
        broker: Any = broker_of("rabbitmq", url_of(request, "rabbitmq"), unique)
        broker.channel.queue_delete(dq_name(unique))
        broker.channel.queue_declare(dq_name(unique), arguments={"x-max-length": 9})
        broker.close()
        fleet.broker.queues_pending.add(unique)  # type: ignore[attr-defined]
        raise OSError("down")

    job = fleet.send(fleet.actor(replaces_its_queues, ojs_retry=KEEP))
    bury(fleet, job)
    (letter,) = fleet.bridge.broker_letters.list().letters
    assert letter.id == job.id
    fleet.broker.close()
