"""How SQL databases keep settled reservations: in which rows and indexes, and until when."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from ojs_bridge import open_store
from ojs_bridge.store import Grant, Reservation, Settle, Store
from tests.servers import eventually
from tests.store.test_parked import parked
from tests.store.test_pooled import WAITING
from tests.store.test_reservations import FIRST, SECOND, after, over, reserve
from tests.store.test_store import AWKWARD, letter


def test_a_record_goes_when_its_own_time_has_come(sql_url: str) -> None:
    """Those that wait for longer hide no other, however few are looked at in one step."""
    store = open_store(sql_url)

    def swept(seconds: float) -> int:
        # From anywhere to the end, and then all of them.
        return sum(store.reservations.expire_before(after(seconds), limit=1) for _ in range(2 * 4))

    day = timedelta(days=1).total_seconds()
    for key, keep in (("abandoned", None), ("late", 2 * day), ("done", day + 30)):
        reserve(store, key=key)
        if keep is not None:
            assert store.reservations.settle(Settle(Reservation(key, 0), FIRST, after(keep)))
    at = (day + 29, day + 60, day + 60, 2 * day - 0.001, 2 * day)
    assert [*map(swept, at)] == [0, 1, 0, 0, 1]
    assert reserve(store, key="abandoned", at=1).grant is Grant.HELD


def test_many_are_settled_together(sql_url: str) -> None:
    """Under any name, and without a record; those that were taken over are told."""
    store = open_store(sql_url)
    keys = [f"{n} {text}" for n, text in enumerate(AWKWARD)]
    for key in (*keys, "taken over"):
        reserve(store, key=key)
    reserve(store, 1, key="taken over", holder=SECOND)
    settles = [over(key=key) for key in (*keys, "unknown", "taken over")]
    assert [*store.reservations.settle_all(settles)] == [Reservation("taken over", 0)]
    assert {reserve(store, key=key).grant for key in (*keys, "unknown")} == {Grant.SETTLED}
    assert reserve(store, 1, key="taken over").grant is Grant.HELD


def test_a_statement_names_no_more_than_an_old_sqlite_takes(tmp_path: Path) -> None:
    store, named = open_store(f"sqlite:///{tmp_path}/ojs.db"), list[int]()
    keys = [str(n) for n in range(500)]
    for key in keys:
        reserve(store, key=key)
    reserve(store, 1, key="0", holder=SECOND)
    engine = store._quick  # type: ignore[attr-defined]
    sa.event.listen(
        engine, "before_cursor_execute", lambda *args: named.append(0 if args[5] else len(args[3]))
    )
    lost = store.reservations.settle_all([over(key=key) for key in keys])
    assert [*lost] == [Reservation("0", 0)]
    assert 0 < max(named) <= 999


def test_lots_are_settled_in_the_order_in_which_a_heartbeat_extends_them(postgres_url: str) -> None:
    """In two orders, each would have what the other waits for."""
    store, touch = open_store(postgres_url), "update ojs_reservations set mark = mark where key = '{}'"
    for key in "ab":
        reserve(store, key=key)
    with ThreadPoolExecutor() as pool, sa.create_engine(postgres_url).connect() as other:
        other.execute(sa.text(touch.format("a")))
        settled = pool.submit(store.reservations.settle_all, [over(key="b"), over(key="a")])
        eventually(lambda: other.execute(sa.text(WAITING)).scalar(), what="the wait for the first row")
        other.execute(sa.text(touch.format("b")))
        other.commit()
        assert [*settled.result(60)] == []


def test_postgresql_settles_in_place(postgres_url: str) -> None:
    """It writes into no index, and one statement settles many."""
    store = open_store(postgres_url)
    store.prepare()
    for n in range(20):
        reserve(store, key=f"j-{n}")
    assert store.reservations.settle_all([over(key=f"j-{n}") for n in range(15)]) == ()
    with sa.create_engine(postgres_url).connect() as connection:
        steps = "select count(distinct cast(xmin as text)), count(*) from ojs_reservations where settled"
        assert tuple(connection.execute(sa.text(steps)).one()) == (1, 15)
    assert all(store.reservations.settle(over(key=f"j-{n}")) for n in range(15, 20))
    store.close()  # The server counts when a session ends.

    def found() -> tuple[Any, ...]:
        with sa.create_engine(postgres_url).connect() as connection:
            return tuple(connection.execute(sa.text(FOUND)).one())

    eventually(lambda: found()[0] == 20, what="the server's count")
    assert found() == (20, 20, ["fillfactor=70"])


FOUND = """
select n_tup_upd, n_tup_hot_upd, reloptions from pg_stat_user_tables join pg_class on oid = relid
where pg_class.relname = 'ojs_reservations'
"""


def waits_for_the_disk(postgres_url: str, write: Callable[[], object]) -> bool:
    """Write, and return whether PostgreSQL then has on its disk what was written."""
    with sa.create_engine(postgres_url, isolation_level="AUTOCOMMIT").connect() as connection:
        before = connection.execute(sa.text("select pg_current_wal_insert_lsn()")).scalar_one()
        assert write()
        flushed = sa.text("select pg_current_wal_flush_lsn() > cast(:before as pg_lsn)")
        return bool(connection.execute(flushed, {"before": before}).scalar_one())


def test_only_a_settlement_alone_does_not_wait_for_the_disk(postgres_url: str) -> None:
    """With a retry or a dead letter it does, and so it does for a user who has chosen how to commit."""
    store, numbers = open_store(postgres_url), itertools.count()

    def settles(store: Store, count: int) -> bool:
        keys = [f"j-{next(numbers)}" for _ in range(count)]
        for key in keys:
            reserve(store, key=key)
        settled = [over(key=key) for key in keys]
        return waits_for_the_disk(
            postgres_url,
            lambda: (
                store.reservations.settle(*settled)
                if count == 1
                else store.reservations.settle_all(settled) == ()
            ),
        )

    for count in (1, 20):
        eventually(lambda count=count: not settles(store, count), what="a settlement that does not wait")
    strict = open_store(f"{postgres_url}&options=-csynchronous_commit%3Dlocal")
    for _ in range(20):
        key = f"j-{next(numbers)}"
        assert settles(strict, 1)
        assert settles(strict, 20)
        assert waits_for_the_disk(postgres_url, lambda key=key: reserve(store, key=key))
        assert waits_for_the_disk(postgres_url, lambda key=key: store.parked.park(parked(key), over(key=key)))
        assert waits_for_the_disk(
            postgres_url, lambda key=key: store.letters.bury(letter(key), over(key=key))
        )
