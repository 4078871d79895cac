"""Parked retries claimed by their keys, as a drain does: the same in every store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ojs_bridge import open_store
from ojs_bridge.store import Due, Store
from tests.store.test_parked import NOW, after, claimed, parked


def test_retries_are_claimed_by_their_keys_due_or_not(store: Store) -> None:
    """Only unclaimed retries are claimed, and nobody else gets them meanwhile."""

    def claim_keys(*keys: str, at: float = 0.0) -> Due:
        return store.parked.claim(keys, now=after(at), until=after(at + 60))

    for n, name in enumerate("abcd"):
        store.parked.park(parked(name, due=60.0 * n))
    assert claimed(store) == ["a"]
    due = claim_keys("a", "b", "c", "nobody")
    assert {retry.key for retry in due.retries} == {"b", "c"}
    assert claimed(store, at=59.999) == []
    assert claim_keys("b", "c", at=59.999).retries == ()
    store.parked.unclaim([retry for retry in due.retries if retry.key == "b"], due.claim)
    assert store.parked.unpark(due.retries, due.claim) == 1
    assert {retry.key for retry in claim_keys(*"abcd", at=60).retries} == {"a", "b", "d"}


def test_many_keys_are_claimed_by_one_of_many(url: str, store: Store) -> None:
    """Each key is claimed by one of many callers, and no key is left."""
    names = [f"j-{n:03}" for n in range(700)]
    for name in names:
        store.parked.park(parked(name, 3600))
    stores = [open_store(url) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        told = pool.map(lambda s: s.parked.claim(names, now=NOW, until=after(60)), stores)
        keys_of = [[retry.key for retry in due.retries] for due in told]
    assert sorted(key for keys in keys_of for key in keys) == names
