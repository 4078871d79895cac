"""Retries that are due soon wait in the broker; the store knows their number from the workers."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine import rates
from ojs_bridge.engine.rates import IN_BROKER, MAX_WAITS, OTHER, READ_FOR, RENEWED, ShortWaits
from ojs_bridge.operations.rates import InBroker
from ojs_bridge.rules.decision import RetryAt
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job
from tests.cli.running import run
from tests.http.doors import API, WAITING, house

MINUTE = timedelta(minutes=1)


class Still(Bridge):
    """A bridge whose time stands still."""

    time = datetime.now(timezone.utc).replace(microsecond=0)

    def _assemble(self, settings: Any, context: Any, *parts: Any) -> None:
        super()._assemble(settings, replace(context, clock=lambda: self.time), *parts)

    @staticmethod
    def _now() -> datetime:  # type: ignore[override]
        return Still.time


@pytest.fixture
def bridge(url: str, monkeypatch: pytest.MonkeyPatch) -> Bridge:
    """A bridge whose time stands still."""
    monkeypatch.setattr(Still, "time", Still.time)
    return Still(url)


def waits_of(bridge: Bridge, soon: timedelta = MINUTE) -> ShortWaits:
    """What a process of the fleet counts."""
    assert bridge.store is not None
    return ShortWaits(bridge.store.documents, soon)


def told(bridge: Bridge, seconds: float = 0, **where: str) -> tuple[int, float | None]:
    """The number after some more seconds, and in how many seconds the first one is due then."""
    Still.time += timedelta(seconds=seconds)
    found = bridge.retries.in_broker(**where)  # type: ignore[arg-type]
    assert found is not None
    return found.count, found.next_due_at and (found.next_due_at - Still.time).total_seconds()


JOB = Job("j", "mail.send", "mail")


def test_each_counts_until_it_is_due(bridge: Bridge) -> None:
    """Of all processes, by queue and job type, though none of them writes meanwhile."""
    one, other, now = waits_of(bridge), waits_of(bridge), Still.time
    for seconds in (10, 20.5, 20.5):
        one.add(JOB, now + timedelta(seconds=seconds))
    other.add(Job("k", "billing.charge", "billing"), now + timedelta(seconds=30))
    for process in (one, other):
        process.write(now)
        process.write(now)
    assert told(bridge) == (4, 10)
    assert told(bridge, queue="mail") == (3, 10)
    assert told(bridge, type="billing.*") == (1, 30)
    assert bridge.counts(queue="mail") == {"retryable": 3, "scheduled": 0, "pending": 0, "discarded": 0}
    assert told(bridge, 10) == (3, 11)
    one.add(JOB, now + timedelta(seconds=40))
    one.write(now + timedelta(seconds=15))
    assert told(bridge, 11) == (2, 9)
    assert told(bridge, 20) == (0, None)


def test_a_filter_that_only_the_broker_could_answer(bridge: Bridge) -> None:
    waits = waits_of(bridge)
    waits.add(JOB, Still.time + MINUTE)
    waits.write(Still.time)
    assert bridge.waiting.in_broker(text="x") is bridge.retries.in_broker(error_type="a.b") is None
    assert bridge.scheduled.in_broker() == bridge.waiting.in_broker(kind="scheduled") == InBroker()


def test_a_process_that_lives_long_begins_anew(bridge: Bridge) -> None:
    """No retry counts twice, and what is old is not read, and is deleted."""
    # Nothing is deleted before its time by the store's clock, too.
    Still.time -= timedelta(hours=2)
    waits, start = waits_of(bridge), Still.time
    assert bridge.store is not None
    for minutes in range(0, 90, 9):
        at = start + timedelta(minutes=minutes)
        waits.add(JOB, at + MINUTE)
        waits.write(at)
    documents = bridge.store.documents
    assert told(bridge, 81 * 60) == (1, 60)
    assert 1 < len(documents.list(IN_BROKER, limit=99, cursor=None).documents) < 10
    bridge.dead_letters._pruner()._prune_and_forget()
    found = documents.list(IN_BROKER, limit=99, cursor=None).documents
    assert all(document.at >= Still.time - READ_FOR for document in found)
    assert RENEWED < READ_FOR


def test_a_long_time_is_told_in_steps_and_many_kinds_are_one(bridge: Bridge) -> None:
    """A document does not grow without a limit; nothing is counted as due before it is."""
    waits, now = waits_of(bridge, timedelta(hours=1)), Still.time
    for n in range(MAX_WAITS + 500):
        waits.add(Job("j", f"t{n}", "q"), now + timedelta(seconds=n + 1))
    waits.write(now)
    assert told(bridge)[0] == MAX_WAITS + 500
    assert told(bridge, type=OTHER)[0] > 0
    assert told(bridge, 2_000)[0] >= 500
    assert told(bridge, 600) == (0, None)


def test_what_workers_count_is_told_at_every_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what waits in the broker counts: a retry beyond `park_after` does not."""
    monkeypatch.setattr(rates, "PERIOD", 0.05)
    url = f"sqlite:///{tmp_path}/ojs.db"
    door = house(url)
    bridge = door.bridge
    assert bridge.engine.settling._rates is not None
    for delay in (50, 70):
        at = bridge.engine.now() + timedelta(seconds=delay)
        bridge.engine.settling._rates.count(JOB, RetryAt(at, delay, Failure("a.b", ""), ""), 0)
    assert bridge.flush(30)
    assert bridge.counts()["retryable"] == 1
    listed = door.client.get(WAITING, params={"queue": "mail"}).json()
    assert (listed["jobs"], listed["in_broker"]["count"]) == ([], 1)
    assert door.client.get(WAITING, params={"text": "x"}).json()["in_broker"] is None
    waiting = door.client.get(f"{API}/health").json()["checks"]["waiting"]
    assert waiting["in_broker"]["count"] == 1
    assert waiting["message"] == "none is parked; 1 retry waits in the broker"
    ran = run("retries", "list", store=url)
    assert (ran.out, ran.err[:40]) == ("no parked retries\n", "in the broker, due soon: 1 retry, the fi")
    assert run("scheduled", "list", store=url).err == ""
