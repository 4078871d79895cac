"""Each run is counted once by its outcome, and a store that is away costs counts, never jobs."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, StoreError
from ojs_bridge.engine import rates
from ojs_bridge.engine.rates import MAX_COUNTS, OTHER, Rates, outcomes
from ojs_bridge.engine.runs import Run
from ojs_bridge.operations.rates import MAX_TYPES, RateHistory, quantile
from ojs_bridge.rules.decision import (
    Complete,
    DeadLettered,
    Decision,
    Discarded,
    GiveBack,
    RetryAt,
    SnoozeUntil,
)
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job
from ojs_bridge.store import BOUNDS, Rate, Store, open_store
from tests.servers import Valkey
from tests.servers.process import eventually
from tests.store.test_rates import record

NOW = datetime.now(timezone.utc)
ERROR, LOST = Failure("app.Error", ""), Failure("visibility_timeout", "")
JOB = Job("j", "charge", "default")
FAILED = JOB.failed(ERROR, at=NOW - timedelta(seconds=100), next_at=NOW)
SENT = FAILED._replace(created_at=NOW - timedelta(seconds=200))
REPLAYED = FAILED.replayed()
UNREADABLE = FAILED._replace(errors=({"timestamp": "yesterday"}, *FAILED.errors))


@pytest.mark.parametrize(
    ("job", "decision", "expected"),
    [
        (JOB, Complete(), {"completed": 2}),
        (FAILED, Complete(), {"completed": 2, "recovered": 100}),
        (SENT, Complete(), {"completed": 2, "recovered": 200}),
        (UNREADABLE, Complete(), {"completed": 2}),
        (REPLAYED, Complete(), {"completed": 2, "replay_completed": 2}),
        (JOB, RetryAt(NOW, 60, ERROR, ""), {"retried": 2, "waits_in_broker": 60}),
        (JOB, RetryAt(NOW, 61, ERROR, ""), {"retried": 2}),
        (JOB, RetryAt(NOW, 61, LOST, ""), {"retried": 2, "lost": 2}),
        (JOB, RetryAt(NOW, 1e300, ERROR, ""), {"retried": 2}),
        (JOB, SnoozeUntil(NOW, 1, ""), {"snoozed": 2}),
        (JOB, Discarded("handler", ERROR, ""), {"discarded": 2}),
        (JOB, Discarded("exhausted", LOST, ""), {"discarded": 2, "exhausted": 2, "lost": 2}),
        (JOB, DeadLettered("exhausted", ERROR, ""), {"dead_lettered": 2, "exhausted": 2}),
        (REPLAYED, DeadLettered("handler", ERROR, ""), {"dead_lettered": 2, "replay_died": 2}),
        (JOB, GiveBack(), {}),
    ],
)
def test_outcomes(job: Job, decision: Decision, expected: dict[str, float]) -> None:
    """Each decision counts for one outcome, and for what else is known of the run."""
    found = outcomes(job, decision, 2.0, NOW, timedelta(minutes=1))
    assert {outcome: round(seconds, 1) for outcome, seconds in found} == expected


def counted(store: Store) -> Counter[tuple[str, str]]:
    """All counts of the last hour, by job type and outcome."""
    found: Counter[tuple[str, str]] = Counter()
    for rate in store.documents.rates(NOW - timedelta(hours=1), NOW + timedelta(hours=1), "minute"):
        found[rate.type, rate.outcome] += sum(rate.counts)
    return found


def counting(store: Store) -> Rates:
    clock = partial(datetime.now, timezone.utc)
    return Rates(store.documents, clock, store.clock, timedelta(minutes=1))


def test_runs_are_added_up(tmp_path: Path) -> None:
    """A close writes what was counted, with each duration in its place; the counter goes on after it."""
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    counter = counting(store)
    for seconds in (0.0, 0.01, 0.02, 1e9):
        counter.count(JOB, Complete(), seconds)
    counter.close(30)
    (rate,) = store.documents.rates(NOW - timedelta(hours=1), NOW + timedelta(hours=1), "minute")
    assert rate.counts == (2, 1, *[0] * (len(BOUNDS) - 2), 1)
    counter.count(JOB, Complete(), 0)
    counter.close(30)
    assert counted(store) == {("charge", "completed"): 5}


def test_a_forked_child_counts_its_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child does not write what its parent has counted."""
    monkeypatch.setattr(rates, "PERIOD", 60.0)
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    counter = counting(store)
    counter.count(JOB, Complete(), 0)
    child = os.fork()
    if not child:
        counter.count(JOB, SnoozeUntil(NOW, 1, ""), 0)
        counter.close(30)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert counted(store) == {("charge", "snoozed"): 1}
    counter.close(30)
    assert counted(store) == {("charge", "snoozed"): 1, ("charge", "completed"): 1}


