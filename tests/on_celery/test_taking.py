"""Messages that Redis gave to a killed worker are not lost."""

from __future__ import annotations

import gc
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import kombu
import pytest
import redis
from celery.concurrency.gevent import TaskPool
from kombu import Consumer, Message
from kombu.asynchronous import Hub

from ojs_bridge.celery import taking
from ojs_bridge.celery.installation import installation
from ojs_bridge.celery.on_redis import give_back_strays
from tests.contract.steps import sleeps
from tests.on_celery.fleet import Fleet
from tests.servers import Proxy, Valkey, eventually


@pytest.fixture
def fleet(separate: Callable[..., Fleet], valkey: Valkey) -> Fleet:
    """A fleet with a database of its own, in which nobody else's messages are unacknowledged."""
    broker = valkey.url.removesuffix("/0") + "/7"
    with redis.Redis.from_url(broker) as client:
        client.flushdb()
    return separate(broker=broker)


def waiting(fleet: Fleet) -> int:
    """The number of messages that the broker has, in the queue or given to a worker."""
    with redis.Redis.from_url(fleet.settings.broker) as client:
        return client.llen(fleet.settings.queue) + client.hlen("unacked")


@pytest.mark.parametrize("mingles", [False, True], ids=["alone", "mingles"])
def test_a_message_that_a_killed_worker_was_given_and_has_not_read_is_there(
    fleet: Fleet, mingles: bool
) -> None:
    """A worker that mingles first asks the others, and reads their answers without acknowledging them."""
    worker = fleet.start("-c", "1", mingles=mingles)
    worker.await_ready()
    assert fleet.end(fleet.send("act", "it works")) == "SUCCESS"
    eventually(lambda: waiting(fleet) == 0, what="the acknowledgement")
    worker.process.send_signal(signal.SIGSTOP)
    fleet.send("act", "later")
    worker.process.kill()
    worker.process.wait()
    assert waiting(fleet) == 1


def test_reliable_fetch_can_be_switched_off(fleet: Fleet) -> None:
    """The worker then takes messages as Celery alone does, which loses this one, and says so."""
    worker = fleet.start("-c", "1", env={"OJS_BRIDGE_RELIABLE_FETCH": "false"})
    worker.await_ready()
    assert "reliable_fetch is off: a killed worker may lose a job" in worker.log
    assert fleet.end(fleet.send("act", "it works")) == "SUCCESS"
    eventually(lambda: waiting(fleet) == 0, what="the acknowledgement")
    worker.process.send_signal(signal.SIGSTOP)
    fleet.send("act", "later")
    worker.process.kill()
    worker.process.wait()
    assert waiting(fleet) == 0


def test_a_job_that_runs_when_its_worker_is_killed_is_there_if_it_is_acknowledged_late(fleet: Fleet) -> None:
    """`@ojs_task` sees to that; Celery itself acknowledges a job as it begins, and loses it."""
    worker = fleet.start("-c", "2")
    jobs = [fleet.send(task, sleeps(60)) for task in ("early", "act")]
    for job in jobs:
        eventually(lambda job=job: fleet.runs(job), seconds=30, what="a run")
    worker.kill()
    with redis.Redis.from_url(fleet.settings.broker) as client:
        left = client.hvals("unacked") + client.lrange(fleet.settings.queue, 0, -1)
    assert [job.id.encode() in message for message in left for job in jobs] == [False, True]


def test_every_queue_and_priority_is_consumed(fleet: Fleet) -> None:
    fleet.start("-c", "2").await_ready()
    other = f"{fleet.settings.queue}-other"
    sent = [fleet.send("act", "here", priority=n) for n in (0, 3, 6, 9)]
    sent += [fleet.send("act", "there", queue=other, priority=n) for n in (0, 9)]
    assert {fleet.end(job) for job in sent} == {"SUCCESS"}
    eventually(lambda: waiting(fleet) == 0)


def test_a_message_that_no_script_can_read_is_taken_as_ever(fleet: Fleet) -> None:
    """Half a character is JSON for Python, and not for Redis."""
    fleet.start("-c", "1").await_ready()
    sent = [fleet.send("act", "odd", headers={"word": "\ud800"}), fleet.send("act", "even")]
    assert {fleet.end(job) for job in sent} == {"SUCCESS"}
    eventually(lambda: waiting(fleet) == 0, what="the acknowledgements")


#: All that Celery itself needs, and not the key by which the bridge notes who has a message.
CELERYS_KEYS = (
    *("~celery*", "~_kombu*", "~*pidbox*", "~t*", "~ojs*"),
    *("~unacked", "~unacked_index", "~unacked_mutex"),
)
FORBIDDEN = {
    "commands that an old Redis lacks": ["-blmove", "-client|tracking"],
    "a key": ["resetkeys", *CELERYS_KEYS],
}
if kombu.VERSION[:2] < (5, 7):
    # A newer one asks Redis for the time, too.
    FORBIDDEN["a command in a script"] = ["-time"]


