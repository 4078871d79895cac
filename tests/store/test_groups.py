"""Groups of dead letters in every kind of store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from ojs_bridge import StoreError, open_store
from ojs_bridge.rules.fingerprint import fingerprint
from ojs_bridge.store import Filter, Group, GroupPage, Letter, Store
from ojs_bridge.store.records import group_number, group_of_number, to_json, to_ms
from ojs_bridge.store.redis import RedisStore
from ojs_bridge.store.redis.index import LOT
from ojs_bridge.store.redis.server import Word
from ojs_bridge.store.sql import groups as sql_groups
from tests.store.conftest import grant_to, run
from tests.store.test_store import NOW, entry, ids, letter

HOUR = timedelta(hours=1)
TIMES = [NOW + n * HOUR for n in range(5)]


def died(letter_id: str, hours: float, message: str = "slow", **fields: Any) -> Letter:
    """A letter of a job that died so many hours from NOW."""
    errors = ({**entry(3), "message": message},)
    return letter(letter_id, discarded_at=NOW + hours * HOUR, errors=errors, **fields)


def fill(store: Store) -> None:
    """Bury letters of three groups."""
    store.bury(died("a1", 0, "user 1 is slow", queue="q1"))
    store.bury(died("a2", 1, "user 22 is slow", queue="q2"))
    store.bury(died("a3", 3.5, "user 333 is slow", queue="q1"))
    store.bury(died("b1", 1, "no 1", queue="q2", type="t.a"))
    store.bury(died("b2", 1.5, "no 2", queue="q2", type="t.a"))
    store.bury(died("c1", 2, "gone", queue="q3"))


def of_type(type_: str, message: str) -> str:
    """The fingerprint of letters of a job type without a backtrace."""
    return fingerprint(type_, "external.timeout", message)


USER, NO = of_type("billing.charge", "user 1 is slow"), of_type("t.a", "no 1")
GONE = of_type("billing.charge", "gone")


def groups(store: Store, where: Filter | None = None, **asked: Any) -> list[Group]:
    """The groups of a store."""
    given: dict[str, Any] = {"order": "last", "but": (), "times": TIMES, "limit": 9, "offset": 0, **asked}
    return store.groups(where or Filter(), GroupPage(**given))


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
    assert user.sample == store.get("a3")
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
    open_store(sql_url, "other").bury(died("z", 9, "elsewhere"))
    assert names(groups(store)) == [USER, GONE, NO]
    assert names(groups(store, offset=1, limit=1)) == [GONE]
    assert names(groups(store, Filter(until=NOW + 3 * HOUR))) == [GONE, NO, USER]
    assert [group.count for group in groups(store, Filter(since=NOW + HOUR), but=[GONE])] == [2, 2]


def test_a_group_of_some_kind_names_all_that_its_letters_touch(store: Store) -> None:
    """One reading of the letters of that kind tells all about their groups."""
    new = [died(f"a{n}", 1, f"user {n} is slow", queue="q2") for n in range(150)]
    store.bury_all([died("a", 0, "user 1 is slow", queue="q1"), *new, died("b", 0, "no 1", type="t.a")])
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
    assert store.count(where) == 3
    assert store.stats(where).by_queue == {"q1": 2, "q2": 1}
    first = store.list(where, limit=2, cursor=None, oldest_first=True)
    second = store.list(where, limit=2, cursor=first.next_cursor, oldest_first=True)
    assert [each.id for each in (*first.letters, *second.letters)] == ["a1", "a2", "a3"]
    assert ids(store, Filter(group="0" * 16)) == []


def test_a_letter_leaves_its_group_with_its_last_error_and_with_the_store(store: Store) -> None:
    """However it leaves: another death, a deletion, a pruning."""
    fill(store)
    store.bury(died("a3", 3, "gone"))
    assert names(groups(store)) == [GONE, NO, USER]
    assert store.prune(store.list(Filter(group=NO), limit=9, cursor=None).letters, now=NOW) == 2
    claimed = store.claim(["a1", "a2"], now=NOW, seconds=9)
    store.delete(["a1", "a2"], claimed.claim)
    [gone] = groups(store)
    assert (gone.fingerprint, gone.count, gone.deaths) == (GONE, 2, (0, 0, 1, 1))
    assert store.count(Filter(group=NO)) == store.count(Filter(group=USER)) == 0


def test_a_fingerprint_that_was_kept_stays(store: Store) -> None:
    """Even if a later release were to count the error to another group."""
    store.bury(died("a", 0, fault="00000000000000ff"))
    store.bury(died("b", 0, fault="ff000000000000ff"))
    assert set(names(groups(store))) == {"00000000000000ff", "ff000000000000ff"}
    assert ids(store, Filter(group="ff000000000000ff")) == ["b"]


def test_the_sizes_of_groups(store: Store) -> None:
    """By a filter, with the time of the newest letter."""
    fill(store)
    assert store.group_sizes(Filter()) == {
        USER: (3, NOW + 3.5 * HOUR), NO: (2, NOW + 1.5 * HOUR), GONE: (1, NOW + 2 * HOUR)
    }  # fmt: skip
    assert store.group_sizes(Filter(queue="q2", until=NOW + 1.5 * HOUR)) == {
        USER: (1, NOW + HOUR), NO: (1, NOW + HOUR)
    }  # fmt: skip
    assert store.group_sizes(Filter(group=GONE)) == {GONE: (1, NOW + 2 * HOUR)}


def test_the_first_death_of_a_group_stays(store: Store) -> None:
    """Whatever becomes of its letter, and whatever the filter; an older letter makes it earlier."""
    fill(store)

    def first_of(**where: Any) -> dict[str, int]:
        found = groups(store, Filter(**where))
        return {group.fingerprint: round((group.first_at - NOW) / HOUR, 3) for group in found}

    assert first_of(since=NOW + HOUR / 2, queue="q2") == {USER: 0, NO: 1}
    claimed = store.claim(["a1", "b1"], now=NOW, seconds=9)
    store.delete(["a1", "b1"], claimed.claim)
    store.bury(died("c1", 4, "gone"))
    assert first_of() == {USER: 0, NO: 1, GONE: 2}
    store.prune(store.list(Filter(), limit=9, cursor=None).letters, now=NOW + 99 * HOUR)
    assert first_of() == {}
    store.bury(died("a9", 9, "user 9 is slow"))
    assert first_of() == {USER: 0}
    store.bury(died("a0", -5, "user 0 is slow"))
    assert first_of(since=NOW) == {USER: -5}


def test_the_first_death_of_a_group_without_letters_is_forgotten(store: Store) -> None:
    """A group that has letters keeps it, however old it is."""
    fill(store)
    store.prune(store.list(Filter(group=NO), limit=9, cursor=None).letters, now=NOW)
    assert store.forget_groups(before=NOW + HOUR) == 0
    assert store.forget_groups(before=NOW + 9 * HOUR) == 1
    for n, message in enumerate(("user 9 is slow", "no 9")):
        store.bury(died(f"z{n}", 20, message, type="t.a" if n else "billing.charge"))
    first = {group.fingerprint: group.first_at for group in groups(store)}
    assert first == {USER: NOW, GONE: NOW + 2 * HOUR, NO: NOW + 20 * HOUR}


@pytest.mark.parametrize("text", ["0" * 16, "f" * 16, "7" + "f" * 15, "8" + "0" * 15])
def test_a_fingerprint_is_a_number_of_64_bits(text: str) -> None:
    """Every fingerprint is."""
    assert group_of_number(group_number(text)) == text


#: The statement with which a worker of the release before buries a letter.
BURY = """
insert into ojs_dead_letters
  (namespace, id, type, queue, error_type, discarded_ms, claimed_until_ms, record {column})
