"""A Redis whose memory is full: an operator frees it, and every refusal says how."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ojs_bridge import Bridge, StoreError
from ojs_bridge.operations.audit import DELETION
from ojs_bridge.store import Store
from tests.cli.running import run
from tests.servers import Valkey
from tests.store.test_parked import parked
from tests.store.test_store import entry, letter

LONG = (entry(1, message="x" * 20_000),)


@pytest.fixture
def full() -> Iterator[tuple[Bridge, str]]:
    """A bridge on a small server that takes no letter any more, with a job that waits."""
    with Valkey(maxmemory="4mb") as server:
        bridge = Bridge(server.url)
        store = store_of(bridge)
        store.parked.park(parked("waits"))
        with pytest.raises(StoreError):
            for n in range(1000):
                store.letters.bury(letter(f"j-{n:03}", errors=LONG))
        for small in range(10_000):
            # Not even a small one.
            try:
                store.letters.bury(letter(f"k-{small}"))
            except StoreError:
                break
        yield bridge, server.url


def store_of(bridge: Bridge) -> Store:
    assert bridge.store is not None
    return bridge.store


def test_only_what_is_deleted_for_ever_leaves_a_full_memory(full: tuple[Bridge, str]) -> None:
    """A deletion into the bin is refused, and says so; nothing of it is done, or stands in the way."""
    bridge, url = full
    count = bridge.dead_letters.stats().total
    for words in (("delete", "j-000"), ("purge", "--all")):
        refused = run("dead-letters", *words, "--yes", store=url)
        assert refused.code == 3
        assert "give it more memory, or delete dead letters for ever (--forever)" in refused.err
    assert bridge.dead_letters.stats().total == count
    ran = run("dead-letters", "delete", "j-000", "--forever", "--yes", store=url)
    assert (ran.code, ran.out) == (0, "j-000: deleted\n")
    ran = run("dead-letters", "purge", "--all", "--forever", "--yes", store=url)
    assert (ran.code, ran.out) == (0, f"{count - 1} dead letters deleted\n")
    # There is room again, and all is on record.
    store_of(bridge).letters.bury(letter("new", errors=LONG))
    records = bridge.audit.list(action=DELETION).records
    assert [record.outcome for record in records] == ["done", "done", "failed", "failed"]
    assert [one.state for one in bridge.operations.list()] == ["done", "failed"]


def test_other_ways_to_free_a_full_memory(full: tuple[Bridge, str]) -> None:
    """What waits is cancelled, and the limits of the retention are enforced."""
    bridge, url = full
    ran = run("waiting", "cancel", "--all", "--yes", store=url)
    assert (ran.code, store_of(bridge).parked.count()) == (0, 0)
    words = ("dead-letters", "prune", "--max-age", "P180D", "--max-count", "5", "--yes")
    assert run(*words, store=url).code == 0
    assert bridge.dead_letters.stats().total == 5
    store_of(bridge).letters.bury(letter("new", errors=LONG))
