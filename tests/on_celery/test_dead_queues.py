"""`<queue>.dead` on the broker: listed, replayed and emptied as the store's dead letters are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis
from amqp.exceptions import AccessRefused
from celery import Celery, signals
from kombu import Exchange, Queue

from ojs_bridge import Bridge, Discard
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.celery.installation import attach, installation, task_policy
from ojs_bridge.celery.wire import Outgoing, Wire, carried, delivered, from_json
from ojs_bridge.errors import Unreachable, Unroutable
from ojs_bridge.rules.decision import RetryAt
from ojs_bridge.rules.job import Job
from tests.contract.steps import dies, raises
from tests.on_celery.fleet import Fleet, worker_here
from tests.on_celery.project import Unpicklable
from tests.servers import RabbitMQ, eventually

KEEP = {"max_attempts": 2, "on_exhaustion": "dead_letter", "jitter": False}
Apps = Callable[..., Celery]


def charge(key: str, card: str = "good", **more: Any) -> None:
    """Do nothing: no worker of these tests runs it."""


@pytest.fixture(params=["valkey", "rabbitmq"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of a broker."""
    served: str = request.getfixturevalue(request.param).url
    return served


def make(url: str, queue: str, **options: Any) -> Celery:
    """Make an app under a bridge without a store."""
    app = Celery(f"app-{queue}", broker=url, set_as_current=False)
    app.conf.update(task_default_queue=queue, accept_content=["json", "pickle"], **options)
    install(app, Bridge())
    ojs_task(app, name="charge", shared=False, retry=KEEP)(charge)
    return app


@pytest.fixture
def app(url: str, unique: str) -> Iterator[Celery]:
    """An app that sends to a queue of its own."""
    app = make(url, unique)
    yield app
    app.close()


def die(app: Celery, *args: Any, raised: Exception | None = None, **options: Any) -> str:
    """Send a job, and have it die as a worker would; return its id."""
    bridge, job_id = attach(app), app.send_task("charge", args, **options).id
    (wire,) = arrived(app, options.get("queue"))
    job = Job(job_id, "charge", wire.queue)
    while True:
        run = bridge.engine.admit(job, job, task_policy(app, app.tasks["charge"]))
        decision = bridge.engine.judge(run, raised or OSError(f"down at {job.attempt}"))
        job = bridge.engine.carrying.after(job, decision)
        if not isinstance(decision, RetryAt):
            break
    installation(app).broker.bury(
        wire, {"retries": job.attempt, "ojs": bridge.engine.storing.last_header(job).text}
    )
    return job_id


def sent(app: Celery, queue: str | None = None) -> list[Wire]:
    """Take every message out of a queue of the app."""
    name, found = queue or app.conf.task_default_queue, []
    with app.connection_for_read() as connection:
        bound = Queue(name, no_declare=True)(connection.default_channel)
        with suppress(*connection.channel_errors):
            while (message := bound.get(no_ack=True, accept=["json", "pickle"])) is not None:
                parts = carried(message, message.body, None, app)
                found.append(delivered(app, parts, message.properties, {"routing_key": name}))
    return found


def arrived(app: Celery, queue: str | None = None) -> list[Wire]:
    """Wait for a message of a queue, and take it: not all publishing waits until RabbitMQ has it."""
    found: list[Wire] = []
    eventually(lambda: found.extend(sent(app, queue)) or found, what="a message")
    return found


def ids(app: Celery, **kind: Any) -> list[str]:
    """The ids of what is listed, newest first."""
    return [letter.id for letter in attach(app).broker_letters.list(**kind).letters]


