"""The tables of the stores in SQL databases, and their version."""

from __future__ import annotations

import os
import random
import stat
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa

from ojs_bridge import Bridge, StoreError, open_store
from ojs_bridge.engine.runs import Postpone
from ojs_bridge.errors import Unstorable
from ojs_bridge.store import Filter, Grant, Reservation, Settle, Store
from ojs_bridge.store.sql.engines import REST_SECONDS
from tests.engine.test_reservations import JOB, begin, run
from tests.servers import Postgres
from tests.store.conftest import grant_to
from tests.store.conftest import run as execute
from tests.store.processes import in_processes
from tests.store.test_groups import groups
from tests.store.test_parked import keys, parked
from tests.store.test_reservations import FIRST, NOW, after, over, reserve
from tests.store.test_store import letter


def test_many_processes_create_the_tables_at_once(sql_url: str) -> None:
    """Each process can use the store."""
    found = in_processes(6, first_use, sql_url)
    assert sorted(found) == [1, 1, 1, 1, 1, 1]


def first_use(sql_url: str) -> int:
    """Use a store that nobody has used before, and count what it says of its version."""
    store = open_store(sql_url)
    store.prepare()
    store.letters.bury(letter(str(os.getpid())))
    with sa.create_engine(sql_url).connect() as connection:
        return connection.execute(sa.text("select count(*) from ojs_schema")).scalar_one()


def test_a_store_is_created_whole_or_not_at_all(sql_url: str) -> None:
    """What breaks off leaves no table without its indexes, which nobody would add later."""
    engine = sa.create_engine(sql_url)
    with engine.begin() as connection:
        connection.execute(sa.text("create table ojs_parked_due (mine integer)"))  # the name of an index
    with pytest.raises(StoreError, match="ojs_parked_due"):
        open_store(sql_url).prepare()
    assert sa.inspect(engine).get_table_names() == ["ojs_parked_due"]
    with engine.begin() as connection:
        connection.execute(sa.text("drop table ojs_parked_due"))
    open_store(sql_url).prepare()
    assert found_versions(sql_url) == [1]
    assert len(sa.inspect(sa.create_engine(sql_url)).get_indexes("ojs_parked")) == 3


def test_a_store_of_a_newer_version_is_refused(sql_url: str) -> None:
    """Every method refuses it, and the error says what to do."""
    store = open_store(sql_url)
    store.prepare()
    with sa.create_engine(sql_url).begin() as connection:
        connection.execute(sa.text("insert into ojs_schema values (2)"))
    store.letters.bury(letter())
    later = open_store(sql_url)
    for use in (later.prepare, later.letters.stats, lambda: later.letters.bury(letter())):
        with pytest.raises(StoreError, match=r"^the store has schema 2, this ojs-bridge reads 1: update it$"):
            use()


def test_an_error_says_nothing_of_a_jobs_arguments(sql_url: str) -> None:
    """The arguments may be secret, and the error goes to the log."""
    store = open_store(sql_url)
    store.letters.bury(letter())
    with sa.create_engine(sql_url).begin() as connection:
        connection.execute(sa.text("drop table ojs_dead_letters"))
    with pytest.raises(StoreError) as error:
        store.letters.bury(letter(message={"args": ["4111-1111"]}))
    assert "4111" not in str(error.value)
    assert "4111" not in str(error.value.__cause__)


def found_versions(url: str) -> list[int]:
    """Read what a store says of its version."""
    with sa.create_engine(url).connect() as connection:
        return list(connection.execute(sa.text("select version from ojs_schema")).scalars())


def test_a_newer_store_is_left_as_it_is(sql_url: str) -> None:
    """No table is added."""
    engine = sa.create_engine(sql_url)
    with engine.begin() as connection:
        connection.execute(sa.text("create table ojs_schema (version integer not null primary key)"))
        connection.execute(sa.text("insert into ojs_schema values (2)"))
    with pytest.raises(StoreError, match="has schema 2"):
        reserve(open_store(sql_url))
    assert sa.inspect(engine).get_table_names() == ["ojs_schema"]


