"""A store that answers in time or is an error, on connections that stay open and carry nothing any more."""

from __future__ import annotations

import os
import resource
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, StorageRetry, StoreError, open_store
from ojs_bridge.engine.runs import Postpone
from ojs_bridge.store import Grant, Store
from ojs_bridge.store.sql import SQLStore, engines
from tests.conftest import store_url
from tests.engine.test_reservations import JOB, begin, run
from tests.lives import FRAMEWORK, Outbox
from tests.servers import Proxy, eventually
from tests.store.test_parked import parked
from tests.store.test_reservations import over, reserve
from tests.store.test_store import letter

PATIENCE = 2.0
#: Seconds in which a loaded machine must be done with PATIENCE and a new connection.
ENOUGH = 45.0
#: Long enough for three beats of the heart, of which one finds the connection silent.
RESERVATION = timedelta(seconds=15)


@pytest.fixture(params=["postgres", "valkey"])
def way(request: pytest.FixtureRequest) -> Iterator[tuple[Proxy, str, str]]:
    """A way to an empty store, its URL on that way, and its own URL."""
    url = store_url(request.param, request)
    with Proxy(request.getfixturevalue(request.param).port) as proxy:
        yield proxy, proxy.to(url), url


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what a call returns; raises TimeoutError for one that goes on for longer."""
    found: list[Any] = []

    def carry_out() -> None:
        try:
            found.append(call())
        except StoreError as error:
            found.append(error)

    thread = threading.Thread(target=carry_out, daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise TimeoutError(f"no answer within {seconds:g} s")
    if isinstance(found[0], StoreError):
        raise found[0]
    return found[0]


def test_a_silent_connection_is_an_error_in_time(way: tuple[Proxy, str, str]) -> None:
    """There is one error only: the store drops its other connections of that time without asking them."""
    proxy, url, _ = way
    store = open_store(url, patience=PATIENCE)
    asks = store.letters.stats
    meet = threading.Barrier(4)

    def ask_together() -> None:
        meet.wait(ENOUGH)
        asks()

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ask_together) for _ in range(4)]:
            done.result()
    for _ in range(2):
        assert proxy.silence()
        with pytest.raises(StoreError, match=r"(?i)no answer within 2 s|timeout"):
            within(ENOUGH, asks)
        began = time.monotonic()
        within(ENOUGH, lambda: [asks() for _ in range(4)])
        assert time.monotonic() - began < 4 * PATIENCE
    store.close()


@pytest.mark.requirement("RET-13")
def test_a_worker_goes_on_over_a_silent_connection(way: tuple[Proxy, str, str]) -> None:
    """A new connection extends the reservations before they run out, and the scheduler publishes."""
    proxy, through, url = way
    worker, other = Bridge(through, reservation=RESERVATION), Bridge(url, reservation=RESERVATION)
    outbox = Outbox()
    worker.engine.context.publishers[FRAMEWORK] = outbox
    begun = run(worker, JOB)
    worker.start()
    eventually(lambda: within(ENOUGH, worker.retries.count) == 0)
    assert proxy.silence()
    assert other.store is not None
    other.store.parked.park(parked("due", framework=FRAMEWORK, next_retry_at=other.engine.now()))
    ends = time.monotonic() + 1.5 * RESERVATION.total_seconds()
    while time.monotonic() < ends:
        assert isinstance(begin(other, JOB), Postpone)
        time.sleep(0.2)
    # A claim whose answer was lost in the silence lasts for a minute.
    eventually(lambda: other.retries.count() == 0, seconds=90, what="the parked retry was published")
    worker.engine.settling.check(begun)
    worker.stop()


def test_a_client_that_went_silent_within_a_transaction_holds_no_lock_for_long(
    postgres_url: str, request: pytest.FixtureRequest
) -> None:
    """By default the server would keep the lock for hours."""
    with Proxy(request.getfixturevalue("postgres").port) as proxy:
        silent, store = open_store(proxy.to(postgres_url), patience=PATIENCE), open_store(postgres_url)
        assert isinstance(silent, SQLStore)
        reserve(store)
        gone = threading.Event()

        def hold_a_lock() -> None:
            with pytest.raises(StoreError), silent.connection(durable=True) as connection:
                connection.exec_driver_sql("UPDATE ojs_reservations SET mark = ''")
                proxy.silence()
                gone.set()

        thread = threading.Thread(target=hold_a_lock, daemon=True)
        thread.start()
        assert gone.wait(ENOUGH)
        eventually(lambda: settles(store), seconds=ENOUGH, what="the lock was released")
        thread.join(ENOUGH)
        assert not thread.is_alive()


def settles(store: Store) -> bool:
    try:
        return bool(within(ENOUGH, lambda: store.reservations.settle(over())))
    except StoreError:
        return False


def test_a_busy_file_is_an_error_in_time(tmp_path: Path) -> None:
    """Long before a reservation of a minute ends."""
    store = open_store(f"sqlite:///{tmp_path}/ojs.db", patience=PATIENCE)
    assert reserve(store).grant is Grant.TAKEN
    with closing(sqlite3.connect(tmp_path / "ojs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="locked"):
            within(ENOUGH, lambda: store.reservations.settle(over()))
        other.execute("ROLLBACK")
    assert store.reservations.settle(over())


def test_the_threads_of_a_process_wait_for_a_busy_file_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the threads waited one after the other, the last one would lose its reservation."""
    monkeypatch.setattr(engines, "_BUSY_SECONDS", 1.0)
    store = open_store(f"sqlite:///{tmp_path}/ojs.db", patience=0.5)
    assert reserve(store).grant is Grant.TAKEN
    with closing(sqlite3.connect(tmp_path / "ojs.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        began = time.monotonic()
        with ThreadPoolExecutor(20) as pool:
            asked = [pool.submit(store.reservations.settle, over()) for _ in range(20)]
            errors = [str(question.exception(ENOUGH)) for question in asked]
        assert time.monotonic() - began < 15
    assert any("other threads of this process have kept it busy for 1 s" in error for error in errors)


@pytest.mark.parametrize(("reservation", "seconds"), [("PT1M", 10.0), ("PT15S", 5.0), ("PT3S", 2.0)])
def test_a_store_is_waited_for_within_a_reservation(
    reservation: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    monkeypatch.setattr("ojs_bridge.config.settings.open_store", lambda *_, patience: asked.append(patience))
    Bridge("redis://nowhere", reservation=reservation)
    assert asked == [seconds]


def test_a_thread_waits_for_a_free_connection_in_time() -> None:
    """SQLAlchemy itself waits for half a minute, which is longer than a reservation may be."""
    database: Any = open_store("postgresql+psycopg://h/db", patience=PATIENCE)
    assert [engine.pool.timeout() for engine in (database._quick, database._durable)] == [PATIENCE] * 2
    assert database._quick.pool is database._durable.pool, (
        "they share the connections that the page on stores counts"
    )
    assert (database._quick.pool.size(), database._quick.pool._max_overflow) == (15, 0)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg://h/db?connect_timeout=7&tcp_user_timeout=70&keepalives_idle=77",
        "redis://h?socket_timeout=7",
    ],
)
def test_what_a_url_says_of_time_counts(url: str) -> None:
    store: Any = open_store(url)
    if isinstance(store, SQLStore):
        given = store._quick.dialect.create_connect_args(store._quick.url)[1]
        assert [given[name] for name in ("connect_timeout", "tcp_user_timeout")] == ["7", "70"]
    else:
        assert store._topology.options["socket_timeout"] == 7


@contextmanager
def no_descriptor_left() -> Iterator[None]:
    """Have this process open nothing more: no file, no socket, no selector."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    highest = max(int(each.name) for each in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for each in taken:
            os.close(each)


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("kind", ["sqlite", "postgres", "valkey"])
def test_a_process_without_descriptors_asks_on_and_what_it_cannot_open_is_an_outage(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """No error of the operating system reaches the engine: it would take it for the job's own.

    The process is a new one: in this one a thread that an earlier test has left may close a file meanwhile.
    """
    with ProcessPoolExecutor(1, get_context("forkserver")) as process:
        process.submit(ask_without_descriptors, store_url(kind, request)).result(90)


def ask_without_descriptors(url: str) -> None:
    """Ask over an open connection, and over one that cannot be opened."""
    connected = Bridge(url, storage_retry=StorageRetry.disabled())
    run(connected, JOB)
    unconnected = Bridge(url, storage_retry=StorageRetry.disabled())
    assert unconnected.store is not None
    with no_descriptor_left():
        assert isinstance(begin(connected, JOB), Postpone)
        for _ in range(2):
            with pytest.raises(StoreError):
                begin(unconnected, JOB)
            with pytest.raises(StoreError):
                unconnected.store.letters.bury(letter())
    assert isinstance(begin(unconnected, JOB), Postpone)
