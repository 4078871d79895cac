"""A probe replays some letters of a filter first; its rest goes once, when an operator wants it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from ojs_bridge import Bridge, NothingMatched, NotResumable, Operation, Unreachable
from ojs_bridge.operations import runner
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.operations.test_bulk import Running, bury_many, left, published
from tests.operations.test_operating import bury

Lives = tuple[Bridge, Outbox]


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


def soon(bridge: Bridge) -> datetime:
    """A moment after now: a job dies later than its probe begins."""
    return bridge.engine.now() + timedelta(seconds=1)


@pytest.mark.parametrize(("newest", "sent"), [(False, slice(0, 5)), (True, slice(25, 30))])
def test_a_probe_and_then_the_rest(fleet: Lives, *, newest: bool, sent: slice) -> None:
    """The rest has the changes and the pace of the probe, and no letter that died since."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 30, type="a")
    bury(bridge, "other", type="b")
    how: dict[str, Any] = {"rate": 500.0, "stop_if_failing": 0.5, "override": {"queue": "slow"}}
    begun = bridge.operations.begin("replay", type="a", limit=5, newest=newest, **how)
    assert (begun.total, begun.rest) == (5, None)
    with pytest.raises(NotResumable, match="is running; its rest goes after its end"):
        bridge.operations.rest(begun.id)
    probe = bridge.operations.run(begun)
    assert (probe.state, probe.succeeded, probe.rest) == ("done", 5, 25)
    assert sorted(published(outbox)) == ids[sent]
    bury(bridge, "late", type="a", discarded_at=soon(bridge))
    bury(bridge, ids[sent][0], type="a", discarded_at=soon(bridge))
    rest = bridge.operations.rest(probe.id)
    assert (rest.total, rest.rest_of, rest.rate, rest.stop_if_failing) == (25, probe.id, 500.0, 0.5)
    assert bridge.operations.run(rest).succeeded == 25
    assert sorted(published(outbox)) == ids
    assert {override.queue for override in outbox.overrides} == {"slow"}
    assert left(bridge) == 3
    assert bridge.operations.get(probe.id).to_ojs()["rest_operation"] == rest.id
    records = [(found.action, found.outcome, found.count) for found in bridge.audit.list().records]
    assert records == [("dead_letter.replay", "done", 25), ("dead_letter.replay", "done", 5)]


def test_of_many_that_ask_for_the_rest_one_sends_it(fleet: Lives) -> None:
    bridge, outbox = fleet
    ids = bury_many(bridge, 40)
    probe = bridge.operations.run(bridge.operations.begin("replay", limit=10))
    told: list[Operation | NotResumable] = []

    def ask() -> None:
        try:
            told.append(bridge.operations.run(bridge.operations.rest(probe.id)))
        except NotResumable as error:
            told.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert [type(one) for one in told].count(Operation) == 1
    assert sorted(published(outbox)) == ids
    with pytest.raises(NotResumable, match="was begun before, as 'op-"):
        bridge.operations.rest(probe.id)


def test_a_probe_that_breaks_off_is_resumed_and_sends_no_job_twice(fleet: Lives) -> None:
    """Nor the job that has died again since."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 20)
    outbox.refuses[ids[6]] = Unreachable("gone")
    probe = bridge.operations.run(bridge.operations.begin("replay", limit=10))
    assert (probe.state, probe.succeeded, probe.rest) == ("failed", 6, 14)
    bury(bridge, ids[0], discarded_at=soon(bridge))
    outbox.refuses.clear()
    done = bridge.operations.run(bridge.operations.resume(probe.id))
    assert (done.state, done.succeeded, done.rest) == ("done", 10, 10)
    assert published(outbox) == ids[:10]


def test_a_probe_whose_jobs_die_again_stops_itself(fleet: Lives, monkeypatch: Any) -> None:
    """Its rest may go nevertheless, when the fault is mended; and the jobs that died again are not in it."""
    bridge, _ = fleet
    bury_many(bridge, 100)
    monkeypatch.setattr(runner, "LOOKED", 0.0)
    bridge.engine.context.publishers[FRAMEWORK] = Running(bridge)
    probe = bridge.operations.run(bridge.operations.begin("replay", limit=60, rate=20, stop_if_failing=0.5))
    assert (probe.state, probe.succeeded, probe.rest) == ("stopped", 20, 80)
    bridge.engine.context.publishers[FRAMEWORK] = Running(bridge, each=1)
    rest = bridge.operations.run(replace(bridge.operations.rest(probe.id), rate=None))
    assert (rest.state, rest.succeeded, left(bridge)) == ("done", 80, 15)


@pytest.mark.parametrize("chosen", [{"type": "none"}, {"text": "nobody says so"}])
@pytest.mark.parametrize("action", ["replay", "purge", "cancel"])
def test_what_matches_nothing_makes_no_operation(fleet: Lives, action: Any, chosen: Any) -> None:
    """The calls that end with a result have an empty one."""
    bridge, _ = fleet
    bury_many(bridge, 3)
    with pytest.raises(NothingMatched, match=r"^no (dead letters|waiting jobs) match, so nothing was begun$"):
        bridge.operations.begin(action, **chosen)
    done = bridge.dead_letters.replay_all(confirm=True, **chosen)
    assert (done.matched, done.confirmed) == (0, True)
    assert (bridge.operations.list(), bridge.audit.list().records) == ((), ())


def test_a_rest_that_cannot_be(fleet: Lives) -> None:
    bridge, _ = fleet
    bury_many(bridge, 4)
    whole = bridge.operations.run(bridge.operations.begin("replay", ids=["j-000"]))
    with pytest.raises(NotResumable, match="is no probe, and has no rest"):
        bridge.operations.rest(whole.id)
    probe = bridge.operations.run(bridge.operations.begin("replay", limit=9))
    assert (probe.succeeded, probe.rest) == (3, 0)
    with pytest.raises(NothingMatched):
        bridge.operations.rest(probe.id)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"limit": 0}, "limit: 0 must be an integer from 1 to 10000"),
        ({"limit": True}, "limit: True must be an integer from 1 to 10000"),
        ({"limit": 10_001}, "limit: 10001 must be an integer from 1 to 10000"),
        ({"action": "purge", "limit": 5}, "limit: 5: goes with a replay, and this is a purge"),
        ({"ids": ["a"], "limit": 5}, "limit: 5: goes with a filter, and ids are named"),
        ({"newest": True}, "newest: True needs a limit"),
    ],
)
def test_a_probe_that_cannot_be(fleet: Lives, asked: dict[str, Any], told: str) -> None:
    bridge, _ = fleet
    begin: Callable[..., Operation] = bridge.operations.begin
    with pytest.raises(ValueError, match=f"^{told}"):
        begin(**{"action": "replay", **asked})
