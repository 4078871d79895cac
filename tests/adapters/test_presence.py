"""A worker is dead if its connection has ended and it is silent. No other worker is dead."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from ojs_bridge.adapters import presence
from ojs_bridge.adapters.presence import Dead, Presence
from tests.servers import Valkey, eventually


class Worker:
    """The presence of a worker, with what it finds; `look` is called by the test."""

    def __init__(self, url: str, name: str) -> None:
        self.suspected: list[str] = []
        self.dead: list[Dead] = []
        self.client = redis.Redis.from_url(url)
        self.presence = Presence(
            "test:",
            name,
            f"family of {name}",
            queues=lambda: [f"queue of {name}"],
            suspect=self.suspected.append,
            give_back=lambda dead: self.dead.append(dead) or 1,
        )

    def look(self) -> None:
        self.presence.look(self.client)

    def end(self) -> None:
        """Lose every connection, as a killed process does."""
        self.presence._leave()
        self.client.close()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "SUSPECTED_AFTER", 0.2)
    monkeypatch.setattr(presence, "DEAD_AFTER", 0.6)


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A Valkey of the test's own."""
    with Valkey() as server:
        yield server


@pytest.fixture
def worker(server: Valkey) -> Callable[[str], Worker]:
    """Makes a worker that has looked once."""

    def make(name: str) -> Worker:
        made = Worker(server.url, name)
        made.look()
        return made

    return make


def looks(worker: Worker) -> Callable[[], bool]:
    """Return a condition that has a worker look, and holds when it has found a dead one."""

    def found() -> bool:
        worker.look()
        return bool(worker.dead)

    return found