values ('ojs', :id, 'billing.charge', :queue, 'external.timeout', :ms, 0, :record {value})
on conflict (namespace, id) do update set queue = excluded.queue, record = excluded.record,
  discarded_ms = excluded.discarded_ms
"""


#: The indexes in the place of which this release has others.
BEFORE = {f"ojs_dead_letters_{name}" for name in ("counted", "by_type", "by_error_type")}


def as_before(url: str) -> None:
    """Take from an SQL store what the release before did not have, and give it what that release had."""
    run(
        url,
        "drop table ojs_groups",
        "drop index ojs_dead_letters_by_fault",
        *(f"drop index ojs_dead_letters_{new}" for new in ("kinds", "types", "errors")),
        *(f"create index {before} on ojs_dead_letters (namespace)" for before in BEFORE),
        "alter table ojs_dead_letters drop column fault",
        "alter table ojs_dead_letters add column fingerprint bigint",
        "create index ojs_dead_letters_grouped on ojs_dead_letters (namespace, fingerprint, discarded_ms)",
    )


def bury_as_before(url: str, *letters: Letter) -> None:
    """Bury letters as a worker of the release before does: with another fingerprint, in another column."""
    with sa.create_engine(url).begin() as connection:
        columns = {each["name"] for each in sa.inspect(connection).get_columns("ojs_dead_letters")}
        has = "fingerprint" in columns
        bury = sa.text(BURY.format(column=", fingerprint" * has, value=", 7" * has))
        for each in letters:
            row = {"id": each.id, "queue": each.queue, "ms": to_ms(each.discarded_at)}
            record = {**json.loads(to_json(each)), "fingerprint": "0000000000000007"}
            del record["fault"]
            connection.execute(bury, {**row, "record": json.dumps(record)})


def indexes(url: str) -> set[str | None]:
    """The names of the indexes of dead letters."""
    return {found["name"] for found in sa.inspect(sa.create_engine(url)).get_indexes("ojs_dead_letters")}


def test_letters_of_the_release_before_get_their_groups(sql_url: str) -> None:
    """And those that its workers bury beside the new ones."""
    fill(open_store(sql_url))
    as_before(sql_url)
    store = open_store(sql_url)
    assert ids(store) == ["a3", "c1", "b2", "b1", "a2", "a1"]
    store.bury(died("d1", 0, "new"))
    bury_as_before(sql_url, died("a4", 0, "user 4 is slow"))
    assert names(groups(store)) == [of_type("billing.charge", "new")]
    new = {f"ojs_dead_letters_{name}" for name in ("by_fault", "kinds", "types", "errors")}
    assert not new & indexes(sql_url)
    assert sum(store.group_older()) == 7
    assert names(groups(store))[:3] == [USER, GONE, NO]
    assert store.count(Filter(group=USER)) == 4
    assert new < indexes(sql_url)
    assert not BEFORE & indexes(sql_url)
    assert sum(store.group_older()) == 0
    assert {each.fingerprint: each.first_at for each in groups(store)}[USER] == NOW


@pytest.mark.parametrize("look", [groups, lambda store: ids(store, Filter(group=USER))])
def test_a_letter_that_the_release_before_has_replaced_leaves_its_old_group(
    sql_url: str, look: Callable[[Store], object]
) -> None:
    """It does so as soon as the group is looked at, and gets its own group like any older letter."""
    store = open_store(sql_url)
    fill(store)
    bury_as_before(sql_url, died("a3", 4, "something else"))
    look(store)
    assert ids(store, Filter(group=USER)) == ["a2", "a1"]
    assert store.count(Filter(group=USER)) == 2
    assert sum(store.group_older()) == 1
    assert {group.fingerprint: group.count for group in groups(store)}[
        of_type("billing.charge", "something else")
    ] == 1


def test_many_letters_that_the_release_before_has_replaced_leave_together(sql_url: str) -> None:
    """The groups are read anew once, not once for each letter."""
    store = open_store(sql_url)
    for n in range(60):
        store.bury(died(f"j-{n}", n, "one error"))
    bury_as_before(sql_url, *(died(f"j-{n}", 60 + n, "another error") for n in range(1, 60)))
    asked = 0

    def count(*_: object) -> None:
        nonlocal asked
        asked += 1

    sa.event.listen(sa.Engine, "before_cursor_execute", count)
    try:
        assert [group.count for group in groups(store)] == [1]
    finally:
        sa.event.remove(sa.Engine, "before_cursor_execute", count)
    assert asked < 40


def test_a_role_that_may_create_nothing_goes_on_with_the_store_of_the_release_before(
    postgres_url: str, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It has neither rates nor documents nor groups, and the log says so once."""
    fill(open_store(postgres_url))
    as_before(postgres_url)
    run(postgres_url, "drop table ojs_rates, ojs_documents, ojs_letter_texts", grant_to(role))
    store = open_store(postgres_url.replace("ojs@", f"{role}@"))
    for n in range(3):
        assert store.bury(died(f"d{n}", 4, "user 4 is slow"))
        for ask in (lambda: groups(store), lambda: store.forget_rates(NOW)):
            with pytest.raises(StoreError):
                ask()
    assert len(ids(store)) == 9
    assert sum(store.group_older()) == 0
    said = [record.message for record in caplog.records if "goes on without" in record.message]
    assert len(said) == 5, said