@pytest.fixture
def strict(separate: Callable[..., Fleet], rules: list[str]) -> Iterator[Fleet]:
    """A fleet whose Redis allows all but what the rules forbid."""
    with Valkey() as server:
        with redis.Redis.from_url(server.url) as client:
            client.execute_command("ACL", "SETUSER", "default", *rules)
        yield separate(broker=server.url)


@pytest.mark.parametrize("rules", FORBIDDEN.values(), ids=FORBIDDEN)
def test_a_redis_that_does_not_allow_the_bridge_s_way_is_consumed_as_ever(strict: Fleet) -> None:
    worker = strict.start("-c", "1")
    worker.await_ready()
    assert strict.end(strict.send("act", "as ever")) == "SUCCESS"
    said = "a killed worker may lose a job"
    eventually(lambda: said in worker.log, what=said)
    assert worker.stop() == 0


def test_what_could_not_be_acknowledged_is_when_redis_is_back(separate: Callable[..., Fleet]) -> None:
    """If not, its place among the prefetched messages would stay taken while the worker lives."""
    with Valkey() as server:
        fleet = separate(broker=server.url)
        installation(fleet.app).source.take_safely()
        fleet.send("act", "it works")
        with fleet.app.connection_for_read() as connection:
            queue = fleet.app.amqp.queues[fleet.settings.queue](connection.default_channel)
            taken: list[Message] = []
            consumer = Consumer(connection, queue, on_message=taken.append, prefetch_count=1)
            with consumer:
                connection.drain_events(timeout=10)
                server.kill()
                with pytest.raises(connection.connection_errors):
                    taken[0].ack()
                server.start()
                # The loop asks at each turn whether there is room.
                eventually(lambda: consumer.channel.qos.can_consume() and waiting(fleet) == 0)


def test_what_a_worker_has_not_begun_when_redis_dies_is_there_when_redis_is_back(
    separate: Callable[..., Fleet],
) -> None:
    """Celery forgets it with the connection, and cannot put it back. Redis alone keeps it for an hour."""
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        fleet = separate(broker=server.url)
        fleet.start("-c", "1").await_ready()
        jobs = [fleet.send("act", sleeps(3) if n == 0 else "ok") for n in range(4)]
        eventually(lambda: client.hlen("unacked") == len(jobs) and fleet.runs(jobs[0]), what="all of them")
        server.kill()
        server.start()
        assert {fleet.end(job) for job in jobs} == {"SUCCESS"}
        # The oldest Celery does not acknowledge the job that ran when the connection was lost.
        eventually(lambda: waiting(fleet) <= 1, what="the acknowledgements")
        assert [len(fleet.runs(job)) for job in jobs] == [1] * len(jobs)


@pytest.mark.skipif("terminate_job" not in vars(TaskPool), reason="this Celery's green pools end no run")
def test_a_job_that_is_cancelled_with_its_connection_is_there_when_redis_is_back(
    fleet: Fleet, valkey: Valkey
) -> None:
    """A green pool calls a greenlet that was killed a success, and Celery acknowledges its message."""
    with Proxy(valkey.port) as proxy:
        far = replace(fleet.settings, broker=proxy.to(fleet.settings.broker), cancels=True).to_env()
        fleet.start("-P", "gevent", "-c", "4", env=far).await_ready()
        jobs = [fleet.send("act", sleeps(60), "ok") for _ in range(4)]
        eventually(lambda: all(map(fleet.runs, jobs)), what="their first runs")
        proxy.cut()
        eventually(lambda: fleet.worker.log.count("Terminating it instead") == len(jobs), what="their ends")
        proxy.mend()
        assert {fleet.end(job) for job in jobs} == {"SUCCESS"}
        assert [[run.attempt for run in fleet.runs(job)] for job in jobs] == [[1, 1]] * len(jobs)


@pytest.fixture
def consumer(fleet: Fleet) -> Iterator[Consumer]:
    """A consumer of eight messages that has room for five, and whose loop goes on."""
    installation(fleet.app).source.take_safely()
    for n in range(8):
        fleet.send("act", str(n))
    with fleet.app.connection_for_read() as connection:
        queue = fleet.app.amqp.queues[fleet.settings.queue](connection.default_channel)
        consumer = Consumer(connection, queue, on_message=lambda message: None, prefetch_count=5)
        consumer.channel.ojs_gathers = True
        yield consumer


def test_messages_travel_together_and_acknowledgements_with_the_next_question(
    fleet: Fleet, consumer: Consumer
) -> None:
    taken: list[Message] = []
    consumer.on_message = taken.append
    with consumer:
        consumer.connection.drain_events(timeout=10)
        assert len(taken) == 5
        for message in taken:
            message.ack()
        consumer.connection.drain_events(timeout=10)
        assert len(taken) == 8
        assert waiting(fleet) == 3
        for message in taken[5:]:
            message.ack()
    assert waiting(fleet) == 0