@pytest.mark.requirement("DLQ-003", "DLQ-R002")
def test_a_replay_keeps_the_message_and_may_change_its_queue(app: Celery, unique: str) -> None:
    plain = die(app, "a", serializer="pickle", compression="zlib", priority=3, headers={"x-mine": "yes"})
    changed = die(app, "b", "bad")
    letters = attach(app).broker_letters
    assert letters.replay(plain).replay_count == 1
    (wire,) = sent(app)
    state = json.loads(wire.headers["ojs"])
    assert (state["attempt"], len(state["errors"]), state["replay_count"]) == (1, 2, 1)
    assert (wire.headers["id"], wire.headers["retries"], wire.headers["x-mine"]) == (plain, 0, "yes")
    kinds = "application/x-python-serialize", "application/x-gzip"
    assert (wire.content_type, wire.headers["compression"]) == kinds
    assert wire.properties["priority"] == 3
    other = f"{unique}-slow"
    again = letters.replay(changed, args=["b", "good"], queue=other, retry={"max_attempts": 7})
    assert (again.retry, again.queue) == ({"max_attempts": 7}, other)
    (wire,) = sent(app, other)
    assert json.loads(wire.body)[0] == ["b", "good"]
    assert ids(app) == []


def test_the_queues_that_routes_name_are_looked_at(url: str, unique: str) -> None:
    """A process looks at them even if it has sent nothing yet, and if nothing ever died there."""
    sender = make(url, unique)
    job = die(sender, "a", queue=f"{unique}-far")
    routes = {"other.*": {"queue": f"{unique}-far"}, "nowhere": f"{unique}-never"}
    operator = make(url, unique, task_routes=routes)
    assert ids(operator) == [job]
    attach(operator).broker_letters.replay(job)
    assert [wire.headers["id"] for wire in sent(sender, f"{unique}-far")] == [job]
    sender.close()
    operator.close()


def test_what_is_no_job_stays(app: Celery, unique: str, caplog: pytest.LogCaptureFixture) -> None:
    with app.connection_for_write() as connection:
        connection.Producer().publish(
            {"some": "thing"}, routing_key=f"{unique}.dead", declare=[Queue(f"{unique}.dead")]
        )
    job = die(app, "a")
    assert ids(app) == [job]
    assert "is of no Celery job, and stays there" in caplog.text
    attach(app).broker_letters.delete(job)
    assert ids(app) == []


def bury_in_quorum_queue(app: Celery, name: str, **limits: Any) -> str:
    """Have a job's dead letter in a quorum queue, as in a virtual host where that is the default kind."""
    died = die(app, "a")
    wire = from_json(attach(app).broker_letters.get(died).message)
    attach(app).broker_letters.delete(died)
    dead = Queue(name, queue_arguments={"x-queue-type": "quorum", **limits})
    with app.connection_for_write() as connection:
        connection.Producer().publish(
            wire.body,
            routing_key=dead.name,
            declare=[dead],
            headers=wire.headers,
            content_type=wire.content_type,
            content_encoding=wire.content_encoding,
        )
    return died


def test_a_quorum_queue_which_counts_deliveries(rabbitmq: Any, unique: str) -> None:
    app = make(rabbitmq.url, unique, task_routes={"far": f"{unique}-far"})
    died = bury_in_quorum_queue(app, f"{unique}-far.dead")
    for _ in range(3):
        assert ids(app) == [died]
    attach(app).broker_letters.replay(died)
    (wire,) = sent(app, f"{unique}-far")
    assert not {name for name in wire.headers if name.startswith("x-")}
    assert ids(app) == []
    app.close()


def test_no_look_uses_up_the_deliveries_of_a_quorum_queue(rabbitmq: Any, unique: str) -> None:
    """RabbitMQ counts what is read and put back, and drops it at a limit, which RabbitMQ 4 sets to 20."""
    app = make(rabbitmq.url, unique, task_routes={"far": f"{unique}-far"})
    jobs = [bury_in_quorum_queue(app, f"{unique}-far.dead", **{"x-delivery-limit": 20}) for _ in range(2)]
    for _ in range(30):
        assert sorted(ids(app)) == sorted(jobs)
    attach(app).broker_letters.replay(jobs[0])
    assert ids(app) == [jobs[1]]
    app.close()