def test_rates_that_cannot_be_written_do_not_keep_the_runs_that_have_ended(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database may refuse this table alone."""

    def refuse(*_: object) -> None:
        raise StoreError("permission denied for table ojs_rates")

    bridge = Bridge(url)
    assert bridge.store is not None
    monkeypatch.setattr(rates, "PERIOD", 0.05)
    monkeypatch.setattr(bridge.store.documents, "record_rates", refuse)
    for n in range(9):
        run = bridge.engine.begin(JOB._replace(id=f"j-{n}"), JOB, bridge.engine.task())
        assert isinstance(run, Run)
        bridge.engine.settling.settle(run, Complete())
    noted = bridge.engine.reservations.runs.noted
    eventually(lambda: not noted, what="no run that has ended")
    bridge.stop()


def test_counts_wait_for_a_store_that_is_away(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store is away, counts are kept; other lines of the log tell of the outage."""
    with Valkey() as server:
        store = open_store(server.url, patience=1)
        monkeypatch.setattr(rates, "PERIOD", 0.1)
        counter = counting(store)
        server.stop()
        for _ in range(3):
            counter.count(JOB, Complete(), 0)
            time.sleep(0.3)
        server.start()
        counter.close(30)
        assert counted(store) == {("charge", "completed"): 3}
    assert "rates" not in caplog.text


def test_counts_whose_answer_is_lost_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that stood still takes up all that was asked of it meanwhile."""
    with Valkey() as server:
        store = open_store(server.url, patience=1)
        monkeypatch.setattr(rates, "PERIOD", 0.1)
        counter = counting(store)
        counter.count(JOB, Complete(), 0)
        eventually(lambda: counted(store).total() == 1, what="the first run")
        lost, record = list[StoreError](), store.documents.record_rates

        def record_rates(*counts: Any) -> None:
            try:
                record(*counts)
            except StoreError as error:
                lost.append(error)
                raise

        monkeypatch.setattr(store.documents, "record_rates", record_rates)
        os.kill(server.pid, signal.SIGSTOP)
        counter.count(JOB, Complete(), 0)
        eventually(lambda: lost, what="a lost answer")
        counter.count(JOB, SnoozeUntil(NOW, 1, ""), 0)
        os.kill(server.pid, signal.SIGCONT)
        counter.close(30)
        assert counted(store) == {("charge", "completed"): 2, ("charge", "snoozed"): 1}


def test_a_process_counts_a_bounded_number_of_types(tmp_path: Path) -> None:
    """Types beyond the limit are counted together."""
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    counter = counting(store)
    for n in range(MAX_COUNTS + 7):
        counter.count(JOB._replace(type=f"t{n}"), Complete(), 0)
    counter.close(30)
    found = counted(store)
    assert found[OTHER, "completed"] == 7
    assert found.total() == MAX_COUNTS + 7


def test_a_bridge_without_a_store_counts_nothing(unconfigured: Path) -> None:
    """There is neither a counter nor its thread, and a flush has nothing to write."""
    assert Bridge().flush()


@pytest.mark.parametrize(
    ("counts", "median"),
    [
        ({}, None),
        ({0: 1}, 0.005),
        ({1: 10}, 0.02),
        ({0: 5, 1: 5}, 0.01),
        ({2: 1, 4: 3}, 0.533333),
        ({len(BOUNDS): 3}, BOUNDS[-1]),
    ],
)
def test_quantiles(counts: dict[int, int], median: float | None) -> None:
    """A duration lies between the bounds of its count, in proportion."""
    found = [counts.get(place, 0) for place in range(len(BOUNDS) + 1)]
    assert quantile(found, 0.5) == median


@pytest.fixture
def told(tmp_path: Path) -> Bridge:
    """A bridge whose workers have counted some runs, of now and of three hours ago."""
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    assert bridge.store is not None
    now = bridge.engine.now()

    def rate(at: datetime, type_: str, outcome: str, count: int, queue: str = "default") -> Rate:
        return Rate(at, type_, queue, outcome, (0, count, *[0] * (len(BOUNDS) - 1)))

    earlier = now - timedelta(hours=5)
    record(bridge.store, [rate(now, "a.b", "completed", 3), rate(now, "a.b", "retried", 1, "slow")])
    record(bridge.store, [rate(earlier, "a.b", "completed", 5), rate(earlier, "c", "dead_lettered", 2)])
    return bridge


def sums(found: RateHistory) -> dict[tuple[str, str], int]:
    """The runs of all steps, by job type and outcome."""
    told = ((type_, *one) for type_, outcomes in found.by_type.items() for one in outcomes.items())
    return {(type_, outcome): sum(series) for type_, outcome, series in told}


def test_the_history_of_a_day(told: Bridge) -> None:
    """A day has 24 hours and the one under way, of each type and outcome."""
    found = told.rates()
    assert found.step == timedelta(hours=1)
    assert found.since.minute == found.since.second == 0
    assert timedelta(hours=24) <= told.engine.now() - found.since < timedelta(hours=25)
    assert sums(found) == {
        ("a.b", "completed"): 8,
        ("a.b", "retried"): 1,
        ("c", "dead_lettered"): 2,
    }
    completed = found.by_type["a.b"]["completed"]
    assert len(completed) == 25
    assert (completed[-6], completed[-1]) == (5, 3)
    assert found.seconds["completed"]["p50"][-7:] == [None, 0.02, None, None, None, None, 0.02]
    assert set(found.seconds["recovered"]["p95"]) == {None}


def test_the_history_of_an_hour(told: Bridge) -> None:
    """A short time of the last day is told by the minute, an old one by the hour; filters choose."""
    now = told.engine.now()
    found = told.rates(since=now - timedelta(hours=1))
    assert found.step == timedelta(minutes=1)
    assert found.by_type["a.b"]["completed"][-2:] in ((0, 3), (3, 0))
    assert "c" not in found.by_type
    assert set(told.rates(type="c*").by_type) == {"c"}
    assert set(told.rates(queue="slow").by_type["a.b"]) == {"retried"}
    week = now - timedelta(days=7)
    assert told.rates(since=week, until=week + timedelta(hours=1)).step == timedelta(hours=1)
    assert told.rates(since=now - timedelta(days=400)).since >= now - timedelta(days=16)


def test_a_time_that_ends_before_it_begins(told: Bridge) -> None:
    """There is nothing in it, and nothing in the future."""
    now = told.engine.now()
    assert sums(told.rates(since=now + timedelta(days=1))) == {}
    assert sums(told.rates(since=now, until=now - timedelta(hours=9))) == {}
    with pytest.raises(ValueError, match="type: '' must be a name, or a pattern"):
        told.rates(type="")


def test_types_beyond_the_limit_are_shown_together(tmp_path: Path) -> None:
    """The types with the most runs are told apart."""
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    assert bridge.store is not None
    counts = [0] * len(BOUNDS)
    record(
        bridge.store,
        [
            Rate(bridge.engine.now(), f"t{n}", "q", "completed", (n + 1, *counts))
            for n in range(MAX_TYPES + 2)
        ],
    )
    by_type = bridge.rates().by_type
    assert len(by_type) == MAX_TYPES + 1
    assert sum(by_type[OTHER]["completed"]) == 1 + 2