@pytest.fixture
def sql_store(sql_url: str) -> Iterator[Store]:
    """An empty store of each kind that speaks SQL."""
    store = open_store(sql_url)
    yield store
    store.close()


def test_old_records_are_swept_a_few_at_a_time(sql_store: Store) -> None:
    """Settled records go when their time is over, and abandoned records after a week."""
    for n in range(25):
        sql_store.reservations.settle(over(key=f"settled-{n}"))
    reserve(sql_store, key="live")

    def swept(now: datetime) -> list[int]:
        return [sql_store.reservations.expire_before(now, limit=10) for _ in range(6)]

    assert sum(swept(after(3599))) == 0
    few = swept(after(3600))
    assert (sum(few), max(few)) == (25, 10)
    assert reserve(sql_store, key="settled-0").grant is Grant.TAKEN
    week = timedelta(weeks=1)
    assert sum(swept(after(60) + week - timedelta(milliseconds=1))) == 0
    assert reserve(sql_store, key="live", at=1).grant is Grant.HELD
    assert sum(swept(after(60) + week)) == 2


def test_no_stream_of_new_records_keeps_a_sweep_from_old_ones(sql_store: Store) -> None:
    """Ids may grow with the time, and jobs may come faster than the records of one kind are looked at."""
    for n in range(20):
        sql_store.reservations.settle(over(key=f"mail-{n:04}"))
        sql_store.reservations.settle(over(key=f"sms-{n:04}"))
    swept = 0
    for step in range(20):
        for n in range(15):
            sql_store.reservations.settle(
                Settle(Reservation(f"mail-{100 * step + n + 1000}", 0), FIRST, after(7200))
            )
        swept += sql_store.reservations.expire_before(after(3600), limit=10)
    assert swept == 40


def sweep(url: str) -> int:
    """Sweep twice through 500 records, and return how many were over."""
    store = open_store(url)
    return sum(store.reservations.expire_before(after(3600), limit=50) for _ in range(2 * 11))


def test_many_workers_sweep_at_once(sql_url: str, sql_store: Store) -> None:
    """Each record is counted once, and no worker fails."""
    for n in range(500):
        sql_store.reservations.settle(over(key=f"j-{n}"))
    swept = in_processes(4, sweep, sql_url)
    assert sum(swept) + sweep(sql_url) == 500


def test_nothing_is_written_by_halves(sql_url: str, sql_store: Store) -> None:
    """Without its reservation, neither a letter nor a parked retry is written. A lost table is made anew."""
    for write in (
        lambda: sql_store.letters.bury(letter(), over()),
        lambda: sql_store.parked.park(parked(), over()),
    ):
        sql_store.prepare()
        with sa.create_engine(sql_url).begin() as connection:
            connection.execute(sa.text("drop table ojs_reservations"))
        with pytest.raises(StoreError):
            write()
    assert sql_store.letters.get("j-1") is None
    assert keys(sql_store) == []


@pytest.mark.parametrize("fence", [2**63, 2**80, -(2**80)])
def test_a_fence_that_no_database_has(sql_store: Store, fence: int) -> None:
    """Such a fence comes from a damaged header, and raises a StoreError."""
    for use in (lambda: reserve(sql_store, fence), lambda: sql_store.reservations.settle(over(fence))):
        with pytest.raises(StoreError):
            use()


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    """The error names the file, whatever the reason."""
    made, garbage = tmp_path / "made.db", tmp_path / "garbage.db"
    open_store(f"sqlite:///{made}").prepare()
    garbage.write_bytes(b"no database" * 1000)
    for url in (f"sqlite:///file:{made}?mode=ro&uri=true", f"sqlite:///{garbage}", f"sqlite:///{tmp_path}"):
        with pytest.raises(StoreError, match=str(tmp_path)):
            reserve(open_store(url))
        with pytest.raises(StoreError, match=str(tmp_path)):
            open_store(url).letters.bury(letter())