def test_redis_with_a_key_prefix(valkey: Any, unique: str) -> None:
    app = make(valkey.url, unique, broker_transport_options={"global_keyprefix": f"{unique}:"})
    jobs = [die(app, "a", priority=9), die(app, "b")]
    attach(app).broker_letters.replay(jobs[0])
    assert ids(app) == [jobs[1]]
    assert [wire.headers["id"] for wire in sent(app)] == [jobs[0]]
    app.close()


def test_a_broker_in_memory(unique: str) -> None:
    app = make("memory://", unique)
    jobs = [die(app, f"k{n}") for n in range(3)]
    attach(app).broker_letters.delete(jobs[1])
    assert ids(app) == [jobs[2], jobs[0]]
    attach(app).broker_letters.replay(jobs[0])
    assert (ids(app), len(sent(app))) == ([jobs[2]], 1)


def test_a_broker_that_is_out_of_reach() -> None:
    for url in ("redis://127.0.0.1:1/0", "amqp://127.0.0.1:1"):
        with pytest.raises(Unreachable, match=r"ConnectionError|OperationalError|refused"):
            ids(make(url, "q"))


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_a_dead_queue_has_the_type_of_its_jobs_queue(rabbitmq: Any, unique: str, kind: str) -> None:
    """Else jobs would be replicated, and their dead letters would not."""
    queue = Queue(unique, routing_key=unique, queue_arguments={"x-queue-type": kind})
    app = make(rabbitmq.url, unique, task_queues=[queue])
    job = die(app, "a")
    with app.connection_for_write() as connection:  # RabbitMQ refuses to declare it with another type
        Queue(f"{unique}.dead", queue_arguments={"x-queue-type": kind})(connection.default_channel).declare()
    assert ids(app) == [job]
    app.close()


@pytest.mark.parametrize("delays", ["failed", "returned", "all"])
def test_letters_are_seen_whatever_a_policy_delays_or_the_reason_is_told(
    rabbitmq: Any, unique: str, delays: str, caplog: pytest.LogCaptureFixture
) -> None:
    """From 4.3 on RabbitMQ can hide a message that was read and given back; older servers never do."""
    app = make(rabbitmq.url, unique, task_routes={"far": f"{unique}-far"})
    policy = {"x-delayed-retry-type": delays, "x-delayed-retry-min": 600_000, "x-delayed-retry-max": 600_000}
    died = bury_in_quorum_queue(app, f"{unique}-far.dead", **policy)
    assert ids(app) == [died]
    told = "hides the dead letters that were read" in caplog.text
    assert ids(app) == ([] if told else [died])
    assert not (told and delays == "failed")
    app.close()


def test_a_queue_that_exists_with_other_arguments_takes_a_replay(rabbitmq: Any, unique: str) -> None:
    app = make(rabbitmq.url, unique)
    job = die(app, "a")
    other = Queue(f"{unique}-other", queue_arguments={"x-max-length": 9})
    with app.connection_for_write() as connection:
        other(connection.default_channel).declare()
    attach(app).broker_letters.replay(job, queue=other.name)
    assert ids(app) == []
    with app.connection_for_read() as connection:
        assert connection.default_channel.basic_get(other.name, no_ack=True) is not None
    app.close()


@pytest.mark.parametrize("delay", [None, 5])
@pytest.mark.parametrize("options", [{}, {"confirm_publish": False}], ids=["confirmed", "unconfirmed"])
def test_a_message_that_no_queue_takes_is_not_published(
    rabbitmq: Any, unique: str, options: dict[str, Any], delay: int | None
) -> None:
    """Its queue is gone, and is declared again; an exchange that the task chose is not replaced."""
    exchange = Exchange(f"{unique}-x", type="topic")
    queue = Queue(unique, exchange, routing_key="#", queue_arguments={"x-queue-type": "quorum"})
    app = make(rabbitmq.url, unique, task_queues=[queue], broker_transport_options=options)
    job = die(app, "a")
    wire, now = from_json(attach(app).broker_letters.get(job).message), datetime.now(timezone.utc)
    with app.connection_for_write() as connection:
        connection.default_channel.queue_delete(unique)
    installation(app).broker.publish(Outgoing(wire), now, now + timedelta(seconds=delay) if delay else None)
    assert [found.headers["id"] for found in arrived(app)] == [job]
    if not options:
        with pytest.raises(Unroutable):
            installation(app).broker.publish(
                Outgoing(replace(wire, exchange="amq.topic", routing_key="nowhere", queue="")), now
            )
        installation(app).broker.publish(
            Outgoing(wire), now
        )  # the answer to the last message is not taken for this one's
        assert [found.headers["id"] for found in arrived(app)] == [job]
    app.close()