def test_letters_are_grouped_in_small_batches(sql_url: str) -> None:
    """The work may be broken off, and goes on where it was."""
    store = open_store(sql_url)
    store.prepare()
    bury_as_before(sql_url, *(died(f"j-{n}", 0, f"no {'abc'[n % 3]}") for n in range(700)))
    work = store.group_older()
    assert next(work) == 500
    work.close()
    assert sum(open_store(sql_url).group_older()) == 200
    assert [group.count for group in groups(store)] == [234, 233, 233]


def test_a_damaged_letter_stops_no_other(sql_url: str) -> None:
    """It is in the group of letters without an error."""
    store = open_store(sql_url)
    store.prepare()
    bury_as_before(sql_url, died("a1", 0, "gone"), died("a2", 0, "gone"))
    with sa.create_engine(sql_url).begin() as connection:
        connection.execute(sa.text("update ojs_dead_letters set record = '{' where id = 'a1'"))
    assert sum(store.group_older()) == 2
    assert store.count(Filter(group=GONE)) == 1
    assert store.count(Filter(group=fingerprint("", "Unknown", ""))) == 1


def test_a_long_transaction_stops_neither_new_nor_old_workers(postgres_url: str) -> None:
    """Such as that of a backup: the column comes later, and the letters go on without it."""
    fill(open_store(postgres_url))
    as_before(postgres_url)
    with sa.create_engine(postgres_url).connect() as backup:
        backup.execute(sa.text("select count(*) from ojs_dead_letters")).all()
        store = open_store(postgres_url)
        store.bury(died("d1", 0, "user 4 is slow"))
        bury_as_before(postgres_url, died("d2", 0, "user 5 is slow"))
        assert len(ids(store)) == 8
        with pytest.raises(StoreError):
            groups(store)
        assert sum(store.group_older()) == 0
    assert sum(store.group_older()) == 8
    assert store.count(Filter(group=USER)) == 5