def test_a_server_that_was_restarted_meanwhile() -> None:
    """A connection that has rested is replaced without anybody noticing; all the others are with it."""
    with Postgres() as server:
        store = open_store(server.url)
        assert reserve(store).grant is Grant.TAKEN
        server.kill()
        with pytest.raises(StoreError):
            reserve(store)
        server.start()
        time.sleep(REST_SECONDS + 0.1)
        told = store.reservations.reserve(
            Reservation("j-1", 0), publication="p-1", holder="w-2", mark="m-2", now=NOW, until=after(60)
        )
        assert told.grant is Grant.HELD
        server.restart()
        time.sleep(REST_SECONDS + 0.1)
        store.letters.bury(letter(), over())
        assert reserve(store).grant is Grant.SETTLED
        store.close()


@pytest.fixture
def database(postgres: Postgres, unique: str, request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a database of another encoding than UTF-8."""
    postgres.execute(f"CREATE DATABASE {unique} ENCODING '{request.param}' TEMPLATE template0")
    yield postgres.url_of(unique)
    postgres.execute(f"DROP DATABASE {unique} WITH (FORCE)")


FOREIGN = JOB._replace(id="\u0437\u0430\u043a\u0430\u0437-1")


@pytest.mark.parametrize("database", ["SQL_ASCII"], indirect=True)
def test_a_database_without_an_encoding_keeps_every_text(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The client writes and reads it as UTF-8; otherwise it would get bytes, which it takes for no text."""
    bridge = Bridge(database)
    run(bridge, FOREIGN)
    assert isinstance(begin(Bridge(database), FOREIGN), Postpone)
    assert bridge.store is not None
    bridge.store.letters.bury(letter(FOREIGN.id, type=FOREIGN.id))
    found = bridge.dead_letters.list(type=FOREIGN.id).letters
    assert [each.id for each in found] == [FOREIGN.id]
    assert caplog.text.count("has the encoding SQL_ASCII: a job whose id") == 2


@pytest.mark.parametrize("database", ["LATIN1"], indirect=True)
def test_a_job_whose_id_a_database_lacks_is_refused_at_once_and_the_others_live_on(database: str) -> None:
    """If its reservation were released later, again and again, no other would be extended any more."""
    bridge, other = Bridge(database, reservation="PT3S"), Bridge(database, reservation="PT3S")
    run(bridge, JOB)
    with pytest.raises(Unstorable, match="LATIN1"):
        begin(bridge, FOREIGN)
    began = time.monotonic()
    while time.monotonic() - began < 5:
        assert isinstance(begin(other, JOB), Postpone)
        time.sleep(0.2)


def test_what_no_index_can_hold_is_the_letters_own_fault(postgres_url: str) -> None:
    """The text cannot be compressed, and its type, its queue and its error are longer than a page allows."""
    store, digits = open_store(postgres_url), random.Random(7)
    long = ["".join(chr(digits.randrange(0x20000, 0x2A000)) for _ in range(255)) for _ in range(3)]
    with pytest.raises(Unstorable, match="index row"):
        store.letters.bury(
            letter(type=long[0], queue=long[1], errors=({**letter().errors[0], "type": long[2]},))
        )
    store.letters.bury(letter("another"))
    assert reserve(store).grant is Grant.TAKEN


@pytest.mark.parametrize("encoding", ["utf8", "latin1"])
def test_a_run_is_found_again_whatever_encoding_the_url_chooses(postgres_url: str, encoding: str) -> None:
    """One statement writes its key in libpq's way, and others in psycopg's."""
    store = open_store(f"{postgres_url}&client_encoding={encoding}")
    assert reserve(store, key="caf\xe9").grant is Grant.TAKEN
    known = over(key="caf\xe9").reservation
    assert store.reservations.extend([known], holder="w-1", until=after(60)) == []
    with closing(open_store(postgres_url)) as other:
        assert reserve(other, key="caf\xe9", holder="w-2").grant is Grant.HELD
    assert store.reservations.settle(over(key="caf\xe9"))


def test_a_reservation_is_written_by_the_driver_alone(sql_url: str) -> None:
    """SQLAlchemy would take most of the time."""
    store, asked = open_store(sql_url), list[str]()
    store.prepare()
    engine = store._quick  # type: ignore[attr-defined]
    sa.event.listen(engine, "before_cursor_execute", lambda *args: asked.append(args[2]))
    assert reserve(store).grant is Grant.TAKEN
    assert store.reservations.settle(over())
    assert asked == []
    assert reserve(store).grant is Grant.SETTLED
    assert asked


def test_of_the_connections_that_a_server_has_ended_one_is_an_error(postgres_url: str) -> None:
    """The others are replaced at once, before they have rested long enough to be tested."""
    store = open_store(postgres_url)
    store.prepare()
    pool = store._quick.pool  # type: ignore[attr-defined]
    with closing(psycopg.connect(postgres_url.replace("+psycopg", ""), autocommit=True)) as other:
        borrowed = [pool.connect() for _ in range(4)]
        for each in borrowed:
            each.close()
        mine = "datname = current_database() and pid <> pg_backend_pid()"
        other.execute(f"select pg_terminate_backend(pid, 9999) from pg_stat_activity where {mine}")
    with pytest.raises(StoreError, match="terminat"):
        reserve(store)
    for n in range(4):
        assert reserve(store, key=f"{n}").grant is Grant.TAKEN


def test_threads_that_ask_at_once_keep_their_connections(postgres_url: str) -> None:
    """To open one takes longer than a job."""
    store, asking = open_store(postgres_url), threading.Barrier(12)
    pool = store._quick.pool  # type: ignore[attr-defined]

    def ask(_: int) -> int:
        connection = pool.connect()
        asking.wait(60)
        number: int = connection.driver_connection.info.backend_pid
        connection.close()
        return number

    with ThreadPoolExecutor(12) as threads:
        first, second = (set(threads.map(ask, range(12))) for _ in range(2))
    assert len(first) == 12
    assert second == first


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
@pytest.mark.parametrize("form", ["sqlite:///{}", "sqlite:///file:{}?uri=true"])
def test_a_file_is_for_its_owner_alone(tmp_path: Path, umask: int, form: str) -> None:
    """It has the arguments of jobs, and so have its log and its index. One that is there keeps its rights."""
    path = tmp_path / "ojs.db"
    before = os.umask(umask)
    try:
        store = open_store(form.format(path))
        store.letters.bury(letter())
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
    finally:
        os.umask(before)
    assert modes == dict.fromkeys(("ojs.db", "ojs.db-wal", "ojs.db-shm"), 0o600)
    store.close()
    path.chmod(0o660)
    store = open_store(form.format(path))
    store.letters.bury(letter("j-2"))
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o660}
    store.close()


