"""Retention works alike on every store."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from ojs_bridge.store import Filter, Store
from tests.store.test_store import EVERYTHING, NOW, claim, ids, letter

HOUR = timedelta(hours=1)
#: what is asked for -> the hours, of the letters j-0 to j-5 which died an hour apart, that are found
SPANS: dict[str, tuple[Filter, list[int]]] = {
    "everything": (EVERYTHING, [0, 1, 2, 3, 4, 5]),
    "since": (Filter(since=NOW + 2 * HOUR), [2, 3, 4, 5]),
    "until": (Filter(until=NOW + 2 * HOUR), [0, 1]),
    "both": (Filter(since=NOW + HOUR, until=NOW + 3 * HOUR), [1, 2]),
    "nothing": (Filter(since=NOW + 3 * HOUR, until=NOW + HOUR), []),
    "of a queue": (Filter(queue="even", until=NOW + 4 * HOUR), [0, 2]),
    "but one queue": (Filter(but_queues=frozenset(["even"]), since=NOW + HOUR), [1, 3, 5]),
    "but all queues": (Filter(but_queues=frozenset(["even", "odd"])), []),
    "a queue and not": (Filter(queue="even", but_queues=frozenset(["even"])), []),
    "of a type": (Filter(type="billing.*", since=NOW + 4 * HOUR), [4, 5]),
    "of no type": (Filter(type="mail.*"), []),
}


@pytest.fixture
def hourly(store: Store) -> Store:
    """A store with six letters, which died an hour apart."""
    for n in range(6):
        store.letters.bury(letter(f"j-{n}", discarded_at=NOW + n * HOUR, queue=("even", "odd")[n % 2]))
    return store


@pytest.mark.requirement("DLQ-006")
@pytest.mark.parametrize(("where", "found"), SPANS.values(), ids=SPANS)
@pytest.mark.parametrize("oldest_first", [False, True])
def test_spans_of_time(hourly: Store, where: Filter, found: list[int], oldest_first: bool) -> None:
    """A span can be listed in either order, page by page, and counted."""
    seen: list[str] = []
    cursor = None
    for _ in range(10):
        page = hourly.letters.list(where, limit=2, cursor=cursor, oldest_first=oldest_first)
        seen += [letter.id for letter in page.letters]
        cursor = page.next_cursor
        if cursor is None:
            break
    expected = [f"j-{n}" for n in found]
    assert seen == (expected if oldest_first else expected[::-1])
    assert hourly.letters.count(where) == len(expected)


@pytest.mark.requirement("DLQ-004")
def test_what_is_pruned_is_gone(hourly: Store) -> None:
    """A pruned letter is in no listing and in no count, and a second pruning finds nothing."""
    doomed = hourly.letters.list(Filter(until=NOW + 4 * HOUR), limit=10, cursor=None).letters
    assert hourly.letters.prune(doomed, now=NOW) == 4
    assert ids(hourly) == ["j-5", "j-4"]
    assert ids(hourly, Filter(queue="even")) == ["j-4"]
    assert (hourly.letters.stats().total, hourly.letters.count(EVERYTHING)) == (2, 2)
    assert hourly.letters.prune(doomed, now=NOW) == 0


@pytest.mark.requirement("DLQ-004")
def test_what_is_replayed_or_has_died_again_is_not_pruned(hourly: Store) -> None:
    """A claim that has run out protects nothing."""
    doomed = hourly.letters.list(EVERYTHING, limit=10, cursor=None).letters
    assert claim(hourly, "j-0")
    assert claim(hourly, "j-1", now=NOW - HOUR)
    hourly.letters.bury(replace(doomed[0], discarded_at=NOW + 9 * HOUR))
    assert hourly.letters.prune(doomed, now=NOW) == 4
    assert ids(hourly) == ["j-5", "j-0"]


def test_pruning_nothing(store: Store) -> None:
    """A pruning that finds no letter is no error."""
    assert store.letters.prune([], now=NOW) == 0
    assert store.letters.prune([letter()], now=NOW) == 0
    assert store.letters.count(EVERYTHING) == 0


@pytest.mark.requirement("DLQ-004")
def test_a_thousand_at_a_time(store: Store) -> None:
    """More than one statement may name."""
    many = [letter(f"j-{n}", discarded_at=NOW + n * timedelta(seconds=1)) for n in range(1000)]
    for each in many:
        store.letters.bury(each)
    assert store.letters.prune(many, now=NOW) == 1000
    assert store.letters.stats().total == 0