def test_a_message_that_kombus_table_leads_nowhere_reaches_its_queue(valkey: Any, unique: str) -> None:
    """Kombu itself does the routing for Redis, and drops what its table has no queue for."""
    exchange = Exchange(f"{unique}-x", type="topic")
    app = make(valkey.url, unique, task_queues=[Queue(unique, exchange, routing_key="#")])
    job = app.send_task("charge", ("a",)).id
    (found,) = sent(app)
    wire = replace(found, exchange=exchange.name, routing_key="some.key")
    now = datetime.now(timezone.utc)
    installation(app).broker.publish(Outgoing(wire), now)
    with app.connection_for_write() as connection:
        connection.default_channel.client.delete(f"_kombu.binding.{exchange.name}")
    installation(app).broker.publish(Outgoing(wire), now)
    assert [one.headers["id"] for one in sent(app)] == [job, job]
    app.close()


@pytest.fixture(scope="module")
def guarded() -> Iterator[str]:
    """The URL of a RabbitMQ whose user may declare every queue but those that end with `.dead`."""
    with RabbitMQ(default_permissions='[<<"^(?!.*[.]dead$)">>, <<".*">>, <<".*">>]') as server:
        yield server.url


@pytest.mark.parametrize("acks_late", [True, False], ids=["late", "early"])
def test_a_dead_letter_without_a_place_is_celerys_own_end(
    separate: Callable[..., Fleet], guarded: str, acks_late: bool
) -> None:
    """It waits for nobody: the failure is shown, the log has the message, a dead-letter exchange gets it."""
    fleet = separate(broker=guarded, store=None, limit=99, acks_late=acks_late)
    rest = Queue(f"{fleet.settings.queue}.rest")
    with fleet.app.connection_for_write() as connection:
        rest(connection.default_channel).declare()
    fleet.start("-c", "1").await_ready()
    ends = {"kept": raises(OSError, "down"), "killed": dies(), "unpicklable": raises(Unpicklable, "what")}
    once = {"max_attempts": 1}
    jobs = {name: fleet.send("act_kept", end, ojs_retry=once) for name, end in ends.items()}
    unread = fleet.send("act_kept", "ok", headers={"timelimit": ["x", None]})
    assert {name: fleet.end(job) for name, job in jobs.items()} == dict.fromkeys(ends, "FAILURE")
    assert fleet.end(fleet.send("act_kept", "ok")) == "SUCCESS"
    assert isinstance(jobs["kept"].result, OSError)
    said = [line for line in fleet.worker.log.splitlines() if "its dead letter has no place" in line]
    for job in (*jobs.values(), unread):
        (line,) = (line for line in said if job.id in line)
        assert "CRITICAL" in line
        assert json.loads(line.partition("This is the message: ")[2])["headers"]["id"] == job.id
    kept = {wire.headers["id"] for wire in sent(fleet.app, rest.name)}
    assert kept == ({jobs["kept"].id, jobs["killed"].id, unread.id} if acks_late else {unread.id})
    assert fleet.buried(fleet.settings.queue) == []


