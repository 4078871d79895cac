"""The search of dead letters for a text in every kind of store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ojs_bridge import open_store
from ojs_bridge.engine.redaction import Redactor
from ojs_bridge.operations.letters import said, says
from ojs_bridge.rules.fingerprint import fingerprint
from ojs_bridge.store import Filter, Store
from ojs_bridge.store.sql import letters as sql_letters
from tests.store.conftest import grant_to, run
from tests.store.test_groups import died, groups
from tests.store.test_store import NOW, ids

OPEN = Redactor(None)


def found(store: Store, text: str, *, limit: int = 9, oldest_first: bool = False, **where: Any) -> list[str]:
    """The ids of all letters that a search brings, page by page."""
    brought: list[str] = []
    cursor = None
    while True:
        page = store.list(Filter(**where, text=text), limit=limit, cursor=cursor, oldest_first=oldest_first)
        brought += [letter.id for letter in page.letters]
        cursor = page.next_cursor
        if cursor is None:
            return brought


def indexed(store: Store) -> int:
    """Index what all letters say; return the number of those that were not."""
    return sum(store.index_texts(said))


def texts_of(url: str) -> dict[str, str | None]:
    """The texts in an SQL store by the ids of their letters."""
    with sa.create_engine(url).connect() as connection:
        return dict(map(tuple, connection.execute(sa.text("select id, text from ojs_letter_texts"))))


def test_a_search_misses_no_letter(store: Store) -> None:
    """Whether its text was indexed, or not yet."""
    for n in range(5):
        store.bury(died(f"j-{n}", n, f"seat {n} is taken"))
    assert "j-3" in found(store, "seat 3")
    indexed(store)
    store.bury(died("j-9", 9, "seat 3 again"))
    assert {"j-3", "j-9"} <= {*found(store, "seat 3")}
    assert found(store, "seat", limit=2) == ["j-9", "j-4", "j-3", "j-2", "j-1", "j-0"]
    assert found(store, "seat", limit=2, oldest_first=True) == ["j-0", "j-1", "j-2", "j-3", "j-4", "j-9"]
    assert "j-4" in found(store, "seat 4", since=NOW + timedelta(hours=4))
    assert found(store, "seat 3", until=NOW) == []


def test_indexed_letters_without_the_text_are_left_out(sql_url: str) -> None:
    """Also those of a filter and of a group."""
    store = open_store(sql_url)
    for n in range(5):
        store.bury(died(f"j-{n}", n, f"seat {n} is taken", queue=f"q{n % 2}"))
    assert indexed(store) == 5
    assert indexed(store) == 0
    assert found(store, "seat 3") == ["j-3"]
    assert found(store, "seat 3", queue="q0") == []
    assert found(
        store, "seat 3", group=fingerprint("billing.charge", "external.timeout", "seat 7 is taken")
    ) == ["j-3"]
    assert found(store, "100%") == []
    store.bury(died("j-9", 9, "new"))
    assert found(store, "seat 3") == ["j-9", "j-3"]


def test_a_letter_that_has_died_again_says_something_else(sql_url: str) -> None:
    store = open_store(sql_url)
    store.bury(died("a", 0, "old words"))
    store.bury(died("b", 0, "old words"))
    assert indexed(store) == 2
    store.bury(died("a", 1, "new words"))
    assert found(store, "new words") == ["a"]
    assert indexed(store) == 1
    assert found(store, "new words") == ["a"]
    assert found(store, "old words") == ["b"]


def test_a_letter_that_leaves_takes_its_text_along(sql_url: str) -> None:
    """By a deletion, a replay, or a pruning."""
    store = open_store(sql_url)
    for letter_id in "abc":
        store.bury(died(letter_id, 0))
    indexed(store)
    claimed = store.claim(["a"], now=NOW, seconds=9)
    assert store.delete(["a"], claimed.claim) == 1
    assert store.prune(store.list(Filter(), limit=1, cursor=None).letters, now=NOW)
    assert [*texts_of(sql_url)] == ids(store) == ["b"]


def test_a_letter_of_which_nothing_is_indexed_is_found(sql_url: str) -> None:
    """Because it says too much, because nobody can tell what it says, or because its record is damaged."""
    store = open_store(sql_url)
    store.bury(died("long", 0, "x" * sql_letters.LONGEST + " needle"))
    store.bury(died("unknown", 1, "needle"))
    store.bury(died("damaged", 2, "needle"))
    with sa.create_engine(sql_url).begin() as connection:
        connection.execute(sa.text("update ojs_dead_letters set record = '{' where id = 'damaged'"))
    assert sum(store.index_texts(lambda letter: None if letter.id == "unknown" else said(letter))) == 3
    assert indexed(store) == 0
    assert texts_of(sql_url) == {"long": None, "unknown": None, "damaged": None}
    assert found(store, "needle", until=NOW + timedelta(hours=2)) == ["unknown", "long"]


@pytest.mark.parametrize("oldest_first", [False, True])
def test_a_search_of_many_letters_is_many_short_ones(
    sql_url: str, monkeypatch: pytest.MonkeyPatch, *, oldest_first: bool
) -> None:
    """Each page ends after some letters, whatever was found, and the next one goes on there."""
    monkeypatch.setattr(sql_letters, "SEARCHED", 4)
    store = open_store(sql_url)
    for n in range(11):
        store.bury(died(f"j-{n:02}", n // 3, "needle" if n in {0, 5, 6} else "hay"))
    assert indexed(store) == 11
    first = store.list(Filter(text="no such"), limit=9, cursor=None, oldest_first=oldest_first)
    assert (first.letters, first.next_cursor is None) == ((), False)
    wanted = ["j-00", "j-05", "j-06"]
    for limit in (1, 2, 9):
        brought = found(store, "needle", limit=limit, oldest_first=oldest_first)
        assert brought == (wanted if oldest_first else wanted[::-1])


def test_the_text_of_a_letter_that_is_gone_goes_too(sql_url: str) -> None:
    """The deletion of its text has failed."""
    store = open_store(sql_url)
    for letter_id in "abcd":
        store.bury(died(letter_id, 0))
    indexed(store)
    run(sql_url, "delete from ojs_dead_letters where id in ('b', 'd')")
    assert indexed(store) == 0
    assert texts_of(sql_url).keys() == {"a", "c"}


def test_a_role_that_may_not_write_the_index_uses_the_store(postgres_url: str, role: str) -> None:
    """Burials, replays and searches go on."""
    store = open_store(postgres_url)
    for letter_id in "abc":
        store.bury(died(letter_id, 0, "needle"))
    indexed(store)
    revoke = f"revoke insert, update, delete on ojs_letter_texts from {role}"
    run(postgres_url, grant_to(role), revoke)
    store = open_store(postgres_url.replace("ojs@", f"{role}@"))
    assert store.bury(died("a", 0, "needle again"))
    claimed = store.claim(["b"], now=NOW, seconds=9)
    assert store.delete(["b"], claimed.claim) == 1
    assert store.prune(store.list(Filter(), limit=1, cursor=None).letters, now=NOW)
    assert found(store, "needle") == ids(store) == ["a"]


def test_a_role_that_may_only_read_sees_everything(postgres_url: str, role: str) -> None:
    """Such as that of a page for readers: the index, the groups, the rates and the records are there."""
    store = open_store(postgres_url)
    store.bury(died("a", 0, "needle"))
    store.bury(died("b", 1, "hay"))
    indexed(store)
    run(postgres_url, f"grant select on all tables in schema public to {role}")
    reader = open_store(postgres_url.replace("ojs@", f"{role}@"))
    assert found(reader, "needle") == ["a"]
    assert [group.count for group in groups(reader)] == [1, 1]
    assert reader.list_documents("operation", limit=9, cursor=None).documents == ()


def test_an_index_that_is_locked_stops_no_job(postgres_url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Such as by an administrator's REINDEX: dead letters are buried, and leave the store."""
    store = open_store(postgres_url, patience=1)
    for letter_id in "ab":
        store.bury(died(letter_id, 0))
    indexed(store)
    with sa.create_engine(postgres_url).begin() as connection:
        connection.execute(sa.text("lock table ojs_letter_texts in access exclusive mode"))
        assert store.bury(died("c", 0))
        claimed = store.claim(["a"], now=NOW, seconds=9)
        assert store.delete(["a"], claimed.claim) == 1
        assert ids(store) == ["c", "b"]
    assert caplog.text.count("are still in the index") == 2
    assert indexed(store) == 1
    assert found(store, "no such") == []


#: Letters with unusual cases, wildcards, and what a database cannot hold.
LETTERS = "aA\u00df\u1e9e\u0130\u0131\u017f\ufb01%_*'\"\\\0\ud800 \u00e9\n1"
WORDS = st.text(st.sampled_from(LETTERS), max_size=6)


@pytest.fixture
def sql_store(sql_url: str) -> Iterator[Store]:
    """An empty store of each kind that speaks SQL."""
    store = open_store(sql_url)
    yield store
    store.close()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(message=WORDS, args=st.lists(WORDS, max_size=2), text=WORDS.filter(bool))
def test_what_a_letter_says_is_found(sql_store: Store, message: str, args: list[str], text: str) -> None:
    """In any letters of any case: an index that misses one is worse than none."""
    store = sql_store
    kept: Mapping[str, Any] = {"args": args, "kwargs": {}, "options": {}}
    letter = replace(died("a", 0, message), message=kept, framework="dramatiq")
    store.bury(letter)
    indexed(store)
    for asked in {text, text.upper(), message, *args} - {""}:
        if says(letter, asked, OPEN):
            assert found(store, asked.casefold()) == ["a"], asked
