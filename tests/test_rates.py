"""Each run is counted once by its outcome, and a store that is away costs counts, never jobs."""

from __future__ import annotations

import os
import time
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ojs_bridge import Bridge, StoreError
from ojs_bridge.engine.rates import MAX_COUNTS, OTHER, Rates, outcomes
from ojs_bridge.spec.decision import Complete, DeadLetter, Decision, Discard, GiveBack, RetryAt, Snooze
from ojs_bridge.spec.failures import Failure
from ojs_bridge.spec.job import Job
from ojs_bridge.store import BOUNDS, Store, open_store
from tests.servers import Valkey

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
        (JOB, Snooze(NOW, 1, ""), {"snoozed": 2}),
        (JOB, Discard("handler", ERROR, ""), {"discarded": 2}),
        (JOB, Discard("exhausted", LOST, ""), {"discarded": 2, "exhausted": 2, "lost": 2}),
        (JOB, DeadLetter("exhausted", ERROR, ""), {"dead_lettered": 2, "exhausted": 2}),
        (REPLAYED, DeadLetter("handler", ERROR, ""), {"dead_lettered": 2, "replay_died": 2}),
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
    for rate in store.rates(NOW - timedelta(hours=1), NOW + timedelta(hours=1), "minute"):
        found[rate.type, rate.outcome] += sum(rate.counts)
    return found


def counting(store: Store, *, period: float = 60.0) -> Rates:
    return Rates(store, lambda: datetime.now(timezone.utc), timedelta(minutes=1), period=period)


def test_runs_are_added_up(tmp_path: Path) -> None:
    """A close writes what was counted, with each duration in its place; the counter goes on after it."""
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    counter = counting(store)
    for seconds in (0.0, 0.01, 0.02, 1e9):
        counter.count(JOB, Complete(), seconds)
    counter.close(30)
    (rate,) = store.rates(NOW - timedelta(hours=1), NOW + timedelta(hours=1), "minute")
    assert rate.counts == (2, 1, *[0] * (len(BOUNDS) - 2), 1)
    counter.count(JOB, Complete(), 0)
    counter.close(30)
    assert counted(store) == {("charge", "completed"): 5}


def test_a_forked_child_counts_its_own_runs(tmp_path: Path) -> None:
    """A child does not write what its parent has counted."""
    store = open_store(f"sqlite:///{tmp_path}/ojs.db")
    counter = counting(store)
    counter.count(JOB, Complete(), 0)
    child = os.fork()
    if not child:
        counter.count(JOB, Snooze(NOW, 1, ""), 0)
        counter.close(30)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert counted(store) == {("charge", "snoozed"): 1}
    counter.close(30)
    assert counted(store) == {("charge", "snoozed"): 1, ("charge", "completed"): 1}


def test_counts_wait_for_a_store_that_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """While the store is away, counts are kept, and one line of the log says so."""
    with Valkey() as server:
        store = open_store(server.url, patience=1)
        counter = counting(store, period=0.1)
        server.stop()
        for _ in range(3):
            counter.count(JOB, Complete(), 0)
            time.sleep(0.3)
        server.start()
        counter.close(30)
        assert counted(store) == {("charge", "completed"): 3}
    said = [record for record in caplog.records if "counts wait until the store works" in record.message]
    assert len(said) == 1


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
    bridge = Bridge()
    assert bridge.flush()
    with pytest.raises(StoreError):
        bridge.engine.forget_rates()
