"""Restarts, lost connections, full memory and clusters of Redis and Valkey."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import redis

from ojs_bridge import ConfigurationError, StoreError, open_store
from ojs_bridge.store import Due, Filter, Grant, Parked, Reservation, Settle, Store
from tests.servers import Valkey, eventually, free_port
from tests.store.processes import in_processes
from tests.store.test_store import entry, letter

NOW = datetime.now(timezone.utc).replace(microsecond=0)
LATER = NOW + timedelta(minutes=1)
KEEP = NOW + timedelta(days=3)
RESERVATION = Reservation("k-1", 0)


@pytest.fixture
def server() -> Iterator[Valkey]:
    """A Valkey of this test's own."""
    with Valkey() as server:
        yield server


@pytest.fixture
def client(server: Valkey) -> Iterator[redis.Redis]:
    """A client beside the store's."""
    with redis.Redis.from_url(server.url, decode_responses=True) as client:
        yield client


@pytest.fixture
def own(server: Valkey) -> Iterator[Store]:
    """The store in the test's own Valkey."""
    store = open_store(server.url)
    yield store
    store.close()


def reserve(
    store: Store, reservation: Reservation = RESERVATION, holder: str = "w-1", now: datetime = NOW
) -> Grant:
    """Reserve a run for a minute."""
    until = now + timedelta(minutes=1)
    return store.reservations.reserve(
        reservation, publication="p-1", holder=holder, mark=secrets.token_hex(8), now=now, until=until
    ).grant


def parked(job_id: str = "j-1", **fields: Any) -> Parked:
    """A parked retry, due now."""
    known: dict[str, Any] = {
        "id": job_id,
        "key": f"{job_id} key",
        "fence": 1,
        "type": "billing.charge",
        "queue": "default",
        "framework": "celery",
        "attempt": 2,
        "max_attempts": 3,
        "next_retry_at": NOW,
        "parked_at": NOW,
        "reason": "external.timeout",
        "state": {"v": 1, "attempt": 2},
        "message": {"args": [7]},
    }
    return Parked(**{**known, **fields})


def claim_due(store: Store) -> Due:
    """Claim a parked retry that is due."""
    return store.parked.claim_due("celery", now=NOW, until=LATER, limit=1)


def use_everything(store: Store) -> None:
    """Call every method, and leave something of every kind behind."""
    store.prepare()
    store.letters.keep_errors("j-1", [(0, entry())])
    store.letters.keep_errors("j-9", [(0, entry())])
    assert len(store.letters.kept_errors("j-1")) == 1
    assert reserve(store) is Grant.TAKEN
    assert store.reservations.extend([RESERVATION, Reservation("k-2", 0)], holder="w-1", until=LATER) == [
        Reservation("k-2", 0)
    ]
    store.letters.bury(letter(), Settle(RESERVATION, "w-1", KEEP))
    store.letters.bury(letter("j-2", type="other"))
    assert reserve(store) is Grant.SETTLED
    held = store.letters.claim(["j-1"], now=NOW, seconds=60).claim
    assert held
    store.letters.unclaim(["j-1"], held)
    assert [
        found.id for found in store.letters.list(Filter(type="bill?ng.*"), limit=5, cursor=None).letters
    ] == []
    assert len(store.letters.list(Filter(type="billing.*"), limit=5, cursor=None).letters) == 1
    held = store.letters.claim(["j-1"], now=NOW, seconds=60).claim
    assert held
    assert store.letters.delete(["j-1"], held)
    store.letters.forget_errors("j-1")
    assert (store.letters.stats().total, store.letters.get("j-1")) == (1, None)
    for job_id in ("j-1", "j-2", "j-3"):
        store.parked.park(parked(job_id), Settle(Reservation(f"{job_id} key", 0), None, KEEP))
    due = claim_due(store)
    store.parked.unclaim(due.retries, due.claim)
    due = claim_due(store)
    assert store.parked.unpark(due.retries, due.claim) == 1
    assert store.parked.reschedule(parked("j-2"), LATER)
    assert store.parked.cancel(parked("j-2"))
    assert store.parked.get("j-3") == parked("j-3")
    assert store.parked.list(Filter(queue="default"), limit=5, cursor=None).jobs == (parked("j-3"),)
    assert store.parked.count() == 1
    assert reserve(store, Reservation("k-3", 0)) is Grant.TAKEN
    assert store.reservations.release(Settle(Reservation("k-3", 0), "w-1", KEEP))
    assert reserve(store, Reservation("k-4", 0)) is Grant.TAKEN
    assert store.reservations.settle(Settle(Reservation("k-4", 0), "w-1", KEEP))
    store.reservations.expire([Reservation("k-4", 0)])
    assert store.reservations.expire_before(NOW, limit=10) == 0
    assert reserve(store, Reservation("k-5", 0)) is Grant.TAKEN


