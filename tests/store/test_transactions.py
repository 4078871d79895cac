"""Jobs that are written in a user's own transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from ojs_bridge import ConfigurationError, NotInTransaction, StoreError, open_store
from ojs_bridge.store import Filter, Store
from tests.conftest import store_url
from tests.store.conftest import grant_to, run
from tests.store.test_parked import FRAMEWORK, after, parked
from tests.transactions import (
    HAS_DJANGO,
    WAYS,
    Begin,
    Undone,
    atomic,
    django_alias,
    fail,
    of_psycopg,
    savepoint,
)

EVERYTHING = Filter()
needs_django = pytest.mark.skipif(not HAS_DJANGO, reason="needs Django")
ON_SQLITE_ALONE = ("sqlalchemy-sqlite", "session-sqlite")


@pytest.fixture(params=[*WAYS])
def way(request: pytest.FixtureRequest) -> tuple[str, Begin]:
    """The URL of an empty store, and a way to a transaction on its database."""
    kind, begin = WAYS[request.param]
    return store_url(kind, request), begin


@pytest.fixture
def url(way: tuple[str, Begin]) -> str:
    """The URL of the store."""
    return way[0]


@pytest.fixture
def begin(way: tuple[str, Begin]) -> Begin:
    """The way to a transaction."""
    return way[1]


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    """The store; its tables are there, as a worker makes them."""
    store = open_store(url)
    store.prepare()
    yield store
    store.close()


def names(store: Store) -> list[str]:
    """The ids of the jobs that wait."""
    return [each.id for each in store.parked.list(EVERYTHING, limit=100, cursor=None).jobs]


def test_a_job_is_there_once_its_transaction_has_committed(store: Store, url: str, begin: Begin) -> None:
    with begin(url) as given:
        store.join(given).park(parked("j-1", key="j-1#own", fence=0))
        store.join(given).park(parked("j-2", fence=0))
        assert names(store) == []
    assert names(store) == ["j-1", "j-2"]
    assert store.parked.get("j-1") == parked("j-1", key="j-1#own", fence=0)
    due = store.parked.claim_due(FRAMEWORK, now=after(1), until=after(60), limit=10)
    assert [each.key for each in due.retries] == ["j-1#own", "j-2"]


def test_a_job_whose_transaction_is_rolled_back_was_never_there(store: Store, url: str, begin: Begin) -> None:
    with suppress(Undone), begin(url) as given:
        store.join(given).park(parked())
        raise Undone
    assert names(store) == []


def test_a_savepoint_takes_its_jobs_with_it(store: Store, url: str, begin: Begin) -> None:
    with begin(url) as given:
        store.join(given).park(parked("before"))
        with savepoint(given):
            store.join(given).park(parked("within"))
            raise Undone
        with savepoint(given):
            store.join(given).park(parked("kept"))
    assert sorted(names(store)) == ["before", "kept"]


def test_a_second_job_of_a_key_is_refused_and_does_not_take_the_place_of_the_first(
    store: Store, url: str, begin: Begin
) -> None:
    with begin(url) as given:
        store.join(given).park(parked("j-1", queue="first"))
        with pytest.raises(StoreError, match="job j-1 is not in the transaction: another one waits under"):
            store.join(given).park(parked("j-1", queue="second"))
    assert [each.queue for each in store.parked.list(EVERYTHING, limit=9, cursor=None).jobs] == ["first"]


def test_a_transaction_on_another_database_is_refused(
    store: Store, begin: Begin, request: pytest.FixtureRequest, tmp_path: Any
) -> None:
    if store.is_on_one_host:
        other = f"sqlite:///{tmp_path}/other.db"
    else:
        other = request.getfixturevalue("postgres_url")
    for is_store in (False, True):  # without the tables of a store, and with those of another store
        if is_store:
            another = open_store(other)
            another.prepare()
            another.close()
        with begin(other) as given:
            with pytest.raises(NotInTransaction, match="does not see the tables of the store"):
                store.join(given)
            # It can still be used.
            with savepoint(given):
                pass


def test_an_open_transaction_of_another_kind_of_database_is_refused(postgres_url: str, tmp_path: Any) -> None:
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    with of_psycopg(postgres_url) as given, pytest.raises(NotInTransaction, match="does not see the tables"):
        store.join(given)


@pytest.mark.parametrize("kind", ["postgres", "sqlite"])
def test_a_connection_that_commits_by_itself_is_refused(kind: str, request: pytest.FixtureRequest) -> None:
    url = store_url(kind, request)
    store = open_store(url)
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection, pytest.raises(NotInTransaction, match="no transaction is open"):
        store.join(connection)
    engine.dispose()
    if HAS_DJANGO:
        with django_alias(url) as alias, pytest.raises(NotInTransaction, match="no transaction is open"):
            store.join(alias)
    if kind == "postgres":
        plain = url.replace("+psycopg", "")
        with (
            psycopg.connect(plain, autocommit=True) as given,
            pytest.raises(NotInTransaction, match="no transaction is open"),
        ):
            store.join(given)
    assert names(store) == []


# A statement that fails ends no transaction of SQLite's.
@pytest.mark.parametrize("way", [name for name in WAYS if name not in ON_SQLITE_ALONE], indirect=True)
def test_a_transaction_that_has_failed_is_refused(store: Store, url: str, begin: Begin) -> None:
    with suppress(Undone), begin(url) as given:
        fail(given)
        with pytest.raises(NotInTransaction, match="the transaction has failed"):
            store.join(given)
        raise Undone
    assert names(store) == []


def test_a_role_that_may_not_write_to_the_store_is_told(postgres_url: str, role: str) -> None:
    store = open_store(postgres_url)
    store.prepare()
    with (
        pytest.raises(StoreError, match="permission denied for table ojs_parked"),
        of_psycopg(postgres_url.replace("ojs@", f"{role}@")) as given,
    ):
        store.join(given).park(parked())
    run(postgres_url, grant_to(role))
    with of_psycopg(postgres_url.replace("ojs@", f"{role}@")) as given:
        store.join(given).park(parked())
    assert names(store) == ["j-1"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (7, "builtins.int is not a connection or session of psycopg, SQLAlchemy or Django"),
        (None, "builtins.NoneType is not"),
    ],
)
def test_what_is_no_connection_is_refused(given: Any, why: str, tmp_path: Any) -> None:
    with pytest.raises(NotInTransaction, match=why):
        open_store(f"sqlite:///{tmp_path}/ojs.db").join(given)


@needs_django
def test_an_alias_that_django_does_not_know_is_refused(tmp_path: Any) -> None:
    url = f"sqlite:///{tmp_path}/ojs.db"
    with django_alias(url), pytest.raises(NotInTransaction, match="The connection 'nowhere' doesn't exist"):
        open_store(url).join("nowhere")


@pytest.mark.skipif(HAS_DJANGO, reason="Django is there")
def test_an_alias_is_refused_without_django(tmp_path: Any) -> None:
    with pytest.raises(NotInTransaction, match="No module named 'django'"):
        open_store(f"sqlite:///{tmp_path}/ojs.db").join("default")


def test_a_store_in_redis_refuses_every_connection(valkey_url: str) -> None:
    with pytest.raises(ConfigurationError, match="ojs_in: the store is of the kind 'redis'"):
        open_store(valkey_url).join("default")


@needs_django
def test_django_says_in_which_transaction_a_thread_is(store: Store, url: str) -> None:
    assert store.joined() is None
    with django_alias(url) as alias:
        assert store.joined() is None
        with atomic(alias):
            joined = store.joined()
            assert joined is not None
            joined.park(parked())
            calls: list[str] = []
            assert joined.then(lambda: calls.append("committed"))
            assert (names(store), calls) == ([], [])
        assert (names(store), calls) == (["j-1"], ["committed"])


def test_a_connection_may_write_and_read_in_its_own_way(postgres_url: str) -> None:
    """In a pipeline, with rows as dictionaries, with parameters that the client writes, and in asyncio."""
    store, plain = open_store(postgres_url), postgres_url.replace("+psycopg", "")
    store.prepare()
    with psycopg.connect(plain) as given, given.pipeline():
        store.join(given).park(parked("in a pipeline"))
    odd: dict[str, Any] = {"row_factory": psycopg.rows.dict_row, "cursor_factory": psycopg.ClientCursor}
    with psycopg.connect(plain, **odd) as given:
        store.join(given).park(parked("odd"))

    async def send() -> None:
        engine = create_async_engine(postgres_url)
        async with AsyncSession(engine) as session, session.begin():
            await session.run_sync(lambda given: store.join(given).park(parked("in asyncio")))
        await engine.dispose()

    asyncio.run(send())
    assert sorted(names(store)) == ["in a pipeline", "in asyncio", "odd"]