def test_messages_whose_answer_is_lost_are_there_on_the_next_connection(
    fleet: Fleet, consumer: Consumer
) -> None:
    """But for those that the worker still has."""
    taken: list[Message] = []
    consumer.on_message = taken.append
    with redis.Redis.from_url(fleet.settings.broker) as client, consumer:
        consumer.connection.drain_events(timeout=10)
        for message in taken[:2]:
            message.ack()
        consumer.connection.transport.cycle.on_poll_start()
        eventually(lambda: client.llen(fleet.settings.queue) == 1, what="more messages on their way")
        give_back_strays(consumer.channel)
        assert {*client.hkeys("unacked")} == {message.delivery_tag.encode() for message in taken[2:]}
        assert client.llen(fleet.settings.queue) == 3


def test_a_worker_takes_no_more_than_its_part_and_gives_back_in_order_what_it_has_not_read(
    fleet: Fleet, consumer: Consumer
) -> None:
    taken: list[Message] = []
    consumer.on_message = taken.append
    with redis.Redis.from_url(fleet.settings.broker) as client:
        client.zadd("unacked_ojs.present", dict.fromkeys(("this one", "another", "a third"), 1))
        with consumer:
            consumer.connection.drain_events(timeout=10)
            assert len(taken) == 2

            def ids() -> list[str]:
                items = client.lrange(fleet.settings.queue, 0, -1)
                return [json.loads(item)["headers"]["id"] for item in items]

            left = ids()
            consumer.connection.transport.cycle.on_poll_start()
            eventually(lambda: len(ids()) < len(left), what="the next messages on their way")
        assert ids() == left
        assert len(taken) == 2