def test_what_was_answered_outlives_a_kill(server: Valkey, own: Store) -> None:
    """After the restart the next call works, although its connection was dead."""
    own.letters.bury(letter(), Settle(RESERVATION, None, KEEP))
    own.parked.park(parked())
    server.kill()
    with pytest.raises(StoreError, match=r"^the store 'redis://127.* failed: .*refused"):
        own.letters.get("j-1")
    server.start()
    assert own.letters.get("j-1") == letter()
    assert reserve(own) is Grant.SETTLED
    assert claim_due(own).retries == (parked(),)


def test_a_connection_that_died_while_idle_is_mended(client: redis.Redis, own: Store) -> None:
    """The connections of other threads are mended, too."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: reserve(own, Reservation(f"k-{n}", 0)), range(100)))
    client.client_kill_filter(_type="normal", skipme=True)
    assert [reserve(own, Reservation(f"k-{n}", 1)) for n in range(8)] == [Grant.TAKEN] * 8


def test_scripts_that_the_server_has_forgotten_are_sent_again(client: redis.Redis, own: Store) -> None:
    """Every script is sent again."""
    use_everything(own)
    for n in range(2):
        client.script_flush()
        assert reserve(own, Reservation(f"flushed-{n}", 0)) is Grant.TAKEN
    client.flushall()
    client.script_flush()
    use_everything(own)


class Forgetful:
    """A way to the server that loses the next answer, and the connection with it, when it is told to."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.loses_next = False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._target))
            threading.Thread(target=self._carry, args=(near, far), daemon=True).start()

    def _carry(self, near: socket.socket, far: socket.socket) -> None:
        with near, far:
            while sent := near.recv(1 << 20):
                far.sendall(sent)
                answer = far.recv(1 << 20)
                if self.loses_next:
                    self.loses_next = False
                    return
                near.sendall(answer)


@pytest.fixture
def forgetful(server: Valkey, client: redis.Redis) -> Iterator[tuple[Forgetful, Store]]:
    """A store whose answers can be lost."""
    way = Forgetful(server.port)
    store = open_store(way.url)
    use_everything(store)  # the server then knows each script, so a lost answer is that of a step
    client.flushall()
    yield way, store
    store.close()


def test_a_reservation_whose_answer_was_lost_is_not_held_against_its_holder(
    forgetful: tuple[Forgetful, Store],
) -> None:
    """The repeat is told what the first was told, while another request of the same holder is not."""
    way, store = forgetful
    way.loses_next = True
    assert reserve(store) is Grant.TAKEN
    assert reserve(store) is Grant.HELD
    way.loses_next = True
    assert reserve(store, now=NOW + timedelta(minutes=2)) is Grant.LOST
    assert reserve(store, now=NOW + timedelta(minutes=2)) is Grant.HELD


def test_whatever_answer_is_lost_the_step_is_done_once(forgetful: tuple[Forgetful, Store]) -> None:
    """Settling, burying, parking, claiming and deleting."""
    way, store = forgetful

    def lossy(call: Callable[[], Any]) -> Any:
        way.loses_next = True
        found = call()
        assert not way.loses_next
        return found

    reserve(store)
    assert lossy(lambda: store.reservations.settle(Settle(RESERVATION, "w-1", KEEP)))
    lossy(lambda: store.letters.bury(letter(), Settle(RESERVATION, "w-1", KEEP)))
    assert store.letters.stats().total == 1
    held = lossy(lambda: store.letters.claim(["j-1"], now=NOW, seconds=60)).claim
    assert held
    lossy(lambda: store.letters.delete(["j-1"], held))
    assert store.letters.stats().total == 0
    lossy(lambda: store.parked.park(parked(), Settle(RESERVATION, "w-1", KEEP)))
    assert store.parked.count() == 1
    assert lossy(lambda: claim_due(store)).retries == ()
    due = store.parked.claim_due("celery", now=LATER, until=LATER + timedelta(minutes=1), limit=5)
    assert due.retries == (parked(),)