def look_for(worker: Worker, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        try:
            worker.look()
        except redis.ConnectionError:
            worker.presence.missed()
        time.sleep(0.05)


@pytest.mark.requirement("RET-12")
def test_a_worker_whose_connection_has_ended_is_found_once(worker: Callable[[str], Worker]) -> None:
    first, second = worker("first"), worker("second")
    second.end()
    eventually(looks(first), what="the dead worker")
    assert [(dead.worker, dead.queues) for dead in first.dead] == [("second", ["queue of second"])]
    assert set(first.suspected) == {"family of second"}
    look_for(first, 1)
    assert len(first.dead) == 1


@pytest.mark.requirement("RET-12")
def test_a_killed_worker_is_found_though_its_fork_lives(
    server: Valkey, worker: Callable[[str], Worker]
) -> None:
    """A job may fork, and the fork outlive the worker. It has all connections of its parent."""
    first, (told, tells) = worker("first"), os.pipe()
    if (second := os.fork()) == 0:
        Worker(server.url, "second").look()
        fork = os.fork()
        if fork:
            os.write(tells, str(fork).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
        os._exit(0)
    os.waitpid(second, 0)
    try:
        eventually(looks(first), what="the dead worker")
    finally:
        os.kill(int(os.read(told, 20)), signal.SIGKILL)
    assert [dead.worker for dead in first.dead] == ["second"]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("is_reaped", [True, False], ids=["reaped", "zombie"])
def test_a_killed_worker_is_found_though_a_child_of_c_code_keeps_its_connection(
    server: Valkey, worker: Callable[[str], Worker], is_reaped: bool
) -> None:
    """Python hears nothing of such a fork, and closes nothing in it."""
    first, (told, tells) = worker("first"), os.pipe()
    if (second := os.fork()) == 0:
        Worker(server.url, "second").look()
        fork = ctypes.CDLL(None).fork()
        if fork:
            os.write(tells, str(fork).encode())
            os.kill(os.getpid(), signal.SIGKILL)
        while True:
            time.sleep(600)
    child = int(os.read(told, 20))
    if is_reaped:
        os.waitpid(second, 0)
    try:
        eventually(looks(first), what="the dead worker")
        assert first.client.pubsub_numsub("test:_ojs.worker.second")[0][1] == 1
    finally:
        os.kill(child, signal.SIGKILL)
        if not is_reaped:
            os.waitpid(second, 0)
    assert [dead.worker for dead in first.dead] == ["second"]


@pytest.mark.requirement("RET-12")
def test_a_silent_worker_whose_connection_stands_is_left_alone(worker: Callable[[str], Worker]) -> None:
    """It is slow, or frozen."""
    first, second = worker("first"), worker("second")
    look_for(first, 1.5)
    assert (first.dead, first.suspected) == ([], [])
    second.look()


def test_a_worker_that_stood_still_itself_judges_nobody_at_once(worker: Callable[[str], Worker]) -> None:
    """Others may have stood still with it, or with Redis, and be about to connect anew."""
    first, second = worker("first"), worker("second")
    look_for(first, 0.7)  # it judges others
    second.end()
    time.sleep(0.7)  # as long as it stands still
    first.look()
    assert (first.dead, first.suspected) == ([], [])
    eventually(looks(first), what="the dead worker")


def test_a_worker_that_subscribes_anew_is_subscribed_meanwhile(
    worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its looks may have failed for another reason: a Redis without memory refuses them, and ends nothing."""
    first, second = worker("first"), worker("second")
    counts: list[int] = []
    pubsub = first.client.pubsub

    def counted(**options: bool) -> object:
        counts.append(second.client.pubsub_numsub("test:_ojs.worker.first")[0][1])
        return pubsub(**options)

    monkeypatch.setattr(first.client, "pubsub", counted)
    first.presence.missed()
    first.look()
    assert counts == [1]


def test_a_worker_that_has_been_given_up_comes_back(worker: Callable[[str], Worker]) -> None:
    first, second = worker("first"), worker("second")
    second.end()
    eventually(looks(first))
    again = worker("second")
    again.end()
    eventually(lambda: looks(first)() and len(first.dead) == 2)


def test_a_dead_worker_whose_queues_one_worker_does_not_know_is_left_to_another(
    worker: Callable[[str], Worker],
) -> None:
    """It is of another app on the same Redis."""
    stranger, peer, dead = worker("stranger"), worker("peer"), worker("dead")
    stranger.presence._give_back = stranger.dead.append
    dead.end()
    for found in (looks(stranger), looks(peer)):
        eventually(found, what="the dead worker")
    assert "dead" in {gone.worker for gone in stranger.dead}
    assert "dead" in {gone.worker for gone in peer.dead}


def test_a_dead_worker_that_cannot_be_helped_keeps_no_other_from_it(
    worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be of another app, whose queue this worker may not touch."""
    monkeypatch.setattr(presence, "GRACE", 0)
    first, second, third = worker("first"), worker("second"), worker("third")
    give_back = first.presence._give_back

    def refuses(dead: Dead) -> int | None:
        if dead.worker == "second":
            raise redis.ResponseError("NOPERM")
        return give_back(dead)

    first.presence._give_back = refuses
    second.end()
    third.end()

    def found() -> bool:
        with suppress(redis.ResponseError):
            first.look()
        return bool(first.dead)

    eventually(found, seconds=10, what="the dead worker")
    assert [dead.worker for dead in first.dead] == ["third"]


def test_after_an_outage_every_worker_has_time_to_come_back(
    server: Valkey, worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No connection stands, and all have been silent; the first to be back judges nobody yet."""
    monkeypatch.setattr(presence, "GRACE", 5)
    first, second = worker("first"), worker("second")
    server.kill()
    look_for(first, 0.7)  # for so long nobody could say that it lives
    server.start()
    eventually(first.client.ping)
    look_for(first, 1.5)
    assert (first.dead, first.suspected) == ([], [])
    look_for(second, 0.1)
    second.end()
    eventually(looks(first), what="the dead worker")


def test_a_restart_that_redis_py_hides_is_an_outage(server: Valkey, worker: Callable[[str], Worker]) -> None:
    """A client that repeats its commands connects anew in silence, and the first to be back sees no error."""
    first, second = worker("first"), worker("second")
    first.client = redis.Redis(port=server.port, retry=Retry(NoBackoff(), 3))
    look_for(first, 0.7)  # it judges others
    second.look()
    server.kill()
    server.start()
    # As a server that keeps what is written has it.
    first.client.zadd("test:_ojs.present", {"second": 1})
    look_for(first, 1)
    assert (first.dead, first.suspected) == ([], [])


def test_a_connection_that_was_made_anew_is_an_outage(
    server: Valkey, worker: Callable[[str], Worker]
) -> None:
    """Celery has a new channel after an outage that lay between two looks; others are slower to connect."""
    first, second = worker("first"), worker("second")
    look_for(first, 0.7)  # it judges others
    second.end()
    first.client = redis.Redis.from_url(server.url)
    look_for(first, 1)
    assert (first.dead, first.suspected) == ([], [])


def test_a_worker_asks_one_question_at_a_look(worker: Callable[[str], Worker]) -> None:
    """An idle worker costs no more than it must."""
    first = worker("first")
    first.client.config_resetstat()
    for _ in range(10):
        first.look()
    asked = first.client.info("commandstats")
    assert (asked["cmdstat_eval"]["calls"], "cmdstat_ping" in asked) == (10, False)


def test_a_server_that_does_not_count_subscriptions_says_nothing_of_the_dead(
    worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind some proxies the count is always zero; a worker sees that by its own."""
    first, second = worker("first"), worker("second")
    second.end()
    monkeypatch.setattr(first.client, "pubsub_numsub", lambda *channels: [(name, 0) for name in channels])
    look_for(first, 1)
    assert (first.dead, first.suspected) == ([], [])


@pytest.mark.requirement("RET-12")
def test_after_a_trouble_of_redis_silence_alone_is_no_evidence(
    worker: Callable[[str], Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stood still meanwhile may come back; its reservations tell when they have run out."""
    monkeypatch.setattr(presence, "GRACE", 0)
    # A pause of the test for longer than this is a trouble, too, and would take the evidence away.
    monkeypatch.setattr(presence, "DEAD_AFTER", 3)
    first, frozen, killed = worker("first"), worker("frozen"), worker("killed")
    frozen.end()
    first.presence.missed()
    eventually(looks(first), what="the messages of a worker that was not heard since")
    assert (first.suspected, [dead.worker for dead in first.dead]) == ([], ["frozen"])
    killed.look()
    killed.end()
    eventually(lambda: looks(first)() and len(first.dead) == 2, what="the one that was heard since")
    assert set(first.suspected) == {"family of killed"}
