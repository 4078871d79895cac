"""Every store keeps dead letters alike."""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError, StoreError, open_store
from ojs_bridge.rules.job import ErrorEntry
from ojs_bridge.store import Claim, Filter, Letter, Store, from_json, to_json
from tests.store.processes import in_processes

NOW = datetime(2026, 11, 21, 10, 0, 2, 345_000, tzinfo=timezone.utc)
EVERYTHING = Filter()
SECRET = "s3cr:t/p@ss"
#: Texts that some databases cannot hold in a text column or in an index.
AWKWARD = [
    "naïve ☃ 💩",
    "a\0b",
    "\ud800",
    "x" * 5_000,
    "line\nbreak",
    "'; drop table ojs_schema; --",
    "%_\\",
    "",
]


def entry(attempt: int = 1, **fields: Any) -> ErrorEntry:
    """An error entry as the spec writes it."""
    return {"attempt": attempt, "type": "external.timeout", "message": "slow", "details": {}, **fields}


def letter(letter_id: str = "j-1", **fields: Any) -> Letter:
    """A dead letter."""
    known: dict[str, Any] = {
        "id": letter_id,
        "type": "billing.charge",
        "queue": "default",
        "framework": "dramatiq",
        "attempt": 3,
        "max_attempts": 3,
        "cause": "exhausted",
        "reason": "no attempt is left",
        "discarded_at": NOW,
        "message": {"args": [7]},
        "errors": (entry(3),),
    }
    return Letter(**{**known, **fields})


def ids(store: Store, where: Filter = EVERYTHING) -> list[str]:
    """The ids of the dead letters, as listed."""
    return [letter.id for letter in store.letters.list(where, limit=1000, cursor=None).letters]


def walk(store: Store, limit: int, between: Callable[[], object] = lambda: None) -> Iterator[str]:
    """The ids of the dead letters, page by page; something may happen in between."""
    cursor = None
    while True:
        page = store.letters.list(EVERYTHING, limit=limit, cursor=cursor)
        assert len(page.letters) <= limit
        yield from (letter.id for letter in page.letters)
        cursor = page.next_cursor
        if cursor is None:
            return
        between()


def claim(store: Store, letter_id: str = "j-1", *, now: datetime = NOW) -> Claim | None:
    """Claim a dead letter for a minute."""
    claimed = store.letters.claim([letter_id], now=now, seconds=60)
    return claimed.claim if claimed.letters else None


def delete(store: Store, letter_id: str) -> bool:
    """Claim a dead letter, and delete it."""
    held = claim(store, letter_id)
    return held is not None and store.letters.delete([letter_id], held) == 1


def test_a_record_of_another_version_is_read() -> None:
    """A newer worker may write a field that this one does not know; an earlier worker wrote fewer fields."""
    known = json.loads(to_json(letter(key="k-1")))
    assert from_json(Letter, json.dumps({**known, "colour": "blue"})) == letter(key="k-1")
    assert from_json(Letter, json.dumps({n: x for n, x in known.items() if n != "key"})) == letter()


@pytest.mark.requirement("DLQ-002")
def test_everything_of_a_letter_comes_back(store: Store) -> None:
    """Field by field, in every JSON type."""
    whole = letter(
        message={"args": [1, 2.5, None, True, {"k": "v"}], "headers": {"a": [[]]}},
        errors=(entry(1, replay=1, backtrace=["a.py:1 in f"]), entry(2, details={"n": 2**70})),
        retry={"max_attempts": 3, "non_retryable_errors": ["auth.*"]},
        created_at=NOW - timedelta(days=400),
        replay_count=2,
    )
    store.letters.bury(whole)
    assert store.letters.get("j-1") == whole


