"""Rolling the bridge out and back again under a running fleet of real workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge.adapters.terms import Canary
from tests.on_celery.rolling import CANARY
from tests.on_celery.rolling_fleet import MANY, Roll, Sent
from tests.servers import Valkey, eventually


@pytest.fixture
def roll(unique: str, tmp_path: Path) -> Iterator[Roll]:
    """A fleet on a broker of its own, none of whose workers has begun."""
    with Valkey() as server:
        roll = Roll(server.url, unique, tmp_path)
        yield roll
        roll.close()


def test_no_job_is_lost_when_the_bridge_comes_and_goes(roll: Roll) -> None:
    """Old workers, both, new ones alone, both, old ones alone: with jobs half done at each turn.

    Each job ends once, as it has to, in no more runs than Celery's options and the policy allow, whichever is
    more; at each run the native counter says how many there were before.
    """
    old = roll.start(roll.old)
    canary = roll.start(replace(roll.new, canary=CANARY))
    old.await_ready()
    roll.enter(1)
    roll.await_sides(1, "old")
    canary.await_ready()
    new = roll.start(roll.new)
    roll.enter(2)
    roll.await_sides(2, "old", "canary")
    new.await_ready()
    old.stop()
    canary.stop()
    roll.enter(3)
    roll.await_arrival(2)
    old = roll.start(roll.old)
    old.await_ready()
    roll.enter(4)
    roll.await_sides(4, "new", "old")
    park_some(roll)
    drained = roll.bridge.retries.drain()
    new.stop()
    roll.bridge.retries.drain()
    roll.enter(5)
    roll.await_arrival(4)
    roll.arrive(6)
    roll.await_ends()
    old.stop()
    assert drained.published
    for job in roll.sent:
        assert (job.label, roll.ends(job)) == (job.label, [job.state])
        assert_ran_as_often_as_it_may(job, roll.runs(job.label))
    assert_changed_sides(roll)


def park_some(roll: Roll) -> None:
    """Send jobs until a new worker has had one, and parked its retry."""

    def some() -> int:
        roll.send_parking()
        return roll.bridge.retries.count()

    eventually(some, what="a parked retry")


def assert_ran_as_often_as_it_may(job: Sent, runs: list[dict[str, Any]]) -> None:
    """Assert that a job ran as often as its workers allow, and that Celery counted each run."""
    assert [run["retries"] for run in runs] == list(range(len(runs))), job.label
    sides = {run["by"] for run in runs}
    bounds = {"old": job.old, "new": job.new}
    exact = bounds.get(*sides) if len(sides) == 1 else None
    least, most = sorted((exact or job.old, exact or job.new))
    assert (1 if most == MANY else least) <= len(runs) <= most, (job, runs)
    if runs and runs[0]["by"] == "canary" and len(runs) > 1 and "own" not in job.label:
        # A retry that a run under the bridge sends has the bridge's header.
        assert runs[1]["ojs"] == Canary(CANARY).covers(job.task, job.result.id), (job, runs)
    if job.task == "parking":
        assert runs[1]["at"] - runs[0]["at"] > 5.9


def assert_changed_sides(roll: Roll) -> None:
    """Chains and chords that were half done went on with the others."""
    last = {phase: {roll.runs(label)[-1]["by"] for label in roll.travellers(phase)} for phase in (2, 4)}
    assert last == {2: {"new"}, 4: {"old"}}
    assert roll.sides(2) == {"old", "canary", "new"}
    assert roll.sides(4) == {"old", "new"}
