"""Groups of dead letters in every kind of store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from ojs_bridge import open_store
from ojs_bridge.rules.fingerprint import fingerprint
from ojs_bridge.store import Filter, Group, GroupPage, Letter, Store
from ojs_bridge.store.records import group_number, group_of_number
from ojs_bridge.store.redis import RedisStore
from ojs_bridge.store.redis.index import LOT
from ojs_bridge.store.redis.server import Word
from ojs_bridge.store.sql import groups as sql_groups
from ojs_bridge.store.sql import tables
from tests.store.test_store import NOW, entry, ids, letter

HOUR = timedelta(hours=1)
TIMES = [NOW + n * HOUR for n in range(5)]


def died(letter_id: str, hours: float, message: str = "slow", **fields: Any) -> Letter:
    """A letter of a job that died so many hours from NOW."""
    errors = ({**entry(3), "message": message},)
    return letter(letter_id, discarded_at=NOW + hours * HOUR, errors=errors, **fields)


def fill(store: Store) -> None:
    """Bury letters of three groups."""
    store.letters.bury(died("a1", 0, "user 1 is slow", queue="q1"))
    store.letters.bury(died("a2", 1, "user 22 is slow", queue="q2"))
    store.letters.bury(died("a3", 3.5, "user 333 is slow", queue="q1"))
    store.letters.bury(died("b1", 1, "no 1", queue="q2", type="t.a"))
    store.letters.bury(died("b2", 1.5, "no 2", queue="q2", type="t.a"))
    store.letters.bury(died("c1", 2, "gone", queue="q3"))


def of_type(type_: str, message: str) -> str:
    """The fingerprint of letters of a job type without a backtrace."""
    return fingerprint(type_, "external.timeout", message)


USER, NO = of_type("billing.charge", "user 1 is slow"), of_type("t.a", "no 1")
GONE = of_type("billing.charge", "gone")


def groups(store: Store, where: Filter | None = None, **asked: Any) -> list[Group]:
    """The groups of a store."""
    given: dict[str, Any] = {"order": "last", "but": (), "times": TIMES, "limit": 9, "offset": 0, **asked}
    return store.letters.groups(where or Filter(), GroupPage(**given))


def names(found: Sequence[Group]) -> list[str]:
    """The fingerprints of groups."""
    return [group.fingerprint for group in found]


def test_a_group_has_its_count_its_times_and_what_it_touches(store: Store) -> None:
    """And the newest letter, and the deaths of each hour."""
    fill(store)
    user, gone, no = groups(store)
    assert (user.fingerprint, user.count, user.first_at, user.last_at) == (USER, 3, NOW, NOW + 3.5 * HOUR)
    assert sorted(user.queues) == ["q1", "q2"]
    assert (user.types, no.types) == (("billing.charge",), ("t.a",))
    assert user.deaths == (1, 1, 0, 1)
    assert user.sample == store.letters.get("a3")
    assert (gone.fingerprint, gone.deaths) == (GONE, (0, 0, 1, 0))
    assert (no.fingerprint, no.count, no.deaths) == (NO, 2, (0, 2, 0, 0))


def test_the_largest_come_first_and_pages_follow(store: Store) -> None:
    """Of groups of the same size the last seen one does."""
    fill(store)
    assert names(groups(store, order="count")) == [USER, NO, GONE]
    assert names(groups(store, limit=1, offset=1)) == [GONE]
    assert names(groups(store, but=[USER, NO])) == [GONE]
    assert groups(store, offset=3) == []


@pytest.mark.parametrize("walked", [0, 1, 2, 3, 4])
def test_many_groups_are_found_in_another_way(
    sql_url: str, walked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the same."""
    monkeypatch.setattr(sql_groups, "WALKED", walked)
    store = open_store(sql_url)
    assert groups(store) == []
    fill(store)
    open_store(sql_url, "other").letters.bury(died("z", 9, "elsewhere"))
    assert names(groups(store)) == [USER, GONE, NO]
    assert names(groups(store, offset=1, limit=1)) == [GONE]
    assert names(groups(store, Filter(until=NOW + 3 * HOUR))) == [GONE, NO, USER]
    assert [group.count for group in groups(store, Filter(since=NOW + HOUR), but=[GONE])] == [2, 2]