@pytest.mark.requirement("DLQ-002")
@pytest.mark.parametrize("text", AWKWARD, ids=lambda text: ascii(text)[:20])
def test_no_text_is_too_awkward(store: Store, text: str) -> None:
    """Any field may have such a text, also the id; the record holds what a column cannot."""
    awkward = letter(
        f"id {text}",
        type=text,
        queue=text,
        reason=text,
        message={"args": [text], text: text},
        errors=(entry(type=text, message=text, details={text: text}),),
    )
    store.letters.bury(awkward)
    store.letters.bury(letter("another"))
    assert store.letters.get(awkward.id) == awkward
    store.letters.keep_errors(awkward.id, [(0, entry(message=text))])
    assert store.letters.kept_errors(awkward.id) == [(0, entry(message=text))]
    if text:
        for where in (Filter(queue=text), Filter(type=text), Filter(error_type=text)):
            assert ids(store, where) == [awkward.id]
    assert delete(store, awkward.id)
    assert store.letters.get(awkward.id) is None


def test_the_store_tells_the_time(store: Store) -> None:
    off = timedelta(seconds=2)
    before = datetime.now(timezone.utc)
    told = store.clock()
    assert before - off < told < datetime.now(timezone.utc) + off


def test_a_huge_letter(store: Store) -> None:
    """Ten megabytes of arguments, and a thousand errors."""
    huge = letter(
        message={"args": ["\N{SNOWMAN}" * 1_500_000]}, errors=tuple(entry(n) for n in range(1, 1001))
    )
    store.letters.bury(huge)
    assert store.letters.get("j-1") == huge


def test_an_unknown_id(store: Store) -> None:
    """The store finds nothing under the id, and no step fails."""
    assert store.letters.get("nobody") is None
    assert claim(store, "nobody") is None
    store.letters.unclaim(["nobody"], 5)
    assert not store.letters.delete(["nobody"], 5)
    assert store.letters.kept_errors("nobody") == []
    store.letters.forget_errors("nobody")


def test_a_job_that_dies_again_has_one_letter(store: Store) -> None:
    """The last one."""
    store.letters.bury(letter(queue="first"))
    store.letters.bury(letter(queue="second", discarded_at=NOW + timedelta(seconds=1)))
    assert ids(store) == ["j-1"]
    assert ids(store, Filter(queue="first")) == []
    assert store.letters.get("j-1") == letter(queue="second", discarded_at=NOW + timedelta(seconds=1))


def test_letters_that_are_buried_together(store: Store) -> None:
    """Each replaces an earlier one, its claim and its kept errors; of two with one id the last stays."""
    store.letters.bury(letter("a", queue="old"))
    claimed = store.letters.claim(["a"], now=NOW, seconds=60)
    store.letters.keep_errors("a", [(0, entry(1))])
    store.letters.keep_errors("other", [(0, entry(1))])
    store.letters.bury_all(
        [letter("b"), letter("a", queue="new"), letter("c"), letter("b", queue="new", attempt=7)]
    )
    assert ids(store) == ["c", "b", "a"]
    assert store.letters.get("b") == letter("b", queue="new", attempt=7)
    assert store.letters.stats().by_queue == {"new": 2, "default": 1}
    assert sum(count for count, _ in store.letters.group_sizes(EVERYTHING).values()) == 3
    assert (store.letters.kept_errors("a"), store.letters.kept_errors("other")) == ([], [(0, entry(1))])
    assert store.letters.delete(["a"], claimed.claim) == 0
    assert len(store.letters.claim(["a"], now=NOW, seconds=60).letters) == 1


def test_the_same_letter_buried_by_many_at_once(url: str, store: Store) -> None:
    """None of them fails, and there is one."""
    assert in_processes(4, bury_repeatedly, url) == [None] * 4
    assert ids(store) == ["j-1"]


def bury_repeatedly(url: str) -> None:
    """Bury the same letter again and again."""
    store = open_store(url)
    for _ in range(20):
        store.letters.bury(letter())


