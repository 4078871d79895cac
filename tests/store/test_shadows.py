"""The tallies of shadow mode: the same in every store."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from ojs_bridge import open_store
from ojs_bridge.store import Store, Tally
from tests.store.processes import in_processes
from tests.store.test_store import NOW

DELAY = Tally("celery", "billing.charge", "delay", 2, NOW, "it waited 26 s", ({"job_id": "j-1"},))
SAME = Tally("celery", "billing.charge", "same", 40, NOW)


def examples(*ids: str) -> tuple[dict[str, Any], ...]:
    return tuple({"job_id": job_id, "attempt": 1} for job_id in ids)


def test_tallies_come_back_as_they_were(store: Store) -> None:
    """Tallies come in the order of framework, task and kind, whatever text they hold."""
    odd = Tally("dramatiq", 'émail\n"{}', "delay", 1, NOW, "a \0 b \ud800"[:3], examples("j-é"))
    assert store.shadows() == []
    store.record_shadows([odd, SAME, DELAY])
    found = store.shadows()
    assert found[:2] == [DELAY, SAME]
    assert (found[2].task, found[2].examples) == (odd.task, odd.examples)
    store.record_shadows([])
    assert len(store.shadows()) == 3


def test_counts_add_up(store: Store) -> None:
    """The last explanation counts, and when it was said."""
    later = NOW + timedelta(seconds=5)
    store.record_shadows([DELAY, SAME])
    store.record_shadows([replace(DELAY, count=5, last_seen=later, explanation="it waited 9 s")])
    delay, same = store.shadows()
    assert (delay.count, delay.last_seen, delay.explanation) == (7, later, "it waited 9 s")
    assert same == SAME


#: The examples that are there, the new ones, and those that are kept.
KEPT = [
    *(("a", "b", "b"), ("abc", "d", "abc"), ("abc", "def", "def"), ("ab", "cde", "cde")),
    *(("a", "", "a"), ("", "a", "a"), ("", "", "")),
]


def test_examples_never_become_fewer(store: Store) -> None:
    """New ones take the place of as many, or fewer."""
    for place in (0, 1):
        written = [replace(DELAY, task=f"t{n}", examples=examples(*row[place])) for n, row in enumerate(KEPT)]
        store.record_shadows(written)
    assert [tally.examples for tally in store.shadows()] == [examples(*kept) for *_, kept in KEPT]


def test_clearing(store: Store) -> None:
    """Everything is forgotten, and counted from nothing."""
    store.record_shadows([DELAY, SAME])
    assert store.clear_shadows() == 2
    assert (store.shadows(), store.clear_shadows()) == ([], 0)
    store.record_shadows([SAME])
    assert store.shadows() == [SAME]


def test_namespaces_are_apart(url: str) -> None:
    """A namespace neither sees nor clears the tallies of another."""
    one, other = open_store(url, "one"), open_store(url, "other")
    one.record_shadows([SAME])
    assert (other.shadows(), other.clear_shadows()) == ([], 0)
    assert one.shadows() == [SAME]
    one.close()
    other.close()


def add_often(url: str) -> None:
    """Add to two tallies many times, in either order."""
    store = open_store(url)
    for n in range(20):
        store.record_shadows([SAME, DELAY] if n % 2 else [DELAY, SAME])


def test_many_workers_add_at_once(url: str) -> None:
    """No tally is lost, and no worker waits for ever."""
    assert in_processes(4, add_often, url) == [None] * 4
    store = open_store(url)
    assert [tally.count for tally in store.shadows()] == [160, 3200]
    store.close()