def test_a_group_of_some_kind_names_all_that_its_letters_touch(store: Store) -> None:
    """One reading of the letters of that kind tells all about their groups."""
    new = [died(f"a{n}", 1, f"user {n} is slow", queue="q2") for n in range(150)]
    store.letters.bury_all(
        [died("a", 0, "user 1 is slow", queue="q1"), *new, died("b", 0, "no 1", type="t.a")]
    )
    [user] = groups(store, Filter(type="billing.*"))
    assert (user.queues, user.count, user.deaths) == (("q2", "q1"), 151, (1, 150, 0, 0))


def test_letters_before_and_after_the_times_count(store: Store) -> None:
    """They are no bars."""
    fill(store)
    user = groups(store, times=TIMES[1:3])[0]
    assert (user.count, user.deaths) == (3, (1,))


FILTERS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"queue": "q2"}, {NO: 2, USER: 1}),
    ({"type": "t.*"}, {NO: 2}),
    ({"error_type": "external.*"}, {USER: 3, GONE: 1, NO: 2}),
    ({"error_type": "other"}, {}),
    ({"since": NOW + HOUR, "until": NOW + 2 * HOUR}, {NO: 2, USER: 1}),
    ({"but_queues": frozenset(["q1", "q3"])}, {NO: 2, USER: 1}),
    ({"group": NO}, {NO: 2}),
    ({"group": NO, "queue": "q1"}, {}),
]


@pytest.mark.parametrize(("where", "counts"), FILTERS)
def test_groups_of_the_letters_that_a_filter_chooses(
    store: Store, where: dict[str, Any], counts: dict[str, int]
) -> None:
    """Their counts are those of these letters."""
    fill(store)
    found = groups(store, Filter(**where))
    assert {group.fingerprint: group.count for group in found} == counts


def test_a_group_is_a_filter_as_any_other(store: Store) -> None:
    """Lists, counts and statistics know it."""
    fill(store)
    where = Filter(group=USER)
    assert ids(store, where) == ["a3", "a2", "a1"]
    assert ids(store, Filter(group=USER, queue="q1", until=NOW + HOUR)) == ["a1"]
    assert store.letters.count(where) == 3
    assert store.letters.stats(where).by_queue == {"q1": 2, "q2": 1}
    first = store.letters.list(where, limit=2, cursor=None, oldest_first=True)
    second = store.letters.list(where, limit=2, cursor=first.next_cursor, oldest_first=True)
    assert [each.id for each in (*first.letters, *second.letters)] == ["a1", "a2", "a3"]
    assert ids(store, Filter(group="0" * 16)) == []


def test_a_letter_leaves_its_group_with_its_last_error_and_with_the_store(store: Store) -> None:
    """However it leaves: another death, a deletion, a pruning."""
    fill(store)
    store.letters.bury(died("a3", 3, "gone"))
    assert names(groups(store)) == [GONE, NO, USER]
    assert (
        store.letters.prune(store.letters.list(Filter(group=NO), limit=9, cursor=None).letters, now=NOW) == 2
    )
    claimed = store.letters.claim(["a1", "a2"], now=NOW, seconds=9)
    store.letters.delete(["a1", "a2"], claimed.claim)
    [gone] = groups(store)
    assert (gone.fingerprint, gone.count, gone.deaths) == (GONE, 2, (0, 0, 1, 1))
    assert store.letters.count(Filter(group=NO)) == store.letters.count(Filter(group=USER)) == 0


def test_a_fingerprint_that_was_kept_stays(store: Store) -> None:
    """Even if a later release were to count the error to another group."""
    store.letters.bury(died("a", 0, fault="00000000000000ff"))
    store.letters.bury(died("b", 0, fault="ff000000000000ff"))
    assert set(names(groups(store))) == {"00000000000000ff", "ff000000000000ff"}
    assert ids(store, Filter(group="ff000000000000ff")) == ["b"]


def test_the_sizes_of_groups(store: Store) -> None:
    """By a filter, with the time of the newest letter."""
    fill(store)
    assert store.letters.group_sizes(Filter()) == {
        USER: (3, NOW + 3.5 * HOUR), NO: (2, NOW + 1.5 * HOUR), GONE: (1, NOW + 2 * HOUR)
    }  # fmt: skip
    assert store.letters.group_sizes(Filter(queue="q2", until=NOW + 1.5 * HOUR)) == {
        USER: (1, NOW + HOUR), NO: (1, NOW + HOUR)
    }  # fmt: skip
    assert store.letters.group_sizes(Filter(group=GONE)) == {GONE: (1, NOW + 2 * HOUR)}


