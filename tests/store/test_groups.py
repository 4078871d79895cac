"""Groups of dead letters in every kind of store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest

from ojs_bridge.spec.fingerprint import fingerprint
from ojs_bridge.store import Group, Letter, LetterFilter, Store
from ojs_bridge.store.records import group_number, group_of_number
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
    store.bury(died("a2", 1, "user 22 is slow", queue="q2", type="t.a"))
    store.bury(died("a3", 3.5, "user 333 is slow", queue="q1"))
    store.bury(died("b1", 1, "no 'x'", queue="q2"))
    store.bury(died("b2", 1.5, "no 'y'", queue="q2"))
    store.bury(died("c1", 2, "gone", queue="q3"))


USER, NO, GONE = (fingerprint("external.timeout", text) for text in ("user 1 is slow", "no 'x'", "gone"))


def groups(store: Store, where: LetterFilter | None = None, **asked: Any) -> list[Group]:
    """The groups of a store."""
    given: dict[str, Any] = {"order": "last", "but": (), "times": TIMES, "limit": 9, "offset": 0, **asked}
    return store.groups(where or LetterFilter(), **given)


def names(found: Sequence[Group]) -> list[str]:
    """The fingerprints of groups."""
    return [group.fingerprint for group in found]


def test_a_group_has_its_count_its_times_and_what_it_touches(store: Store) -> None:
    """And the newest letter, and the deaths of each hour."""
    fill(store)
    user, gone, no = groups(store)
    assert (user.fingerprint, user.count, user.first_at, user.last_at) == (USER, 3, NOW, NOW + 3.5 * HOUR)
    assert sorted(user.queues) == ["q1", "q2"]
    assert sorted(user.types) == ["billing.charge", "t.a"]
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


FILTERS: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"queue": "q2"}, {NO: 2, USER: 1}),
    ({"type": "t.*"}, {USER: 1}),
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
    found = groups(store, LetterFilter(**where))
    assert {group.fingerprint: group.count for group in found} == counts


def test_a_group_is_a_filter_as_any_other(store: Store) -> None:
    """Lists, counts and statistics know it."""
    fill(store)
    where = LetterFilter(group=USER)
    assert ids(store, where) == ["a3", "a2", "a1"]
    assert ids(store, LetterFilter(group=USER, queue="q1", until=NOW + HOUR)) == ["a1"]
    assert store.count(where) == 3
    assert store.stats(where).by_queue == {"q1": 2, "q2": 1}
    first = store.list(where, limit=2, cursor=None, oldest_first=True)
    second = store.list(where, limit=2, cursor=first.next_cursor, oldest_first=True)
    assert [each.id for each in (*first.letters, *second.letters)] == ["a1", "a2", "a3"]
    assert ids(store, LetterFilter(group="0" * 16)) == []


def test_a_letter_leaves_its_group_with_its_last_error_and_with_the_store(store: Store) -> None:
    """However it leaves: another death, a deletion, a pruning."""
    fill(store)
    store.bury(died("a3", 3, "gone"))
    assert names(groups(store)) == [GONE, NO, USER]
    assert store.prune(store.list(LetterFilter(group=NO), limit=9, cursor=None).letters, now=NOW) == 2
    claimed = store.claim(["a1", "a2"], now=NOW, seconds=9)
    store.delete(["a1", "a2"], claimed.claim)
    [gone] = groups(store)
    assert (gone.fingerprint, gone.count, gone.deaths) == (GONE, 2, (0, 0, 1, 1))
    assert store.count(LetterFilter(group=NO)) == store.count(LetterFilter(group=USER)) == 0


def test_a_fingerprint_that_was_kept_stays(store: Store) -> None:
    """Even if a later release were to count the error to another group."""
    store.bury(died("a", 0, fingerprint="00000000000000ff"))
    store.bury(died("b", 0, fingerprint="ff000000000000ff"))
    assert set(names(groups(store))) == {"00000000000000ff", "ff000000000000ff"}
    assert ids(store, LetterFilter(group="ff000000000000ff")) == ["b"]


@pytest.mark.parametrize("text", ["0" * 16, "f" * 16, "7" + "f" * 15, "8" + "0" * 15])
def test_a_fingerprint_is_a_number_of_64_bits(text: str) -> None:
    """Every fingerprint is."""
    assert group_of_number(group_number(text)) == text