def test_letters_are_buried_while_the_index_is_built(postgres_url: str) -> None:
    """An index that an earlier build has left half done is built anew."""
    store = open_store(postgres_url)
    fill(store)
    as_before(postgres_url)
    store = open_store(postgres_url)
    store.prepare()
    with sa.create_engine(postgres_url).begin() as connection:
        connection.execute(
            sa.text("create index ojs_dead_letters_by_fault on ojs_dead_letters (namespace, fault)")
        )
        connection.execute(
            sa.text(
                "update pg_index set indisvalid = false"
                " where indexrelid = 'ojs_dead_letters_by_fault'::regclass"
            )
        )
    assert sum(store.group_older()) == 6
    [built] = [
        found["column_names"]
        for found in sa.inspect(sa.create_engine(postgres_url)).get_indexes("ojs_dead_letters")
        if found["name"] == "ojs_dead_letters_by_fault"
    ]
    assert built == ["namespace", "fault", "discarded_ms"]


def test_no_script_on_valkey_reads_many_kinds(valkey_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server would answer nobody else meanwhile. The counts of all scripts are added up."""
    store = open_store(valkey_url)
    assert isinstance(store, RedisStore)
    prints = ["0" * 15 + digit for digit in "ab"]
    for n in range(1201):
        store.bury(died(f"j-{n}", n % 4 + 0.5, type=f"t{n}", fault=prints[n % 2]))
    run, asked = store.server.run, list[int]()

    def counted(name: str, keys: Sequence[bytes], words: Sequence[Word]) -> Any:
        asked.append(len(words))
        return run(name, keys, words)

    monkeypatch.setattr(store.server, "run", counted)
    assert [(found.count, found.deaths) for found in groups(store, order="count")] == [
        (601, (301, 0, 300, 0)),
        (600, (0, 300, 0, 300)),
    ]
    assert store.stats().total == 1201
    assert store.stats(Filter(type="t1*")).total == store.count(Filter(type="t1*")) == 312
    assert max(asked) <= LOT + 2


def test_what_workers_of_the_release_before_do_on_valkey_is_put_right(valkey_url: str) -> None:
    """They bury, replace and delete letters without a word to the groups."""
    store = open_store(valkey_url)
    assert isinstance(store, RedisStore)
    fill(store)
    grouped = store.server.keys("letters:by_fault", "letters:faults", "letters:fault_of")
    store.server.ask("DEL", *grouped)
    assert groups(store) == []
    assert sum(store.group_older()) == 6
    assert names(groups(store)) == [USER, GONE, NO]
    before = [store.server.ask("DUMP", key) for key in grouped]
    store.bury(died("a3", 4, "gone"))
    [gone] = store.claim(["c1"], now=NOW, seconds=9).letters
    store.prune([gone], now=NOW + HOUR)
    for key, dump in zip(grouped, before, strict=True):
        store.server.ask("RESTORE", key, 0, dump, "REPLACE")
    assert ids(store, Filter(group=USER)) == ["a2", "a1"]
    assert ids(store, Filter(group=GONE)) == []
    assert sum(store.group_older()) == 1
    assert {group.fingerprint: group.count for group in groups(store)} == {GONE: 1, NO: 2, USER: 2}
    assert sum(store.group_older()) == 0


def test_groups_of_the_release_before_on_valkey_are_made_anew(valkey_url: str) -> None:
    """And what it kept for its own groups is deleted."""
    store = open_store(valkey_url)
    assert isinstance(store, RedisStore)
    fill(store)
    before = ("letters:by_group", "letters:groups", "letters:grouped")
    for new, old in zip(("letters:by_fault", "letters:faults", "letters:fault_of"), before, strict=True):
        store.server.ask("RENAME", store.server.key(new), store.server.key(old))
    store.server.ask("DEL", store.server.key("letters:first_deaths"))
    assert groups(store) == []
    assert sum(store.group_older()) == 6
    assert {group.fingerprint: group.first_at for group in groups(store)} == {
        USER: NOW, GONE: NOW + 2 * HOUR, NO: NOW + HOUR
    }  # fmt: skip
    assert store.server.ask("EXISTS", *store.server.keys(*before)) == 0


@pytest.fixture
def redis_store(valkey_url: str) -> RedisStore:
    """An empty store on Valkey."""
    store = open_store(valkey_url)
    assert isinstance(store, RedisStore)
    return store


def ungroup(store: RedisStore, *names: str) -> None:
    """Delete what the groups of a store are made of, or some of it."""
    store.server.ask("DEL", *store.server.keys(*(names or ("letters:by_fault", "letters:fault_of"))))


def test_a_comparison_goes_on_where_it_was_ended(redis_store: RedisStore) -> None:
    """So that it comes to the last of many letters."""
    for n in range(700):
        redis_store.bury(died(f"j-{n}", 0, "gone"))
    ungroup(redis_store)
    done = []
    for _ in range(20):
        work = redis_store.group_older()
        done.append(next(work, 0))
        work.close()
    assert sum(done) == 700
    assert max(done) < 300
    assert [group.count for group in groups(redis_store)] == [700]


def test_no_script_returns_the_records_of_letters(
    redis_store: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be large, and the server holds all that a script returns."""
    for n in range(20):
        redis_store.bury(died(f"j-{n}", 0, "x" * 10_000))
    ungroup(redis_store)
    run, told = redis_store.server.run, list[str]()

    def heard(name: str, keys: Sequence[bytes], words: Sequence[Word]) -> Any:
        answer = run(name, keys, words)
        told.append(repr(answer))
        return answer

    monkeypatch.setattr(redis_store.server, "run", heard)
    assert sum(redis_store.group_older()) == 20
    assert max(map(len, told)) < 10_000


@pytest.mark.parametrize("lost", ["letters:by_fault", "letters:fault_of"])
def test_a_part_of_the_groups_that_is_lost_is_put_right(redis_store: RedisStore, lost: str) -> None:
    """Also when the letters were compared before, and when a letter is deleted meanwhile."""
    fill(redis_store)
    assert sum(redis_store.group_older()) == 0
    ungroup(redis_store, lost)
    claimed = redis_store.claim(["c1"], now=NOW, seconds=9)
    redis_store.delete(["c1"], claimed.claim)
    assert sum(redis_store.group_older()) == 5
    assert names(groups(redis_store)) == [USER, NO]
    assert redis_store.server.ask("ZCARD", redis_store.server.key("letters:by_fault")) == 5


def test_a_damaged_letter_on_valkey_stops_no_other(redis_store: RedisStore) -> None:
    """It is in the group of letters without an error."""
    fill(redis_store)
    ungroup(redis_store)
    redis_store.server.ask("HSET", redis_store.server.key("letters"), "a1", b"\xff")
    redis_store.server.ask("HDEL", redis_store.server.key("letters"), "b1")
    assert sum(redis_store.group_older()) == 6
    assert redis_store.count(Filter(group=fingerprint("", "Unknown", ""))) == 2
