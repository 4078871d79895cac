"""The budgets of retries, as workers share them: what is counted, who waits, and who need not."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Breaker, Bridge, Dependency
from ojs_bridge.engine.budgets import BUDGET, Budgets
from ojs_bridge.engine.runs import Held, Run
from ojs_bridge.errors import StoreError
from ojs_bridge.rules.budget import Budget, Credit
from ojs_bridge.rules.job import Job
from tests.engine.test_limits import Fleet, again, begin, begun, published, waiting
from tests.servers import eventually

BANK = Dependency("bank", ["bank.*"], ["act"], budget=0.5)
MINUTE = timedelta(minutes=1)
#: How many retries are saved up.
SAVED = Budget(0.5).most


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without a worker."""
    fleet = Fleet(tmp_path)
    yield fleet
    for bridge in fleet.bridges:
        bridge.engine.close()


def a_retry(number: int, **fields: Any) -> Job:
    """Return a job at its second attempt."""
    return Job(f"r-{number}", "act", "default", 2, **fields)


def budgets_of(bridge: Bridge) -> Budgets:
    """Return the budgets of a worker."""
    assert bridge.engine.budgets
    return bridge.engine.budgets


def spend(bridge: Bridge) -> None:
    """Begin as many retries as there may be."""
    for number in range(int(SAVED)):
        begun(bridge, a_retry(100 + number))


def stop_clock(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no time pass for budgets."""
    now = fleet.bridges[0].engine.now()
    for bridge in fleet.bridges:
        monkeypatch.setattr(budgets_of(bridge), "_clock", lambda: now)


def test_a_retry_beyond_the_budget_is_held_uncounted_and_says_why(fleet: Fleet) -> None:
    worker = fleet.worker(BANK)
    spend(worker)
    held = begin(worker, a_retry(1))
    assert isinstance(held, Held)
    assert held.decision.hold == "budget:bank"
    beginning = (
        "held by the retry budget of bank: retries are at most 50 % of first attempts; its turn is at "
    )
    assert held.reason.startswith(beginning)
    assert waiting(worker, "r-1").attempt == 2
    begun(worker, "f-1")


def test_workers_share_what_their_first_attempts_earn(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """One worker's first attempts pay for the retries of another; they cost about one write a second."""
    first, second = fleet.worker(BANK), fleet.worker(BANK)
    stop_clock(fleet, monkeypatch)
    spend(second)
    assert first.store
    write, wrote = first.store.documents.write, list[str]()

    def counted(document: Any) -> bool:
        wrote.append(document.kind)
        return write(document)

    monkeypatch.setattr(first.store.documents, "write", counted)
    for number in range(8):
        begun(first, f"f-{number}")
    assert wrote.count(BUDGET) <= 2
    # It writes what is left with its next retry.
    begun(first, a_retry(1))
    for number in range(2, 5):
        begun(second, a_retry(number))
    assert isinstance(begin(second, a_retry(5)), Held)


def test_held_retries_go_on_in_order_as_soon_as_first_attempts_have_earned_it(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = fleet.worker(BANK)
    stop_clock(fleet, monkeypatch)
    spend(worker)
    for number in range(6):
        assert isinstance(begin(worker, a_retry(number)), Held)
    budgets_of(worker).wake()
    assert published(worker) == []
    for number in range(9):
        begun(worker, f"f-{number}")
    assert isinstance(begin(worker, a_retry(6)), Held), "those that wait go before it"
    budgets_of(worker)._call("bank", Budget(0.5), worker.waiting._parked)
    eventually(lambda: len(published(worker)) >= 4, what="retries that go on")
    assert published(worker) == ["r-0", "r-1", "r-2", "r-3"]


def test_turns_are_taken_back_when_nobody_waits_for_them(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = fleet.worker(BANK)
    stop_clock(fleet, monkeypatch)
    spend(worker)
    for number in range(3):
        begin(worker, a_retry(number))
        worker.waiting.cancel(f"r-{number}")
    budgets_of(worker)._call("bank", Budget(0.5), worker.waiting._parked)
    assert worker.store
    known = worker.store.documents.get(BUDGET, "bank")
    assert known
    assert known.body["planned"] == known.body["at"]


def test_a_probe_needs_no_budget(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the breaker would wait for a probe, and the probe for first attempts, which the breaker holds."""
    worker = fleet.worker(replace(BANK, breaker=Breaker()))
    spend(worker)
    assert worker.engine.breakers
    monkeypatch.setattr(worker.engine.breakers, "probed_by", lambda job: "bank" if job.id == "r-1" else "")
    begun(worker, a_retry(1))
    assert isinstance(begin(worker, a_retry(2)), Held)


def test_a_retry_that_a_rate_or_another_budget_has_held_pays_once(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = fleet.worker(BANK, replace(BANK, name="mail", rate="1/h"))
    stop_clock(fleet, monkeypatch)
    begun(worker, a_retry(0))
    held = begin(worker, a_retry(1))
    assert isinstance(held, Held)
    assert held.decision.hold == "rate:mail"
    begun(worker, again(worker, "r-1"))
    store = worker.store
    assert store
    saved = [
        document.body["saved"] for document in store.documents.list(BUDGET, limit=9, cursor=None).documents
    ]
    assert saved == [SAVED - 2] * 2


def test_while_the_store_is_away_first_attempts_begin_and_are_counted_later(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = fleet.worker(BANK)
    stop_clock(fleet, monkeypatch)
    spend(worker)
    store, get = worker.store, worker.store and worker.store.documents.get
    assert store

    def away(*_: Any) -> None:
        raise StoreError("away")

    monkeypatch.setattr(store.documents, "get", away)
    for number in range(4):
        begun(worker, f"f-{number}")
    job, engine = a_retry(1), worker.engine
    with pytest.raises(StoreError):
        engine.begin(job, job, engine.task())
    assert isinstance(engine.begin(job, job, engine.task(), can_wait=False), Run)
    monkeypatch.setattr(store.documents, "get", get)
    for number in (2, 3):
        begun(worker, a_retry(number))
    assert isinstance(begin(worker, a_retry(4)), Held)


def test_without_a_store_a_process_has_a_budget_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    bridge = Bridge(dependencies=[BANK])
    with caplog.at_level(logging.WARNING):
        bridge.engine.try_store("dead")
    assert "no store: each process has breakers and budgets of its own" in caplog.text
    engine = bridge.engine
    for number in range(int(SAVED)):
        job = a_retry(number)
        assert isinstance(engine.begin(job, job, engine.task()), Run)
    job = a_retry(99)
    held = engine.begin(job, job, engine.task())
    assert isinstance(held, Held)
    assert 0 < held.decision.delay <= 5
    budgets_of(bridge)._change("bank", lambda credit, now: (Credit(1.0, now, credit.planned), None))
    job = job.snoozed(engine.now() - MINUTE, held.decision.hold)
    assert isinstance(engine.begin(job, job, engine.task()), Run)