def test_the_first_death_of_a_group_stays(store: Store) -> None:
    """Whatever becomes of its letter, and whatever the filter; an older letter makes it earlier."""
    fill(store)

    def first_of(**where: Any) -> dict[str, int]:
        found = groups(store, Filter(**where))
        return {group.fingerprint: round((group.first_at - NOW) / HOUR, 3) for group in found}

    assert first_of(since=NOW + HOUR / 2, queue="q2") == {USER: 0, NO: 1}
    claimed = store.letters.claim(["a1", "b1"], now=NOW, seconds=9)
    store.letters.delete(["a1", "b1"], claimed.claim)
    store.letters.bury(died("c1", 4, "gone"))
    assert first_of() == {USER: 0, NO: 1, GONE: 2}
    store.letters.prune(store.letters.list(Filter(), limit=9, cursor=None).letters, now=NOW + 99 * HOUR)
    assert first_of() == {}
    store.letters.bury(died("a9", 9, "user 9 is slow"))
    assert first_of() == {USER: 0}
    store.letters.bury(died("a0", -5, "user 0 is slow"))
    assert first_of(since=NOW) == {USER: -5}


def test_the_first_death_of_a_group_without_letters_is_forgotten(store: Store) -> None:
    """A group that has letters keeps it, however old it is."""
    fill(store)
    store.letters.prune(store.letters.list(Filter(group=NO), limit=9, cursor=None).letters, now=NOW)
    assert store.letters.forget_groups(before=NOW + HOUR) == 0
    assert store.letters.forget_groups(before=NOW + 9 * HOUR) == 1
    for n, message in enumerate(("user 9 is slow", "no 9")):
        store.letters.bury(died(f"z{n}", 20, message, type="t.a" if n else "billing.charge"))
    first = {group.fingerprint: group.first_at for group in groups(store)}
    assert first == {USER: NOW, GONE: NOW + 2 * HOUR, NO: NOW + 20 * HOUR}


@pytest.mark.parametrize("text", ["0" * 16, "f" * 16, "7" + "f" * 15, "8" + "0" * 15])
def test_a_fingerprint_is_a_number_of_64_bits(text: str) -> None:
    """Every fingerprint is."""
    assert group_of_number(group_number(text)) == text


def test_no_script_on_valkey_reads_many_kinds(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would answer nobody else meanwhile. The counts of all scripts are added up."""
    store = open_store(valkey_url)
    assert isinstance(store, RedisStore)
    prints = ["0" * 15 + digit for digit in "ab"]
    for n in range(1201):
        store.letters.bury(died(f"j-{n}", n % 4 + 0.5, type=f"t{n}", fault=prints[n % 2]))
    run, asked = store.run, list[int]()

    def counted(name: str, keys: Sequence[bytes], words: Sequence[Word]) -> Any:
        asked.append(len(words))
        return run(name, keys, words)

    monkeypatch.setattr(store, "run", counted)
    assert [(found.count, found.deaths) for found in groups(store, order="count")] == [
        (601, (301, 0, 300, 0)),
        (600, (0, 300, 0, 300)),
    ]
    assert store.letters.stats().total == 1201
    assert store.letters.stats(Filter(type="t1*")).total == store.letters.count(Filter(type="t1*")) == 312
    assert max(asked) <= LOT + 2


def test_the_letters_of_a_group_are_counted_in_its_own_index(postgres_url: str) -> None:
    """Without statistics PostgreSQL would read the letters of all groups for each step of time."""
    store = open_store(postgres_url)
    fill(store)
    asked: list[tuple[str, Any]] = []

    @sa.event.listens_for(sa.Engine, "before_cursor_execute")
    def note(_connection: object, _cursor: object, statement: str, values: Any, *_: object) -> None:
        asked.append((statement, values))

    try:
        store.letters.groups(Filter(since=NOW), GroupPage("last", (), TIMES, 50, 0))
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", note)
    (counts,) = (one for one in asked if "count(*)" in one[0])
    engine = sa.create_engine(postgres_url)
    with engine.begin() as connection:
        grown = "SELECT {} FROM ojs_dead_letters, generate_series(1, 2000) AS n"
        columns = [column.name for column in tables.letters.c]
        copied = ", ".join({"id": "id || n"}.get(name, name) for name in columns)
        connection.execute(
            sa.text(f"INSERT INTO ojs_dead_letters ({', '.join(columns)}) {grown.format(copied)}")
        )
        plan = connection.exec_driver_sql(f"EXPLAIN {counts[0]}", counts[1]).scalars().all()
    engine.dispose()
    store.close()
    assert "ojs_dead_letters_by_fault" in "\n".join(plan), plan
