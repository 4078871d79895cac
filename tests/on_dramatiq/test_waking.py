"""A retry is prompt: a worker wakes for what is due next, and not once in its timeout."""

from __future__ import annotations

import re
import threading
import time
from typing import Any
from uuid import uuid4

import dramatiq
import pytest
from dramatiq.brokers import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.common import current_millis, dq_name
from redis import Redis

from ojs_bridge.adapters.private_names import numbers_of
from ojs_bridge.dramatiq import receiving
from ojs_bridge.dramatiq.brokers import kind_of
from ojs_bridge.dramatiq.compat import consumer_of_thread, heartbeats_of
from ojs_bridge.dramatiq.on_redis import seldom
from tests.on_dramatiq.fleet import Fleet, Sent
from tests.servers import Valkey, eventually

#: Milliseconds that an idle worker sleeps, and seconds that no retry of these tests may be late.
TIMEOUT, LATE = 6000, 3.0

#: Whether Dramatiq runs jobs in the order in which they come.
IN_ORDER = numbers_of(dramatiq.__version__) >= (2, 2)

POLICIES: dict[str, dict[str, Any]] = {
    "as Dramatiq says it, at once": {"min_backoff": 0, "max_retries": 3},
    "a millisecond": {"ojs_retry": {"initial_interval": "PT0.001S", "max_attempts": 4}},
    "a while": {"ojs_retry": {"initial_interval": "PT0.3S", "max_attempts": 4, "backoff_strategy": "none"}},
}


def test_no_retry_waits_for_an_idle_worker_s_timeout(broker: dramatiq.Broker, unique: str) -> None:
    fleet = Fleet(broker, unique)

    def fails(n: int) -> None:
        if n < 4:
            raise OSError("down")

    actors = [fleet.actor(fails, **policy) for policy in POLICIES.values()]
    warm = fleet.actor(lambda n: None)
    with fleet.working(threads=2, timeout=TIMEOUT):
        fleet.end(fleet.send(warm))
        time.sleep(1.5)  # until the worker polls seldom, if it polls at all
        jobs = [fleet.send(actor) for actor in actors]
        for job in jobs:
            assert fleet.end(job).type == "job.completed"
        eventually(lambda: fleet.left() == 0)
    assert [len(job.runs) for job in jobs] == [4, 4, 4]
    assert max(gap for job in jobs for gap in job.gaps) < LATE
    assert min(jobs[2].gaps) >= 0.3
    for job in jobs:
        assert all(run.at >= due for run, due in zip(job.runs[1:], fleet.due(job), strict=True))