@pytest.fixture
def collected_by_hand() -> Iterator[None]:
    """Garbage stays until a test collects it."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("collected_by_hand")
def test_what_is_left_of_a_failed_connection_makes_no_worker_deaf(separate: Callable[..., Fleet]) -> None:
    hub, taken = Hub(), list[Message]()
    with Valkey() as server:
        fleet = separate(broker=server.url)
        installation(fleet.app).source.take_safely()
        with fleet.app.connection_for_read() as connection:
            server.kill()
            with pytest.raises(connection.connection_errors):
                connection.channel()
            server.start()
            queue = fleet.app.amqp.queues[fleet.settings.queue](connection.default_channel)
            connection.register_with_event_loop(hub)
            with Consumer(connection, queue, on_message=taken.append, no_ack=True):
                loop = hub.create_loop()
                for n in range(2):
                    fleet.send("act", "ok")
                    eventually(lambda n=n: next(loop) or len(taken) > n, what="the message")
                    gc.collect()


NO_BELL = {"denied": ["-client|tracking"], "has no numbers": ["-client|id"]}


@pytest.mark.parametrize("rules", NO_BELL.values(), ids=NO_BELL)
def test_a_redis_that_rings_no_bell_loses_nothing_and_every_queue_is_consumed(strict: Fleet) -> None:
    worker = strict.start("-c", "1", mingles=False)
    worker.await_ready()
    other = f"{strict.settings.queue}-other"
    jobs = [strict.send("act", "here", priority=9), strict.send("act", "there", queue=other)]
    assert {strict.end(job) for job in jobs} == {"SUCCESS"}
    assert "a killed worker may lose a job" not in worker.log
    assert worker.stop() == 0


@pytest.fixture
def resting(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Consumer, list[str]]]:
    """A consumer of two empty queues that waits for the bell alone, and the ids of what it has taken."""
    monkeypatch.setattr(taking, "_REST_SECONDS", 3600)
    installation(fleet.app).source.take_safely()
    names = [fleet.settings.queue, f"{fleet.settings.queue}-other"]
    taken: list[str] = []

    def take(message: Message) -> None:
        taken.append(message.headers["id"])
        message.ack()

    with fleet.app.connection_for_read() as connection:
        queues = [fleet.app.amqp.queues[name](connection.default_channel) for name in names]
        with Consumer(connection, queues, on_message=take, prefetch_count=4) as consumer:
            rests(consumer)
            yield consumer, taken


def rests(consumer: Consumer) -> None:
    """Drain events until the consumer waits for the bell."""

    def turn() -> bool:
        with suppress(socket.timeout):
            consumer.connection.drain_events(timeout=0.01)
        return bool(consumer.channel._ojs_resting)

    eventually(turn, what="rest")


def hears(consumer: Consumer, taken: list[str], job_id: str) -> None:
    """Wait until the consumer has taken a job, and waits for the bell again."""

    def has() -> bool:
        rests(consumer)
        return taken[-1:] == [job_id]

    eventually(has, what="the message")


def test_a_free_worker_hears_of_a_message_in_any_queue_and_of_any_priority(
    fleet: Fleet, resting: tuple[Consumer, list[str]]
) -> None:
    consumer, taken = resting
    other = f"{fleet.settings.queue}-other"
    for n in range(20):
        sent = fleet.send("act", "ok", queue=other if n % 2 else None, priority=(0, 3, 6, 9)[n % 4])
        hears(consumer, taken, sent.id)
    assert waiting(fleet) == 0


def test_a_worker_that_takes_a_message_leaves_its_place_among_those_that_listen(
    fleet: Fleet, resting: tuple[Consumer, list[str]]
) -> None:
    """Each message wakes all that listen, so that few do. The others look twice a second."""
    consumer, taken = resting
    with redis.Redis.from_url(fleet.settings.broker) as client:
        (listeners,) = client.keys("unacked_ojs_listeners.*")
        assert client.zcard(listeners) == 1
        client.zadd(listeners, dict.fromkeys(("another", "a third"), 2**40))
        sent = fleet.send("act", "ok", priority=9)

        def has() -> bool:
            with suppress(socket.timeout):
                consumer.connection.drain_events(timeout=0.01)
            return taken == [sent.id]

        eventually(has, what="the message")
        assert client.zrange(listeners, 0, -1) == [b"a third", b"another"]
        sent = fleet.send("act", "ok", priority=9)
        taken.clear()
        eventually(has, what="the message for which nobody has listened")
        assert not consumer.channel._ojs_resting
        client.delete(listeners)
    rests(consumer)


def test_a_message_that_comes_while_a_worker_looks_is_heard(
    fleet: Fleet, resting: tuple[Consumer, list[str]]
) -> None:
    consumer, taken = resting
    sent: list[str] = []

    def send() -> None:
        for n in range(300):
            sent.append(fleet.send("act", "ok", priority=(0, 9)[n % 2]).id)
            time.sleep(n % 5 / 1000)

    sending = threading.Thread(target=send)
    sending.start()

    def have_all() -> bool:
        rests(consumer)
        return not sending.is_alive() and len(taken) == len(sent)

    eventually(have_all, what="all of them")
    assert sorted(taken) == sorted(sent)


def test_the_bell_rings_for_a_connection_that_is_a_new_one(
    fleet: Fleet, resting: tuple[Consumer, list[str]]
) -> None:
    """Kombu connects anew when an answer never comes. The next look finds out."""
    consumer, taken = resting
    channel = consumer.channel
    channel.client.connection.disconnect()
    channel._ojs_resting = False
    rests(consumer)
    hears(consumer, taken, fleet.send("act", "ok", priority=9).id)


#: What a server is told, and what ends that.
TROUBLES: dict[str, tuple[list[str], list[str]]] = {
    "it is read-only": (["REPLICAOF 127.0.0.1 1"], ["REPLICAOF NO ONE"]),
    "its master is away": (
        ["CONFIG SET replica-serve-stale-data no", "REPLICAOF 127.0.0.1 1"],
        ["REPLICAOF NO ONE", "CONFIG SET replica-serve-stale-data yes"],
    ),
    "it is full": (["CONFIG SET maxmemory 1"], ["CONFIG SET maxmemory 0"]),
    "it lacks replicas": (["CONFIG SET min-replicas-to-write 1"], ["CONFIG SET min-replicas-to-write 0"]),
    "its scripts are flushed": (["SCRIPT FLUSH"], []),
    "nothing may be written": (["ACL SETUSER default -@write"], ["ACL SETUSER default +@all"]),
    "no script may run": (["ACL SETUSER default -@scripting"], ["ACL SETUSER default +@all"]),
}


def test_a_worker_outlasts_whatever_its_redis_answers(separate: Callable[..., Fleet]) -> None:
    with Valkey() as server, redis.Redis.from_url(server.url) as client:
        fleet = separate(broker=server.url, visibility=3)
        worker = fleet.start("-c", "1")
        worker.await_ready()
        for trouble, (begins, ends) in TROUBLES.items():
            # One job ends during the trouble.
            jobs = [fleet.send("act", sleeps(1.5)), fleet.send("act", "ok")]
            eventually(lambda jobs=jobs: fleet.runs(jobs[0]), what="a run")
            for command in begins:
                client.execute_command(*command.split())
            time.sleep(2.5)  # the trouble lasts for longer than the worker's own rounds
            for command in ends:
                client.execute_command(*command.split())
            for job in (*jobs, fleet.send("act", "ok")):
                assert fleet.end(job) == "SUCCESS", trouble
            assert worker.process.poll() is None, trouble
        assert worker.stop() == 0
        for job in jobs:
            assert len(fleet.runs(job)) == 1