def test_a_server_that_does_not_answer(server: Valkey) -> None:
    """The call fails in time, and no later call gets its answer."""
    store = open_store(server.url + "?socket_timeout=5")  # the server must answer in time before and after
    store.letters.bury(letter())
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(StoreError, match="Timeout reading from"):
            store.letters.stats()
    finally:
        os.kill(server.pid, signal.SIGCONT)
    assert store.letters.get("j-1") == letter()


class Interrupted(BaseException):
    """An exception that a time limit raises at any point of the code."""


def test_an_interrupt_leaves_no_answer_for_the_next_call(server: Valkey, own: Store) -> None:
    """A time limit may strike between a request and its answer."""
    own.letters.bury(letter())

    def strike(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGALRM, strike)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        with pytest.raises(Interrupted):
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            own.letters.stats()
    finally:
        os.kill(server.pid, signal.SIGCONT)
        signal.signal(signal.SIGALRM, before)
    assert own.letters.get("j-1") == letter()


def test_a_full_memory_refuses_a_step_as_a_whole(client: redis.Redis, own: Store) -> None:
    """A refused step changes nothing, and a step that frees memory still works."""
    use_everything(own)
    own.letters.bury(letter("j-8"))
    held = own.letters.claim(["j-8"], now=NOW, seconds=60).claim
    assert held
    due = claim_due(own)
    assert due.retries == (parked("j-3"),)
    before = {key: client.dump(key) for key in client.scan_iter() if "schema" not in key}
    client.config_set("maxmemory", "1mb")
    changes: tuple[Callable[[], object], ...] = (
        lambda: own.letters.bury(letter("j-2", queue="moved"), Settle(Reservation("k-5", 0), "w-1", KEEP)),
        lambda: own.parked.park(parked("j-3", fence=2), Settle(Reservation("k-5", 0), "w-1", KEEP)),
        lambda: own.parked.unclaim(due.retries, due.claim),
        lambda: own.letters.keep_errors("j-9", [(1, entry())]),
        lambda: reserve(own, Reservation("k-6", 0)),
        lambda: own.reservations.settle(Settle(Reservation("k-5", 0), "w-1", KEEP)),
    )
    for change in changes:
        with pytest.raises(StoreError, match=r"^the store 'redis://.* failed: .*maxmemory"):
            change()
    assert {key: client.dump(key) for key in client.scan_iter() if "schema" not in key} == before
    assert own.letters.delete(["j-8"], held)
    assert own.parked.unpark(due.retries, due.claim) == 1
    own.letters.forget_errors("j-9")
    client.config_set("maxmemory", "0")
    own.letters.bury(letter("j-2", queue="moved"))
    assert own.letters.stats().by_queue == {"moved": 1}


def test_a_replica_is_an_error_until_it_is_promoted(client: redis.Redis, own: Store) -> None:
    """After the promotion the store opens a new connection."""
    own.prepare()
    client.replicaof("127.0.0.1", 1)
    with pytest.raises(StoreError, match="read only replica"):
        reserve(own)
    client.replicaof("NO", "ONE")
    assert reserve(own) is Grant.TAKEN


def test_only_reservations_have_an_end(client: redis.Redis, own: Store) -> None:
    """A settled one when it was said, another one a week after its time; by the server's own clock."""
    use_everything(own)
    assert reserve(own, Reservation("k-6", 0)) is Grant.TAKEN
    own.reservations.settle(Settle(Reservation("k-6", 0), "w-1", KEEP))
    ends = {key: client.pexpiretime(key) for key in client.scan_iter()}
    prefix = "ojs:{ojs}:turn:"
    assert {key for key, end in ends.items() if end != -1} == {key for key in ends if key.startswith(prefix)}
    assert ends[prefix + "k-6"] == KEEP.timestamp() * 1000
    assert ends[prefix + "k-5"] == (LATER + timedelta(weeks=1)).timestamp() * 1000
    own.reservations.settle(
        Settle(Reservation("k-6", 0), "w-1", datetime.now(timezone.utc) + timedelta(milliseconds=50))
    )
    eventually(lambda: not client.exists(prefix + "k-6"), what="the end of a settled reservation")


def test_a_retry_parked_again_for_the_same_moment_is_in_every_index(own: Store) -> None:
    """The retry moves to another queue, and its entry in the index by time must stay."""
    own.parked.park(parked(queue="first"))
    own.parked.park(parked(queue="second"))
    for where in (Filter(), Filter(queue="second")):
        assert own.parked.list(where, limit=5, cursor=None).jobs == (parked(queue="second"),)
    assert own.parked.list(Filter(queue="first"), limit=5, cursor=None).jobs == ()
    assert claim_due(own).retries == (parked(queue="second"),)