@pytest.mark.parametrize("broker", ["stub"], indirect=True)
def test_a_retry_due_soon_overtakes_those_that_are_due_late(broker: dramatiq.Broker, unique: str) -> None:
    fleet = Fleet(broker, unique)

    def fails_once(n: int) -> None:
        if n == 1:
            raise OSError("down")

    late = fleet.actor(fails_once, ojs_retry={"initial_interval": "PT3S"})
    soon = fleet.actor(fails_once, ojs_retry={"initial_interval": "PT0.2S"})
    with fleet.working(threads=2, timeout=TIMEOUT):
        waiting = fleet.send(late)
        eventually(lambda: "job.retrying" in fleet.heard.types(waiting.id))
        job = fleet.send(soon)
        assert fleet.end(job).type == "job.completed"
        assert len(waiting.runs) == 1
        fleet.end(waiting)
    assert job.gaps[0] < LATE
    assert waiting.gaps[0] >= 3


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_worker_with_its_hands_full_fetches_again_when_half_of_them_are_free(
    broker: dramatiq.Broker, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long its consumer would sleep for want of room, its threads do not run dry."""
    monkeypatch.setattr(receiving, "_pause_after", lambda *_: 5_000)
    fleet = Fleet(broker, unique)
    actor = fleet.actor(lambda n: None)
    jobs = [fleet.send(actor) for _ in range(100)]
    with fleet.working(threads=2):
        eventually(lambda: all(job.runs for job in jobs), seconds=25, what="every job")
        eventually(lambda: fleet.left() == 0)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_delayed_job_of_another_process_is_found_in_a_queue_that_was_empty(
    broker: Any, unique: str
) -> None:
    """A consumer of delayed messages that rests is woken by the look of its worker's presence."""
    fleet, kind = Fleet(broker, unique), kind_of(broker)
    actor = fleet.actor(lambda n: None)
    elsewhere = RedisBroker(client=broker.client, namespace=broker.namespace)
    elsewhere.declare_queue(unique)
    with fleet.working(threads=2, timeout=TIMEOUT):
        fleet.end(fleet.send(actor))
        wake = kind.wakes[dq_name(unique)]
        for _ in range(3):
            eventually(lambda: wake.empty_until > time.monotonic() + 1, what="a look at an empty queue")
            key, sent = uuid4().hex, time.monotonic()
            job = Sent(elsewhere.enqueue(actor.message(key), delay=200).message_id, fleet.runs[key])
            eventually(lambda job=job: job.runs, what="the run")
            assert 0.2 <= time.monotonic() - sent < LATE


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_consumer_does_not_rest_while_dramatiq_may_give_back_what_a_dead_worker_had(broker: Any) -> None:
    assert seldom(broker) == broker.heartbeat_timeout / 6000
    broker.client.zadd(heartbeats_of(broker), {"dead": current_millis() - broker.heartbeat_timeout - 1})
    assert seldom(broker) == 0


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_consumer_rests_whose_user_has_only_the_rights_that_dramatiq_needs(
    broker: Any, valkey: Valkey, unique: str
) -> None:
    rights = re.findall(r'redis.call\("(\w+)"', redis._scripts["dispatch"].decode())
    broker.client.execute_command(*f"ACL SETUSER {unique} on nopass ~*".split(), *(f"+{r}" for r in rights))
    with Redis(port=valkey.port, username=unique, password="any") as limited:
        assert seldom(RedisBroker(client=limited)) == broker.heartbeat_timeout / 6000
    broker.client.execute_command("ACL", "DELUSER", unique)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_worker_that_shuts_down_sleeps_between_its_looks(
    broker: dramatiq.Broker, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fetches nothing more; a consumer that span would take the processor from the jobs that end."""
    looks: list[None] = []
    monkeypatch.setattr(receiving, "_pause_after", lambda *_: looks.append(None) or 100)
    fleet = Fleet(broker, unique)
    fleet.declare(lambda: None)
    with fleet.working(threads=2) as worker:
        eventually(lambda: consumer_of_thread(worker.consumers[unique]) is not None, what="a consumer")
        consumer_of_thread(worker.consumers[unique]).stop_fetching()
        eventually(lambda: len(looks) > 2)
        looks.clear()
        time.sleep(1)
        assert len(looks) < 100


def window_of(worker: dramatiq.Worker, queue: str) -> int:
    """How many messages of a queue a worker may have now."""
    return int(consumer_of_thread(worker.consumers[queue]).prefetch)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
@pytest.mark.parametrize("own", [0, 3], ids=["Dramatiq's number", "a user's number"])
def test_a_worker_with_quick_jobs_may_have_more_messages_unless_the_user_has_said_how_many(
    broker: dramatiq.Broker, unique: str, monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    monkeypatch.setattr("dramatiq.worker.QUEUE_PREFETCH", own)
    fleet, windows, workers = Fleet(broker, unique), set[int](), list[dramatiq.Worker]()
    actor = fleet.actor(lambda n: windows.add(window_of(workers[0], unique)) if workers else None)
    jobs = [fleet.send(actor) for _ in range(1000)]
    with fleet.working(threads=2) as worker:
        workers.append(worker)
        eventually(lambda: fleet.left() == 0)
        if not own:
            eventually(lambda: window_of(worker, unique) == 4, what="Dramatiq's number again")
    assert [len(job.runs) for job in jobs] == [1] * len(jobs)
    assert max(windows) == own or 4 < max(windows) <= 16


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_what_waits_in_a_worker_whose_jobs_have_become_slow_goes_back_to_the_head_of_its_queue(
    broker: dramatiq.Broker, unique: str
) -> None:
    fleet, go, widest = Fleet(broker, unique), threading.Event(), list[int]()
    workers: list[dramatiq.Worker] = []

    def slow(n: int) -> None:
        widest.append(window_of(workers[0], unique))
        go.wait(90)

    with fleet.working(threads=2) as worker:
        workers.append(worker)
        worker.pause()
        quick, stands = fleet.actor(lambda n: None), fleet.actor(slow)
        jobs = [fleet.send(actor) for actor, many in ((quick, 1000), (stands, 40)) for _ in range(many)]
        worker.resume()
        held = f"{broker.namespace}:__acks__.{broker.broker_id}.{unique}"
        eventually(lambda: len(widest) == 2, what="two slow jobs")
        assert max(widest) > 4
        eventually(lambda: broker.client.scard(held) == 4, what="the others back in the queue")
        if IN_ORDER:
            ids = broker.client.lrange(f"{broker.namespace}:{unique}", 0, -1)
            waiting = [broker.client.hget(f"{broker.namespace}:{unique}.msgs", each) for each in ids]
            sent = [job.id for job in jobs[-36:]]
            assert [dramatiq.Message.decode(each).message_id for each in waiting] == sent
        go.set()
        eventually(lambda: fleet.left() == 0)
    assert [len(job.runs) for job in jobs] == [1] * len(jobs)


@pytest.mark.parametrize("broker", ["redis"], indirect=True)
def test_a_worker_that_shuts_down_as_its_window_is_set_anew_fetches_nothing_more(
    broker: dramatiq.Broker, unique: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops: list[None] = []

    class Stops(float):
        """Begins the shutdown when the window has found that there is none."""

        def __rmul__(self, left: float) -> float:
            stops.append(deliveries.stop_fetching())
            return left * float(self)

    fleet = Fleet(broker, unique)
    actor = fleet.actor(lambda n: None)
    with fleet.working(threads=2) as worker:
        fleet.end(fleet.send(actor))
        deliveries: Any = consumer_of_thread(worker.consumers[unique])
        monkeypatch.setattr(receiving, "WINDOW_SECONDS", Stops(receiving.WINDOW_SECONDS))
        eventually(lambda: stops, what="the shutdown")
        job = fleet.send(actor)
        time.sleep(0.5)
        assert window_of(worker, unique) == len(job.runs) == 0
    broker.flush(unique)
