"""A PostgreSQL store behind PgBouncer, which gives each transaction another session (transaction pooling)."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psycopg
import pytest

from ojs_bridge import StoreError, open_store
from ojs_bridge.store import Grant
from ojs_bridge.store.protocol import Filter
from tests.servers import PgBouncer, Postgres, eventually
from tests.store.test_parked import parked
from tests.store.test_reservations import after, over, reserve
from tests.store.test_store import letter

CLIENTS, ROUNDS, ASKED = 8, 12, 3
WAITING = """
select count(*) from pg_stat_activity
where datname = current_database() and wait_event_type = 'Lock'
"""


@pytest.fixture(scope="module")
def pgbouncer(postgres: Postgres) -> Iterator[PgBouncer]:
    """A pool of three sessions of the session's PostgreSQL."""
    with PgBouncer(postgres) as server:
        yield server


def use(url: str, client: int) -> list[str]:
    """Ask a store everything that a worker asks, often enough for a statement to be prepared."""
    found = []
    with closing(open_store(url)) as store:
        for n in range(ROUNDS):
            key = f"{client}-{n}"
            assert reserve(store, key=key).grant is Grant.TAKEN
            assert not store.reservations.extend([over(key=key).reservation], holder="w-1", until=after(60))
            assert store.letters.bury(letter(key), over(key=key))
            store.parked.park(parked(key, framework=f"f-{client}"))
            store.letters.keep_errors(key, [(0, {"attempt": 1})])
            assert store.letters.kept_errors(key) == [(0, {"attempt": 1})]
            due = store.parked.claim_due(f"f-{client}", now=after(1), until=after(61), limit=9)
            assert [each.id for each in due.retries] == [key]
            assert store.letters.get(key) == letter(key)
            found = [each.id for each in store.letters.list(Filter(), limit=200, cursor=None).letters]
    return found


def test_clients_of_a_pool_share_no_statement_and_no_setting(pgbouncer: PgBouncer, postgres_url: str) -> None:
    """Under the same name each client would prepare a statement of its own in the same session."""
    url = pgbouncer.to(postgres_url)
    open_store(url).prepare()
    with ThreadPoolExecutor(CLIENTS) as pool:
        found = max(pool.map(use, [url] * CLIENTS, range(CLIENTS)), key=len)
    assert len(found) == CLIENTS * ROUNDS
    plain = url.replace("+psycopg", "")
    for _ in range(3):
        with psycopg.connect(plain, prepare_threshold=None, autocommit=True) as session:
            ask = "select (select count(*) from pg_prepared_statements), current_setting('lock_timeout')"
            assert session.execute(ask).fetchone() == (0, "0")


def test_a_direct_connection_prepares_what_it_asks_often(postgres_url: str) -> None:
    """That halves the server's work."""
    with closing(open_store(postgres_url)) as store:
        for n in range(ROUNDS):
            reserve(store, key=str(n))
        with store.connection() as connection:  # type: ignore[attr-defined]
            asked = connection.exec_driver_sql("select count(*) from pg_prepared_statements").scalar_one()
    assert asked


def test_what_the_server_has_forgotten_is_prepared_again(postgres_url: str) -> None:
    """psycopg itself has it forget all that is prepared, after some errors."""
    with closing(open_store(postgres_url)) as store:
        for n in range(3):
            assert reserve(store, key=str(n)).grant is Grant.TAKEN
            with store.connection() as connection:  # type: ignore[attr-defined]
                connection.exec_driver_sql("deallocate all")
        assert reserve(store, key="last").grant is Grant.TAKEN


class Struck(BaseException):
    """A time limit."""


def strike(*_: object) -> None:
    raise Struck


@pytest.mark.parametrize("way", ["directly", "through the pool"])
def test_a_locked_table_does_not_fill_the_server(pgbouncer: PgBouncer, postgres_url: str, way: str) -> None:
    """A session that waits for a lock does not notice that its client is gone."""
    url = postgres_url if way == "directly" else pgbouncer.to(postgres_url)
    store = open_store(url, patience=1)
    store.prepare()

    def ask(client: int) -> None:
        for n in range(ASKED):
            with pytest.raises(StoreError, match="no answer within 1 s"):
                reserve(store, key=f"{client}-{n}")

    plain = postgres_url.replace("+psycopg", "")
    with closing(psycopg.connect(plain)) as other, closing(psycopg.connect(plain, autocommit=True)) as watch:
        other.execute("lock table ojs_reservations")
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(ask, range(3)))
        before = signal.signal(signal.SIGALRM, strike)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.5)
            with pytest.raises(Struck):
                reserve(store)
        finally:
            signal.signal(signal.SIGALRM, before)
        eventually(lambda: watch.execute(WAITING).fetchone() == (0,), seconds=10)
        other.rollback()
    assert reserve(store).grant is Grant.TAKEN
    store.close()