def test_whose_claim_is_over_may_still_publish(own: Store) -> None:
    """Nobody can move or cancel the retry; only another worker's claim takes it away."""
    own.parked.park(parked("j-1"))
    own.parked.park(parked("j-2", next_retry_at=NOW + timedelta(seconds=1)))
    first = own.parked.claim_due("celery", now=LATER, until=LATER, limit=2)
    assert len(first.retries) == 2
    second = own.parked.claim_due("celery", now=LATER, until=LATER + timedelta(minutes=1), limit=1)
    assert second.retries == (parked("j-1"),)
    for retry in first.retries:
        assert not own.parked.cancel(retry)
        assert not own.parked.reschedule(retry, LATER)
    assert own.parked.unpark(first.retries, first.claim) == 1
    assert own.parked.unpark(second.retries, second.claim) == 1
    assert own.parked.count() == 0


def test_a_deleted_letter_and_a_published_retry_leave_nothing(client: redis.Redis, own: Store) -> None:
    """No index holds them afterwards; only the first death of the letter's group is kept."""
    own.letters.bury(letter(), Settle(RESERVATION, None, KEEP))
    own.letters.bury(letter(queue="second", discarded_at=NOW + timedelta(days=1)))
    held = own.letters.claim(["j-1"], now=NOW, seconds=60).claim
    assert held
    own.letters.delete(["j-1"], held)
    own.parked.park(parked())
    own.parked.park(parked(id="another", queue="second", next_retry_at=NOW - timedelta(days=1)))
    due = claim_due(own)
    assert own.parked.unpark(due.retries, due.claim) == 1
    own.reservations.expire([RESERVATION])
    assert sorted(client.scan_iter()) == ["ojs:{ojs}:letters:first_deaths", "ojs:{ojs}:schema"]