def test_a_refusal_is_told_from_an_outage(valkey: Any, guarded: str, unique: str, tmp_path: Path) -> None:
    """A login that is refused, or a store that is away, may be over soon: then the job waits."""

    def keeps(url: str, queue: str = unique, **bridge: Any) -> bool:
        app = Celery(broker=url, set_as_current=False)
        install(app, Bridge(**bridge))
        wire = Wire("[[], {}, {}]", "application/json", "utf-8", {"id": "j", "task": "t"}, queue=queue)
        try:
            return installation(app).broker.is_buried(attach(app).engine, wire, {}, can_wait=True)
        finally:
            app.close()

    redis.Redis.from_url(valkey.url).acl_setuser(
        unique, enabled=True, passwords=["+secret"], keys=[unique, "_kombu.*"], categories=["+@all"]
    )
    assert not keeps(valkey.url.replace("redis://", f"redis://{unique}:secret@"))
    assert not keeps(guarded)
    assert not keeps(guarded, store=f"sqlite:///{tmp_path}/ojs.db")
    assert not keeps(guarded, queue="q" * 252)
    with pytest.raises(Unroutable):
        keeps(guarded, store="sqlite:////nowhere/at/all.db")
    with pytest.raises(AccessRefused):
        keeps(guarded.replace("guest:guest", "guest:other"))


DIES: dict[str, Any] = {"max_attempts": 2, "initial_interval": "PT0.1S", "jitter": False}
BURIES = {**DIES, "on_exhaustion": "dead_letter"}


def down() -> None:
    raise OSError("down")


def unwanted() -> None:
    raise Discard("a.b")


@pytest.mark.parametrize(
    ("bridge", "says", "rejected"),
    [
        (None, "app", {"plain", "discards", "buries"}),
        ({}, "task", {"plain", "discards"}),
        ({"store": "memory://"}, "app", {"plain", "discards"}),
    ],
    ids=["native", "no store", "a store"],
)
def test_a_teams_own_dead_letter_exchange(
    rabbitmq: Any,
    unique: str,
    bridge: dict[str, Any] | None,
    says: str,
    rejected: set[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failed message reaches it as natively, unless its letter is kept or its handler wants none."""
    app = Celery(unique, broker=rabbitmq.url, set_as_current=False)
    options: dict[str, Any] = {"acks_late": True, "acks_on_failure_or_timeout": False}
    if says == "app":
        app.conf.update({f"task_{name}": value for name, value in options.items()})
        options = {}
    own = None if bridge is None else Bridge(**bridge)
    tasks = {"plain": down, "discards": down, "buries": down}
    if own:
        tasks["unwanted"] = unwanted
        policies = {"plain": {}, "unwanted": {}, "discards": DIES, "buries": BURIES}
        install(app, own, policies=policies)
    app.conf.task_queues = [
        Queue(
            f"{unique}-{name}",
            Exchange(unique),
            routing_key=name,
            queue_arguments=rejecting(unique, name),
        )
        for name in tasks
    ]
    for name, run in tasks.items():
        app.task(name=name, shared=False, **options)(run)
    ended: list[str] = []
    with app.connection_for_write() as connection, marked(ended):
        channel = connection.default_channel
        failed = {name: f"{unique}-{name}-failed" for name in tasks}
        for queue in failed.values():
            channel.queue_declare(queue, durable=True, auto_delete=False)
        with worker_here(app, pool="solo"):
            for name in tasks:
                app.tasks[name].apply_async(queue=f"{unique}-{name}")
            eventually(lambda: len(ended) == len(tasks), what="the ends of the jobs")
        counts = {name: channel.queue_declare(queue, passive=True)[1] for name, queue in failed.items()}
    assert counts == {name: int(name in rejected) for name in tasks}
    kept = own and (own.dead_letters if bridge else own.broker_letters).list().letters
    assert [letter.type for letter in kept or ()] == (["buries"] if own else [])
    # A retry has no state where no results are stored.
    assert "its state cannot be stored" not in caplog.text
    app.close()


def rejecting(unique: str, name: str) -> dict[str, str]:
    """The arguments of a queue whose rejected messages go to another queue."""
    return {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{unique}-{name}-failed"}


@contextmanager
def marked(ended: list[str]) -> Iterator[None]:
    """Note the jobs that have failed."""

    def note(task_id: str, **_: Any) -> None:
        ended.append(task_id)

    signals.task_failure.connect(note)
    yield
    signals.task_failure.disconnect(note)