def test_a_role_that_may_create_nothing_uses_the_store(postgres_url: str, role: str) -> None:
    """The tables are there; burials, replays and the retention go on."""
    store = open_store(postgres_url)
    for letter_id in "abc":
        store.letters.bury(letter(letter_id))
    execute(postgres_url, grant_to(role))
    theirs = open_store(postgres_url.replace("ojs@", f"{role}@"))
    assert theirs.letters.bury(letter("d"))
    assert theirs.letters.delete(["b"], theirs.letters.claim(["b"], now=NOW, seconds=9).claim) == 1
    assert theirs.letters.prune([letter("c")], now=NOW) == 1
    assert {each.id for each in theirs.letters.list(Filter(), limit=9, cursor=None).letters} == {"a", "d"}


def test_a_role_that_may_only_read_sees_everything(postgres_url: str, role: str) -> None:
    """Such as that of a page for readers: the letters, their groups and the records are there."""
    store = open_store(postgres_url)
    store.letters.bury(letter("a"))
    execute(postgres_url, f"grant select on all tables in schema public to {role}")
    reader = open_store(postgres_url.replace("ojs@", f"{role}@"))
    assert [each.id for each in reader.letters.list(Filter(), limit=9, cursor=None).letters] == ["a"]
    assert [group.count for group in groups(reader)] == [1]
    assert reader.documents.list("operation", limit=9, cursor=None).documents == ()
