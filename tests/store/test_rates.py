"""Rates are added up in every store, by minute and by hour, and forgotten in time."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import pytest

from ojs_bridge.store import BOUNDS, Rate, Store, open_store
from tests.servers import eventually
from tests.store.processes import in_processes
from tests.store.test_settled import waits_for_the_disk

MINUTE, HOUR = timedelta(minutes=1), timedelta(hours=1)
#: Near enough to now that Redis does not forget it.
AT = datetime.now(timezone.utc).replace(minute=58, second=0, microsecond=0) - HOUR


def rate(
    count: int,
    *,
    at: datetime = AT,
    type_: str = "charge",
    queue: str = "default",
    outcome: str = "completed",
) -> Rate:
    return Rate(at, type_, queue, outcome, (count, *[0] * len(BOUNDS)))


def record(store: Store, rates: Sequence[Rate]) -> None:
    """Record rates, as a writer that has not done so before."""
    store.documents.record_rates(rates, uuid4().hex, 1)


def test_counts_are_added_up(store: Store) -> None:
    """A minute's counts are added to the minute and to its hour; times between count for their minute."""
    record(store, [rate(2), rate(3, at=AT + MINUTE), rate(5, at=AT + 2 * MINUTE), rate(7, outcome="retried")])
    record(store, [rate(10, at=AT + timedelta(seconds=59)), rate(1, queue="slow")])
    record(store, [])
    by_minute = store.documents.rates(AT, AT + HOUR, "minute")
    assert sorted((one.at, one.queue, one.outcome, one.counts[0]) for one in by_minute) == [
        (AT, "default", "completed", 12),
        (AT, "default", "retried", 7),
        (AT, "slow", "completed", 1),
        (AT + MINUTE, "default", "completed", 3),
        (AT + 2 * MINUTE, "default", "completed", 5),
    ]
    assert [one.at for one in by_minute] == sorted(one.at for one in by_minute)
    hour = AT.replace(minute=0)
    by_hour = store.documents.rates(hour, hour + 2 * HOUR, "hour")
    assert {(one.at, one.queue, one.outcome): one.counts[0] for one in by_hour} == {
        (hour, "default", "completed"): 15,
        (hour, "default", "retried"): 7,
        (hour, "slow", "completed"): 1,
        (hour + HOUR, "default", "completed"): 5,
    }
    assert store.documents.rates(AT + MINUTE, AT + 2 * MINUTE, "minute") == [rate(3, at=AT + MINUTE)]


def test_each_duration_has_its_count(store: Store) -> None:
    """The durations stay apart, and names of any text are kept as every index can hold them."""
    counts = tuple(range(len(BOUNDS) + 1))
    record(store, [Rate(AT, "ü\0\ud800" + "x" * 300, "", "completed", counts)])
    (found,) = store.documents.rates(AT, AT + MINUTE, "minute")
    assert found.counts == counts
    assert found.type == ("ü\N{REPLACEMENT CHARACTER}?" + "x" * 300)[:255]


def add_up(url: str) -> None:
    """Add to the same counts many times, in another order each time, and some of them alone."""
    store = open_store(url)
    rates = [rate(1, type_=name, at=at) for name in ("a", "b", "c", "d") for at in (AT, AT + MINUTE)]
    for _ in range(20):
        random.shuffle(rates)
        record(store, rates[:5])
        record(store, rates[5:])


def test_no_count_of_many_writers_is_lost(url: str) -> None:
    """Processes that write the same rates at the same time neither lose a count nor wait for each other."""
    open_store(url).prepare()
    in_processes(4, add_up, url)
    assert [one.counts[0] for one in open_store(url).documents.rates(AT, AT + HOUR, "minute")] == [80] * 8


def test_no_writer_waits_for_the_disk_of_another(postgres_url: str) -> None:
    """While one process commits a minute's counts, all others of its fleet would wait for their rows."""
    store = open_store(postgres_url)
    rates = [rate(1, at=AT + n * MINUTE) for n in range(20)]
    eventually(
        lambda: not waits_for_the_disk(postgres_url, lambda: record(store, rates) is None),
        what="a write that does not wait",
    )


@pytest.mark.parametrize("span", ["minute", "hour"])
def test_rates_are_forgotten_in_time(store: Store, span: str) -> None:
    """Minutes are kept for a day and hours for 14 days, whatever else is in the store."""
    old = AT.replace(minute=0) - (timedelta(hours=25) if span == "minute" else timedelta(days=15))
    record(store, [rate(1, at=old), rate(1)])
    store.documents.forget_rates(datetime.now(timezone.utc))
    assert store.documents.rates(old, old + HOUR, span) == []  # type: ignore[arg-type]
    assert len(store.documents.rates(AT.replace(minute=0), AT + HOUR, span)) == 1  # type: ignore[arg-type]
    assert len(store.documents.rates(old, old + HOUR, "hour")) == (1 if span == "minute" else 0)


def test_a_newer_version_may_tell_longer_times_apart_on_valkey(valkey_url: str) -> None:
    """What it counts beyond the last bound of this version counts there."""
    store = open_store(valkey_url)
    record(store, [rate(1), Rate(AT, "charge", "default", "completed", (*[0] * len(BOUNDS), 3, 2))])
    (read,) = store.documents.rates(AT, AT + MINUTE, "minute")
    assert read.counts == (1, *[0] * (len(BOUNDS) - 1), 5)
    store.close()


def test_a_batch_that_is_repeated_counts_once_on_valkey(valkey_url: str) -> None:
    """Also when it comes after a later one."""
    store = open_store(valkey_url)
    for number in (1, 1, 2, 1, 3):
        store.documents.record_rates([rate(1)], "a", number)
    store.documents.record_rates([rate(1)], "b", 1)
    [found] = store.documents.rates(AT, AT + MINUTE, "minute")
    assert found.counts[0] == 4