@pytest.mark.requirement("DLQ-006")
def test_the_newest_letters_come_first(store: Store) -> None:
    """The order of burying does not matter; letters of one moment have a fixed order."""
    order = [f"j-{n:02}" for n in range(20)]
    for n in random.Random(7).sample(range(20), 20):
        store.letters.bury(letter(f"j-{n:02}", discarded_at=NOW - timedelta(milliseconds=n // 2)))
    found = ids(store)
    assert [n // 2 for n in map(order.index, found)] == [n // 2 for n in range(20)]
    assert list(walk(store, 3)) == found


TYPES = {
    "exact": "auth.expired",
    "deeper": "auth.expired.really",
    "sibling": "auth.denied",
    "bare": "auth",
    "look-alike": "authentication.expired",
    "upper": "AUTH.expired",
    "percent": "au%",
    "underscore": "a_th.expired",
    "backslash": "auth\\.expired",
    "brackets": "a[u]?/th.expired",
}
MATCHES = [
    ("auth.expired", ["exact"]),
    ("auth.*", ["deeper", "exact", "sibling"]),
    ("auth.expired.*", ["deeper"]),
    ("auth", ["bare"]),
    ("au%", ["percent"]),
    ("%.*", []),
    ("a_th.*", ["underscore"]),
    ("a_th.expired", ["underscore"]),
    ("auth\\.*", ["backslash"]),
    ("AUTH.*", ["upper"]),
    ("a[u]?/th.expired", ["brackets"]),
    ("a[u]?/*", ["brackets"]),
    ("a?th.expired", []),
    ("[a]uth.*", []),
    ("auth*", ["backslash", "bare", "deeper", "exact", "look-alike", "sibling"]),
    ("*.expired", ["backslash", "brackets", "exact", "look-alike", "underscore", "upper"]),
    ("auth.*d*", ["deeper", "exact", "sibling"]),
    ("*\\*", ["backslash"]),
]


@pytest.mark.requirement("DLQ-006", "DLQ-R005")
@pytest.mark.parametrize("field", ["type", "error_type"])
def test_filters_on_types(store: Store, field: str) -> None:
    """A filter is a whole name or a pattern, case-sensitive; wildcards of SQL and shells are plain text."""
    for name, value in TYPES.items():
        known = {"type": value} if field == "type" else {"errors": (entry(1), entry(2, type=value))}
        store.letters.bury(letter(name, **known))
    for pattern, names in MATCHES:
        assert sorted(ids(store, Filter(**{field: pattern}))) == names, pattern


@pytest.mark.requirement("DLQ-006")
def test_filters_are_combined(store: Store) -> None:
    """A letter must match all filters; the name of a queue is matched whole."""
    for queue, type_, error in itertools.product(["q", "q.*", "q.r"], ["a.b", "a.c"], ["e.f", "e.g"]):
        store.letters.bury(
            letter(f"{queue} {type_} {error}", queue=queue, type=type_, errors=(entry(type=error),))
        )
    assert sorted(ids(store, Filter("q", "a.*", "e.g"))) == ["q a.b e.g", "q a.c e.g"]
    for where in (
        Filter("q.*"),
        Filter("q.*", "a.*"),
        Filter(but_queues=frozenset({"q", "q.r"})),
    ):
        assert (len(ids(store, where)), store.letters.count(where)) == (4, 4)
    assert ids(store, Filter("*")) == []
    assert ids(store, Filter("q", "a.b", "e.*.*")) == []


@pytest.mark.requirement("DLQ-006")
def test_pages_stay_right_while_letters_come_and_go(store: Store) -> None:
    """A letter that stays is seen once; a letter that is gone is not seen."""
    for n in range(40):
        store.letters.bury(letter(f"j-{n:02}", discarded_at=NOW - timedelta(seconds=n)))
    added, gone = itertools.count(), iter(range(39, 0, -4))

    def happens() -> None:
        store.letters.bury(letter(f"new-{next(added)}", discarded_at=NOW + timedelta(seconds=5)))
        assert delete(store, f"j-{next(gone):02}")

    seen = list(walk(store, 7, happens))
    steady = [f"j-{n:02}" for n in range(40) if (39 - n) % 4]
    assert len(seen) == len(set(seen))
    assert [i for i in seen if i in steady] == steady


@pytest.mark.parametrize("cursor", ["", "x", "5", "5.0:j", "-5:j", "٣:j", "9" * 30 + ":j", "9" * 5000 + ":j"])
def test_a_cursor_that_no_page_gave_out(store: Store, cursor: str) -> None:
    """The error names the cursor."""
    with pytest.raises(ValueError, match=r"^cursor: .* was not given out by this store$"):
        store.letters.list(EVERYTHING, limit=5, cursor=cursor)


def test_a_cursor_may_hold_any_id(store: Store) -> None:
    """Colons and what no column holds."""
    for name in ("a:b:c", "d:\0", "e:\ud800", "f" * 300):
        store.letters.bury(letter(name))
    assert sorted(walk(store, 1)) == sorted(["a:b:c", "d:\0", "e:\ud800", "f" * 300])
    assert store.letters.list(EVERYTHING, limit=5, cursor="5:\ud800\0").letters == ()


@pytest.mark.requirement("DLQ-006", "DLQ-R004")
def test_stats(store: Store) -> None:
    """The letters are counted in all and by kind, with the first and the last time."""
    empty = store.letters.stats()
    assert (empty.total, empty.by_queue, empty.oldest_at, empty.newest_at) == (0, {}, None, None)
    store.letters.bury(letter("a", queue="q1", type="t1"))
    store.letters.bury(letter("b", queue="q1", type="t2", errors=(), discarded_at=NOW + timedelta(days=1)))
    store.letters.bury(letter("c", queue="q2", type="t2", errors=({"attempt": 1},)))
    stats = store.letters.stats()
    assert (stats.total, stats.by_queue, stats.by_type) == (3, {"q1": 2, "q2": 1}, {"t1": 1, "t2": 2})
    assert stats.by_error_type == {"external.timeout": 1, "Unknown": 2}
    assert (stats.oldest_at, stats.newest_at) == (NOW, NOW + timedelta(days=1))


@pytest.mark.requirement("DLQ-006", "DLQ-R004")
@pytest.mark.parametrize(
    ("where", "found"),
    [
        (Filter(queue="q0"), [0, 2, 4]),
        (Filter(type="t.*"), [0, 1, 3, 4]),
        (Filter(error_type="auth.*", queue="q1"), [3]),
        (Filter(since=NOW + timedelta(hours=1), until=NOW + timedelta(hours=4)), [1, 2, 3]),
        (Filter(type="t.a", since=NOW + timedelta(milliseconds=1)), [3]),
        (Filter(but_queues=frozenset({"q0"})), [1, 3, 5]),
        (Filter(type="t.*", until=NOW), []),
        (Filter(queue="nowhere"), []),
    ],
)
def test_stats_of_a_filter(store: Store, where: Filter, found: list[int]) -> None:
    """The counts, and the first and the last time, are those of the letters that a list finds."""
    for n in range(6):
        store.letters.bury(
            letter(
                f"j-{n}",
                queue=f"q{n % 2}",
                type=("t.a", "t.b", "other")[n % 3],
                errors=(entry(1, type="auth.expired" if n % 3 == 0 else "external.timeout"),),
                discarded_at=NOW + timedelta(hours=n),
            )
        )
    stats, listed = store.letters.stats(where), store.letters.list(where, limit=9, cursor=None).letters
    assert ids(store, where) == [f"j-{n}" for n in reversed(found)]
    assert (stats.total, stats.by_queue) == (len(found), Counter(x.queue for x in listed))
    assert (stats.by_type, stats.by_error_type) == (
        Counter(x.type for x in listed),
        Counter(x.error_type for x in listed),
    )
    times = [NOW + timedelta(hours=n) for n in found]
    assert (stats.oldest_at, stats.newest_at) == (min(times, default=None), max(times, default=None))


def test_the_beginning_of_an_id(store: Store) -> None:
    """The store takes the text as it is, in its case and its namespace, and returns so many ids at most."""
    named = ["order-1", "order-2", "order%", "order_", "order*x", "order[a]", "ORDER-3", "or\\der", "ordér"]
    for name in [*named, "order" + "x" * 300, "order\0"]:
        store.letters.bury(letter(name))
    for text, found in {
        "order-": ["order-1", "order-2"],
        "order%": ["order%"],
        "order_": ["order_"],
        "order*": ["order*x"],
        "order[a": ["order[a]"],
        "or\\": ["or\\der"],
        "ordé": ["ordér"],
        "ORDER": ["ORDER-3"],
        "order-1": ["order-1"],
        "order-12": [],
        "\0\ud800": [],
    }.items():
        assert sorted(store.letters.ids_beginning(text, 9)) == found, text
    assert len(store.letters.ids_beginning("order", 3)) == 3


@pytest.mark.requirement("DLQ-003")
def test_a_claim_has_the_letter_to_itself_for_its_time(store: Store) -> None:
    """A claim lasts until it is given back, or until its time is over."""
    store.letters.bury(letter())
    held = claim(store)
    assert held is not None
    assert claim(store) is None
    assert claim(store, now=NOW + timedelta(seconds=59.999)) is None
    store.letters.unclaim(["j-1"], held)
    again = claim(store, now=NOW + timedelta(seconds=1))
    assert again is not None
    assert claim(store, now=NOW + timedelta(seconds=61)) is not None


@pytest.mark.requirement("DLQ-R001")
def test_many_letters_are_claimed_and_deleted_at_once(store: Store) -> None:
    """Only free letters are claimed, as they are now; a claimed letter stays with its holder."""
    for n in range(700):
        store.letters.bury(letter(f"j-{n}", attempt=n + 1))
    assert claim(store, "j-5") is not None
    claimed = store.letters.claim([f"j-{n}" for n in range(650)] + ["nobody"], now=NOW, seconds=60)
    assert [found.id for found in claimed.letters] == [f"j-{n}" for n in range(650) if n != 5]
    assert claimed.letters[6] == letter("j-7", attempt=8)
    store.letters.unclaim([f"j-{n}" for n in range(600, 650)], claimed.claim)
    assert claim(store, "j-599") is None
    assert claim(store, "j-600") is not None
    assert store.letters.delete([f"j-{n}" for n in range(700)], claimed.claim) == 599
    assert store.letters.count(EVERYTHING) == 101
    assert store.letters.claim([], now=NOW, seconds=60).letters == ()
    assert store.letters.delete([], claimed.claim) == 0


@pytest.mark.requirement("DLQ-003")
def test_who_has_lost_a_claim_does_nothing_to_its_next_holder(store: Store) -> None:
    """The loser neither gives back the next holder's claim, nor deletes the letter."""
    store.letters.bury(letter())
    late = claim(store)
    held = claim(store, now=NOW + timedelta(seconds=60))
    assert late is not None
    assert held is not None
    store.letters.unclaim(["j-1"], late)
    assert claim(store, now=NOW + timedelta(seconds=61)) is None
    assert not store.letters.delete(["j-1"], late)
    assert store.letters.delete(["j-1"], held)
    assert store.letters.get("j-1") is None


@pytest.mark.requirement("DLQ-003")
def test_a_replay_that_has_died_again_is_not_deleted(store: Store) -> None:
    """The new letter is another letter, even at the same moment, and can be claimed at once."""
    store.letters.bury(letter())
    held = claim(store)
    assert held is not None
    store.letters.bury(letter(attempt=9))
    assert not store.letters.delete(["j-1"], held)
    assert store.letters.get("j-1") == letter(attempt=9)
    assert claim(store, now=NOW + timedelta(seconds=1)) is not None


def claims_of(url: str) -> list[str]:
    """The letters that this process has claimed of fifty that everybody wants."""
    store = open_store(url)
    return [f"j-{n}" for n in range(50) if claim(store, f"j-{n}") is not None]


@pytest.mark.requirement("DLQ-003")
def test_of_many_processes_one_wins(url: str, store: Store) -> None:
    """Each letter is claimed once."""
    for n in range(50):
        store.letters.bury(letter(f"j-{n}"))
    won = list(itertools.chain.from_iterable(in_processes(4, claims_of, url)))
    assert sorted(won) == sorted(f"j-{n}" for n in range(50))


@pytest.mark.requirement("DLQ-003")
def test_of_many_threads_one_wins(store: Store) -> None:
    """The threads share one store."""
    for n in range(20):
        store.letters.bury(letter(f"j-{n}"))
    start = threading.Barrier(8)

    def claims(_: int) -> list[str]:
        start.wait(90)
        return [f"j-{n}" for n in range(20) if claim(store, f"j-{n}") is not None]

    with ThreadPoolExecutor(8) as pool:
        won = list(itertools.chain.from_iterable(pool.map(claims, range(8))))
    assert sorted(won) == sorted(f"j-{n}" for n in range(20))


@pytest.mark.requirement("DLQ-002")
def test_kept_errors(store: Store) -> None:
    """Errors come in the order of their places; to keep or forget them again changes nothing."""
    store.letters.keep_errors("j-1", [(10, entry(11)), (2, entry(3)), (0, entry(1, type="first"))])
    store.letters.keep_errors("j-1", [(0, entry(1, type="again")), (1, entry(2))])
    store.letters.keep_errors("j-1", [])
    kept = [(0, entry(1, type="first")), (1, entry(2)), (2, entry(3)), (10, entry(11))]
    assert store.letters.kept_errors("j-1") == kept
    store.letters.keep_errors("j-2", [(0, entry(1))])
    for _ in range(2):
        store.letters.forget_errors("j-1")
        assert store.letters.kept_errors("j-1") == []
    assert store.letters.kept_errors("j-2") == [(0, entry(1))]


@pytest.mark.requirement("DLQ-002")
def test_a_hostile_entry_is_kept_as_it_is(store: Store) -> None:
    """Another system may put any value where a number is expected."""
    hostile: list[ErrorEntry] = [
        {"attempt": "one; drop table", "replay": 2**80},
        {"attempt": {"a": []}, "replay": None},
        {"attempt": -1e308, "message": "m" * 200_000},
        {},
    ]
    placed = list(enumerate(hostile, start=-2))
    store.letters.keep_errors("j-1", placed)
    assert store.letters.kept_errors("j-1") == placed


def test_a_place_that_no_database_has(store: Store) -> None:
    """Such a place comes from a damaged header, and raises a StoreError."""
    with pytest.raises(StoreError):
        store.letters.keep_errors("j-1", [(2**70, entry())])
    assert store.letters.kept_errors("j-1") == []


@pytest.mark.requirement("DLQ-002")
def test_what_is_buried_is_no_longer_kept(store: Store) -> None:
    """The letter has it, and the job's next life begins without it."""
    store.letters.keep_errors("j-1", [(0, entry(1))])
    store.letters.keep_errors("j-2", [(0, entry(1))])
    store.letters.bury(letter())
    assert store.letters.kept_errors("j-1") == []
    assert store.letters.kept_errors("j-2") == [(0, entry(1))]


def test_namespaces_see_nothing_of_each_other(url: str) -> None:
    """Both namespaces are in one database."""
    one, two = open_store(url, "one"), open_store(url, "two")
    one.letters.bury(letter(queue="of one"))
    one.letters.keep_errors("j-9", [(0, entry())])
    assert (ids(two), two.letters.get("j-1"), two.letters.stats().total, two.letters.kept_errors("j-9")) == (
        [],
        None,
        0,
        [],
    )
    assert claim(two) is None
    two.letters.bury(letter(queue="of two"))
    assert delete(two, "j-1")
    two.letters.forget_errors("j-9")
    assert one.letters.get("j-1") == letter(queue="of one")
    assert one.letters.kept_errors("j-9") == [(0, entry())]


def test_a_forked_child_has_connections_of_its_own(store: Store) -> None:
    """Both use the store at the same time, and neither disturbs the other."""
    store.letters.bury(letter("before"))
    busy, stop = threading.Event(), threading.Event()

    def keep_busy() -> None:
        for n in itertools.count():
            store.letters.bury(letter(f"parent-{n % 20}"))
            busy.set()
            if stop.is_set():
                return

    parent = threading.Thread(target=keep_busy)
    parent.start()
    try:
        assert busy.wait(90)
        found = in_processes(3, use_inherited, store)
    finally:
        stop.set()
        parent.join(90)
    assert found == ["before"] * 3
    assert len([i for i in ids(store) if i.startswith("child")]) == 30


def use_inherited(store: Store) -> str:
    """Use a store that was opened before the fork."""
    for n in range(10):
        store.letters.bury(letter(f"child-{os.getpid()}-{n}"))
    found = store.letters.get("before")
    store.close()
    return found.id if found else "nothing"


def test_a_closed_store_opens_again(store: Store) -> None:
    """Closing only gives connections back."""
    store.letters.bury(letter())
    store.close()
    assert ids(store) == ["j-1"]


UNREACHABLE = [
    f"postgresql+psycopg://ojs:{SECRET.replace('@', '%40').replace('/', '%2F')}@127.0.0.1:1/nowhere",
    "postgresql+psycopg://ojs@127.0.0.1:1/nowhere?password=s3cr:t",
    "sqlite:////no/such/folder/ojs.db",
]


@pytest.mark.parametrize("url", UNREACHABLE)
def test_a_database_out_of_reach(url: str) -> None:
    """A readable error from every method, without the password."""
    store = open_store(url)
    for use in (store.prepare, store.letters.stats, lambda: store.letters.bury(letter()), lambda: ids(store)):
        with pytest.raises(StoreError, match=r"^the store '(postgresql|sqlite).* failed: ") as error:
            use()
        assert "s3cr" not in str(error.value)


REFUSED = [
    ("ojs.db", "store: 'ojs.db' is not a URL such as sqlite:///ojs.db"),
    ("", "store: '' is not a URL such as sqlite:///ojs.db"),
    ("postgresql:u:{}@h/db", "store: '***@h/db' is not a URL such as sqlite:///ojs.db"),
    ("://", "store: '://' is not a store that ojs-bridge knows: it takes sqlite:///file, "),
    ("nosuch://u:{}@h/db", "store: 'nosuch://***@h/db' is not a store that ojs-bridge knows: it takes "),
    ("oracle://u:{}@h/db", "store: 'oracle://***@h/db' is not a store that ojs-bridge knows: it takes "),
    ("sentinel://u:{}@h/db", "store: 'sentinel://***@h/db' is not a store that"),
    ("redis+socket:///s", "store: 'redis+socket:///s' is not a store that "),
    ("redis+sentinel://u:p@h:26379", "store: 'redis+sentinel://***@h:26379': it names no master: write "),
    ("redis+sentinel://u:{}@h/m", "store: 'redis+sentinel://***@h/m': write the password with %2F, "),
    ("redis+sentinel://h/m/one?sentinel_password=s3cr", "store: 'redis+sentinel://h/m/one?sentinel_pas"),
    ("rediss+sentinel://u:p@a,b:x/m", "store: 'rediss+sentinel://***@a,b:x/m': 'b:x' is not a host"),
    ("redis+sentinel://h/m?nosuch=1", "store: 'redis+sentinel://h/m?nosuch=1' is not a Redis URL: "),
    ("redis+cluster://u:p@a,,b", "store: 'redis+cluster://***@a,,b': '' is not a host"),
    ("redis+cluster://u:p@h:1/2", "store: 'redis+cluster://***@h:1/2': database 2: a cluster has"),
    ("postgresql+nosuch://u:{}@h/db", "store: 'postgresql+nosuch://***@h/db' is not a store that "),
    ("postgresql+pg8000://u:{}@h/db", "store: the driver of 'postgresql+pg8000://***@h/db' is not installed"),
    ("postgresql+psycopg://u:{}@h:port/db", "store: 'postgresql+psycopg://***@h:port/db' is not a"),
    ("postgresql+pg8000://h/db?password=s3cr&x=1", "store: the driver of 'postgresql+pg8000://h/db?password=***&x=1'"),
    ("sqlite://", "store: 'sqlite://' would be gone with the process: name a file, as in sqlite:///ojs.db"),
    ("sqlite:///:memory:", "store: 'sqlite:///:memory:' would be gone with the process"),
]  # fmt: skip


@pytest.mark.parametrize(("url", "message"), REFUSED)
def test_a_store_that_cannot_be_opened(url: str, message: str) -> None:
    """The URL is named, without its password."""
    with pytest.raises(ConfigurationError) as error:
        open_store(url.format(SECRET))
    assert str(error.value).startswith(message)
    assert not any(part in str(error.value) for part in ("s3cr", "p@ss", "plugin"))


@pytest.mark.parametrize("url", ["postgresql://h/db", "postgres://h/db", "postgresql+psycopg://h/db"])
def test_a_missing_driver_names_its_extra(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("psycopg", "psycopg2"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigurationError, match=r"pip install 'ojs-bridge\[postgresql\]'"):
        open_store(url)


WITHOUT_A_HOST = [
    "redis://:{}:6379/0",
    "redis://u:{}",
    "redis://{}",
    "redis://{}:6379",
    "redis+sentinel://u:{}/mymaster",
    "redis+sentinel://:{}:26379/mymaster",
    "redis+cluster://u:{}",
    "redis:/:{}:6379",
    "valkeys://:{}/0",
    "sentinel://:{}/m",
    "nosuch://:{}",
    "postgresql://u:{}/db",
    "postgresql://{}/db",
    "postgresql:u:{}/db",
]


@pytest.mark.parametrize("url", WITHOUT_A_HOST)
def test_a_url_whose_host_was_forgotten_hides_its_password(url: str) -> None:
    """In errors and in the health; a driver repeats it in small letters."""
    try:
        bridge = Bridge(url.format("S3cr3tPw"), reservation="PT20S")
        told = str(bridge.health.check().to_ojs())
        with pytest.raises(StoreError) as error:
            bridge.counts()
        told += str(error.value)
    except ConfigurationError as wrong:
        told = str(wrong)
    assert "***" in told
    assert "s3cr3tpw" not in told.lower()


HINTS = [
    ("sentinel://h", "write redis+sentinel://host:26379,other:26379/mymaster"),
    ("redis+socket:///s", "unix:///path/to/redis.sock?db=0"),
    ("postgresql+nosuch://h/db", "no driver has the name 'postgresql+nosuch'"),
]


@pytest.mark.parametrize(("url", "hint"), HINTS)
def test_a_url_that_others_know_says_what_to_write(url: str, hint: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        open_store(url)
    assert hint in str(error.value)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg"])
def test_a_url_of_postgresql_as_platforms_hand_it_out(postgres_url: str, scheme: str) -> None:
    """The store uses psycopg for each of these schemes."""
    store = open_store(f"{scheme}://{postgres_url.partition('://')[2]}")
    store.letters.bury(letter())
    assert ids(store) == ["j-1"]
    store.close()


@pytest.mark.parametrize("namespace", ["", "x" * 65, "a\0b", "a\nb", 5, None])
def test_a_namespace_that_no_store_can_have(namespace: Any) -> None:
    """The error names the namespace."""
    with pytest.raises(ConfigurationError, match=r"^namespace: .* must be 1 to 64 printable characters$"):
        open_store("sqlite:///x.db", namespace)


def test_a_letter_in_the_shape_of_the_spec() -> None:
    """Section 9 of the dead letter document; `occurred_at` repeats each timestamp."""
    shown = replace(letter(), created_at=NOW, errors=(entry(3, timestamp="t"),)).to_ojs()
    assert shown == {
        "id": "j-1",
        "type": "billing.charge",
        "queue": "default",
        "args": [7],
        "kwargs": None,
        "meta": {},
        "note": "",
        "state": "discarded",
        "attempt": 3,
        "max_attempts": 3,
        "discarded_at": "2026-11-21T10:00:02.345Z",
        "errors": [{**entry(3), "timestamp": "t", "occurred_at": "t"}],
        "metadata": {
            "framework": "dramatiq",
            "cause": "exhausted",
            "reason": "no attempt is left",
            "created_at": "2026-11-21T10:00:02.345Z",
            "discarded_at": "2026-11-21T10:00:02.345Z",
            "ojs.replay_count": 0,
            "fingerprint": "857b9a0441797aff",
        },
        "retry": None,
        "policy": None,
        "parameters": [],
        "hidden": [],
    }