def test_a_cluster_of_one() -> None:
    """All keys of a namespace are in one slot, whatever it is called."""
    with (
        Valkey(cluster_enabled="yes", cluster_port=str(free_port())) as server,
        redis.Redis.from_url(server.url, decode_responses=True) as client,
    ):
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        eventually(lambda: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        for namespace in ("ojs", "{", "}", "a}b", "{a}", "%7B", "é ☃"):
            client.flushall()
            use_everything(open_store(server.url, namespace))
            assert len({client.execute_command("CLUSTER KEYSLOT", key) for key in client.scan_iter()}) == 1


def test_a_cluster_of_two() -> None:
    """A store finds the node that has its keys, from whichever it begins with."""
    names = [f"n-{n}" for n in range(8)]
    with (
        Valkey(cluster_enabled="yes", cluster_port=str(free_port())) as one,
        Valkey(cluster_enabled="yes", cluster_port=str(port := free_port())) as two,
    ):
        clients = [redis.Redis.from_url(server.url, decode_responses=True) for server in (one, two)]
        clients[0].execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
        clients[1].execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", two.port, port)
        for client in clients:
            eventually(lambda client=client: client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        for name in names:
            use_everything(open_store(one.url, name))
            assert open_store(two.url, name).letters.stats().total == 1
        assert all(client.dbsize() for client in clients)


def test_a_unix_socket(tmp_path: Path) -> None:
    """The socket takes the place of host and port."""
    with Valkey(unixsocket="s") as server:
        use_everything(open_store(f"unix://{server.folder}/s"))


def test_namespaces_that_look_alike_are_apart(own: Store, server: Valkey) -> None:
    """Braces in their names make no difference."""
    names = ["a", "{a", "a}", "%7Ba", "a}:letters"]
    for name in names:
        open_store(server.url, name).letters.bury(letter(name))
    found = [
        open_store(server.url, name).letters.list(Filter(), limit=9, cursor=None).letters for name in names
    ]
    assert [[letter.id for letter in letters] for letters in found] == [[name] for name in names]


def test_a_store_of_a_newer_version_is_refused(client: redis.Redis, server: Valkey, own: Store) -> None:
    """Every method refuses it, and the error says what to do."""
    own.prepare()
    client.set("ojs:{ojs}:schema", 2)
    own.letters.bury(letter())
    later = open_store(server.url)
    uses = (
        later.prepare,
        later.letters.stats,
        later.parked.count,
        lambda: reserve(later),
        lambda: later.letters.get("j-1"),
    )
    for use in (*uses, lambda: later.letters.list(Filter(type="a"), limit=1, cursor=None)):
        with pytest.raises(StoreError, match=r"^the store has schema 2, this ojs-bridge reads 1: update it$"):
            use()


def test_a_server_that_may_lose_jobs_is_named(
    client: redis.Redis, server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has one line for each reason, once."""
    open_store(server.url).prepare()
    assert caplog.messages == []
    client.config_set("maxmemory", "100mb")
    client.config_set("maxmemory-policy", "allkeys-lru")
    client.config_set("appendonly", "no")
    store = open_store(server.url)
    store.prepare()
    store.prepare()
    shown = f"the store '{server.url}'"
    assert caplog.messages == [
        f"{shown} may evict what it keeps: set maxmemory-policy noeviction, not allkeys-lru",
        f"{shown} keeps nothing over a restart: set appendonly yes",
    ]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_a_user_who_may_not_see_the_configuration(
    client: redis.Redis, server: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has no warning; the store needs only the namespace's keys and no dangerous command."""
    client.config_set("appendonly", "no")
    rules = ("on", ">s3cr:t", "~ojs:*", "+@all", "-@dangerous")
    client.execute_command("ACL", "SETUSER", "limited", *rules)
    use_everything(open_store(f"redis://limited:s3cr%3At@127.0.0.1:{server.port}/0"))
    assert caplog.messages == []


@pytest.mark.parametrize("credentials", ["limited:s3cr%3At@", ":s3cr%3At@"])
def test_a_wrong_password_is_not_repeated(server: Valkey, credentials: str) -> None:
    """The error names the store without it."""
    store = open_store(f"redis://{credentials}127.0.0.1:{server.port}/0")
    with pytest.raises(StoreError, match=r"^the store 'redis://\*\*\*@127") as error:
        store.prepare()
    assert "s3cr" not in str(error.value)


@pytest.mark.parametrize("scheme", ["redis", "rediss", "valkey", "valkeys"])
def test_a_server_out_of_reach(scheme: str) -> None:
    """Every method says so, without the password."""
    store = open_store(f"{scheme}://ojs:s3cr%3At@127.0.0.1:1/0")
    for use in (
        store.prepare,
        store.letters.stats,
        lambda: store.letters.bury(letter()),
        lambda: reserve(store),
    ):
        with pytest.raises(StoreError, match=rf"^the store '{scheme}://\*\*\*@127.* failed: ") as error:
            use()
        assert "s3cr" not in str(error.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:s3cr:t/p@ss@h:1/0",
        "redis://u:s3cr@t/p@ss@h:1/0",
        "redis://h:port/0",
        "redis://h/name",
        "redis://h/0?no_such_option=1",
        "redis://h/0?socket_timeout=soon",
        "rediss://h/0?ssl_cert_reqs=perhaps",
    ],
)
def test_a_url_that_is_none(url: str) -> None:
    """`open_store` names the URL, without its password."""
    with pytest.raises(ConfigurationError, match=r"^store: 'rediss?://.*' is not a Redis URL") as error:
        open_store(url)
    assert not any(part in str(error.value) for part in ("s3cr", "p@ss"))


def test_connections_are_as_many_as_callers(client: redis.Redis, own: Store) -> None:
    """The number of calls makes no difference."""
    with ThreadPoolExecutor(16) as pool:
        grants = list(pool.map(lambda n: reserve(own, Reservation(f"k-{n}", 0)), range(2_000)))
    assert grants == [Grant.TAKEN] * 2_000
    assert len(client.client_list()) <= 17
    own.close()
    eventually(lambda: len(client.client_list()) == 1, what="the end of the connections")


def test_a_forked_child_uses_no_connection_of_its_parent(client: redis.Redis, own: Store) -> None:
    """The child does not close the connection, either."""
    own.letters.bury(letter())
    before = {found["id"] for found in client.client_list()}
    assert in_processes(3, lambda: own.letters.get("j-1") == letter()) == [True] * 3
    assert own.letters.get("j-1") == letter()
    # The server may not have noticed yet that the children's connections have ended.
    eventually(lambda: {found["id"] for found in client.client_list()} == before)


@pytest.mark.parametrize("fence", [-1, 2**53 + 1, 2**70])
def test_a_fence_that_lua_cannot_count(own: Store, fence: int) -> None:
    """Such a fence raises a StoreError."""
    reservation = Reservation("k", fence)
    for use in (
        lambda: reserve(own, reservation),
        lambda: own.reservations.settle(Settle(reservation, None, KEEP)),
    ):
        with pytest.raises(StoreError, match=r"^fence: "):
            use()
