"""Bulk operations are seen, stopped and resumed by any process, and end by themselves when they do harm."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

import pytest

from ojs_bridge import (
    Bridge,
    Letter,
    NotResumable,
    Operation,
    OperationNotFound,
    StorageRetry,
    StoreError,
    Unreachable,
)
from ojs_bridge.engine.ports import Override
from ojs_bridge.operations import operation, running
from ojs_bridge.spec.job import Header
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.servers import Valkey, eventually
from tests.test_operating import bury

Lives = tuple[Bridge, Outbox]


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


def bury_many(bridge: Bridge, count: int, **fields: Any) -> list[str]:
    """Bury letters, the oldest first, and return their ids."""
    now = bridge.engine.now()
    ids = [f"j-{n:03}" for n in range(count)]
    for n, letter_id in enumerate(ids):
        bury(bridge, letter_id, discarded_at=now - timedelta(seconds=2 * count - n), **fields)
    return ids


def left(bridge: Bridge) -> int:
    return bridge.dead_letters.stats().total


def published(outbox: Outbox) -> list[str]:
    return [letter.id for letter, _ in outbox.published]


class Failing(Outbox):
    """A publisher of jobs, three of four of which die again at once."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__()
        self.bridge = bridge

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Run the job."""
        super().republish(letter, header, override)
        if int(letter.id[2:]) % 4:
            bury(self.bridge, letter.id)


@pytest.mark.parametrize("action", ["retry", "purge"])
def test_it_is_carried_out_and_listed(fleet: Lives, action: Any) -> None:
    bridge, outbox = fleet
    ids = bury_many(bridge, 30, type="a")
    bury(bridge, "other", type="b")
    begun = bridge.operations.begin(action, type="a")
    assert (begun.state, begun.total, left(bridge)) == ("running", 30, 31)
    seen: list[int] = []
    ended = bridge.operations.run(begun, progress=lambda now: seen.append(now.matched))
    assert (ended.state, ended.succeeded, ended.failed, seen[-1]) == ("done", 30, 0, 30)
    assert published(outbox) == (ids if action == "retry" else [])
    assert left(bridge) == 1
    (listed,) = bridge.operations.list()
    assert listed == bridge.operations.get(begun.id) == ended
    told = listed.to_ojs()
    assert (told["kind"]["type"], told["state"], told["errors"]) == ("a", "done", [])


@pytest.mark.parametrize("action", ["retry", "purge"])
def test_a_selection_is_a_single_operation(fleet: Lives, action: Any) -> None:
    """An id without a letter does not stop the others."""
    bridge, _ = fleet
    ids = bury_many(bridge, 20)
    ended = bridge.operations.run(bridge.operations.begin(action, ids=[*ids[:5], "gone", ids[0], *ids[10:]]))
    assert (ended.state, ended.total, ended.succeeded, left(bridge)) == ("done", 16, 15, 5)


def test_another_process_stops_it_and_a_third_goes_on(fleet: Lives, url: str) -> None:
    """Each letter is replayed once, and the numbers are those of both parts."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 120)
    begun = bridge.operations.begin("retry", rate=20)
    ended: list[Operation] = []
    runner = threading.Thread(target=lambda: ended.append(bridge.operations.run(begun)))
    runner.start()
    eventually(lambda: bridge.operations.get(begun.id).succeeded > 0, what="some progress")
    other = Bridge(url)
    assert other.operations.stop(begun.id).state == "stopping"
    runner.join(30)
    (stopped,) = ended
    assert (stopped.state, stopped.why) == ("stopped", "an operator stopped it")
    assert stopped.succeeded == len(outbox.published) < 120
    assert other.operations.stop(begun.id) == stopped
    third, more = bridge_with_outbox(url)
    resumed = third.operations.run(replace(third.operations.resume(begun.id), rate=None))
    assert (resumed.state, resumed.succeeded, left(bridge)) == ("done", 120, 0)
    assert [*published(outbox), *published(more)] == ids
    with pytest.raises(NotResumable, match="is done, and cannot be resumed"):
        third.operations.resume(begun.id)


def replay_until_killed(url: str, operation_id: str) -> None:
    bridge, _ = bridge_with_outbox(url)
    bridge.operations.run(bridge.operations.get(operation_id))


def test_a_killed_process_leaves_it_interrupted(fleet: Lives, url: str, monkeypatch: Any) -> None:
    bridge, outbox = fleet
    bury_many(bridge, 60)
    begun = bridge.operations.begin("retry", rate=10)
    runner = get_context("fork").Process(target=replay_until_killed, args=(url, begun.id))
    runner.start()
    eventually(lambda: bridge.operations.get(begun.id).succeeded > 0, what="some progress")
    assert runner.pid
    os.kill(runner.pid, signal.SIGKILL)
    runner.join(30)
    with pytest.raises(NotResumable, match="is running, and cannot be resumed"):
        bridge.operations.resume(begun.id)
    monkeypatch.setattr(operation, "STALE", timedelta(0))
    assert bridge.operations.get(begun.id).state == "interrupted"
    # A letter that the killed process had claimed stays until its claim is over.
    resumed = bridge.operations.resume(begun.id)
    ended = bridge.operations.run(replace(resumed, rate=None))
    assert ended.state == "done"
    assert ended.succeeded + ended.failed >= 60 - left(bridge)
    assert len({*published(outbox)}) == len(outbox.published)
    monkeypatch.undo()
    assert bridge.operations.stop(begun.id).state == "done"


def test_two_processes_never_carry_it_out_together(fleet: Lives, monkeypatch: Any) -> None:
    """A process that stood still for long finds that another has taken its operation up."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 40)
    begun = bridge.operations.begin("retry")
    monkeypatch.setattr(operation, "STALE", timedelta(0))
    monkeypatch.setattr(running, "SAVED", 0.0)
    resumed = bridge.operations.resume(begun.id)
    with pytest.raises(NotResumable, match="was taken up by another process"):
        bridge.operations.run(begun)
    monkeypatch.undo()
    assert bridge.operations.run(resumed).state == "done"
    assert sorted(published(outbox)) == ids


def test_a_broker_that_is_away_ends_it(fleet: Lives) -> None:
    bridge, outbox = fleet
    bury_many(bridge, 30)
    outbox.raises = Unreachable("connection refused")
    ended = bridge.operations.run(bridge.operations.begin("retry"))
    assert (ended.state, ended.why, left(bridge)) == ("failed", "connection refused", 30)
    outbox.raises = None
    assert bridge.operations.run(bridge.operations.resume(ended.id)).succeeded == 30


def test_a_batch_that_is_broken_off_is_counted(fleet: Lives) -> None:
    """The operation counts the jobs that were sent before the broker went away."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 30)
    outbox.refuses[ids[10]] = Unreachable("gone")
    ended = bridge.operations.run(bridge.operations.begin("retry"))
    assert (ended.state, ended.succeeded, left(bridge)) == ("failed", 10, 20)
    outbox.refuses.clear()
    done = bridge.operations.run(bridge.operations.resume(ended.id))
    assert (done.succeeded, done.matched, published(outbox)) == (30, 30, ids)


def test_what_has_failed_is_counted_once(fleet: Lives) -> None:
    """An operation that breaks off within a page meets its failed letters again."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 30)
    outbox.refuses |= {ids[3]: ValueError("too long"), ids[25]: Unreachable("gone")}
    ended = bridge.operations.run(bridge.operations.begin("retry", rate=10))
    assert (ended.state, ended.succeeded, left(bridge)) == ("failed", 24, 6)
    del outbox.refuses[ids[25]]
    done = bridge.operations.run(replace(bridge.operations.resume(ended.id), rate=None))
    assert (done.matched, done.succeeded, done.failed) == (30, 29, 1)
    assert [letter_id for letter_id, _ in done.errors] == [ids[3]]


def test_a_slow_rate_does_not_spoil_the_list(fleet: Lives) -> None:
    """However slow it is."""
    bridge, _ = fleet
    begun = bridge.operations.begin("retry", rate=1e-300)
    assert [found.id for found in bridge.operations.list()] == [begun.id]


def test_an_interrupt_is_told_and_raised(fleet: Lives) -> None:
    bridge, outbox = fleet
    ids = bury_many(bridge, 30)
    outbox.refuses[ids[10]] = KeyboardInterrupt()
    begun = bridge.operations.begin("retry", ids=ids)
    with pytest.raises(KeyboardInterrupt):
        bridge.operations.run(begun)
    found = bridge.operations.get(begun.id)
    assert (found.state, found.why, found.succeeded) == ("stopped", "its process was interrupted", 10)


def test_a_store_that_dies_under_it_loses_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The letters of the batch under way may be sent again, when the claim of that batch is over."""
    with Valkey() as server:
        bridge, outbox = bridge_with_outbox(server.url, storage_retry=StorageRetry.disabled())
        ids = bury_many(bridge, 60)
        begun = bridge.operations.begin("retry", rate=20)
        outbox.refuses[ids[30]] = KillsTheStore(server)
        with pytest.raises(StoreError):
            bridge.operations.run(begun)
        server.start()
        outbox.refuses.clear()
        monkeypatch.setattr(operation, "STALE", timedelta(0))
        resumed = bridge.operations.resume(begun.id)
        monkeypatch.undo()
        ended = bridge.operations.run(replace(resumed, rate=None))
        there = {found.id for found in bridge.dead_letters.list(limit=100).letters}
        assert there | {*published(outbox)} == {*ids}
        assert (ended.state, ended.failed) == ("done", len(there))


class KillsTheStore(Exception):
    """An error of a message, whose raising ends the store."""

    def __init__(self, server: Valkey) -> None:
        super().__init__()
        self.server = server

    def __str__(self) -> str:
        self.server.kill()
        return "the store is gone"


def test_it_stops_when_the_replayed_jobs_die_again(fleet: Lives, monkeypatch: Any) -> None:
    bridge, _ = fleet
    bury_many(bridge, 200)
    monkeypatch.setattr(running, "LOOKED", 0.0)
    bridge.engine.context.publishers[FRAMEWORK] = Failing(bridge)
    ended = bridge.operations.run(bridge.operations.begin("retry", rate=50, stop_if_failing=0.5))
    assert ended.state == "stopped"
    assert ended.why.endswith("replayed jobs have died again")
    assert running.ENOUGH <= ended.succeeded < 200


def test_jobs_that_succeed_stop_nothing(fleet: Lives, monkeypatch: Any) -> None:
    bridge, _ = fleet
    bury_many(bridge, 60)
    monkeypatch.setattr(running, "LOOKED", 0.0)
    ended = bridge.operations.run(bridge.operations.begin("retry", rate=1000, stop_if_failing=0.0))
    assert (ended.state, ended.died_again) == ("done", 0)


def test_an_override_goes_to_all_and_shows_no_argument(fleet: Lives) -> None:
    bridge, outbox = fleet
    bury_many(bridge, 3)
    begun = bridge.operations.begin("retry", override={"queue": "slow", "args": ["secret"]})
    assert bridge.operations.run(bridge.operations.get(begun.id)).succeeded == 3
    assert {override.queue for override in outbox.overrides} == {"slow"}
    told = bridge.operations.get(begun.id).to_ojs()
    assert told["changes"] == ["args", "queue"]
    assert "secret" not in str(told)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"action": "burn"}, "action: 'burn' must be one of retry, purge"),
        ({"ids": []}, "ids: 0 of them; there must be 1 to 10000"),
        ({"ids": ["a"], "type": "b"}, "ids: filters go without them"),
        ({"rate": 0}, "rate: 0 must be a number of jobs a second above zero"),
        ({"stop_if_failing": 0.5}, "stop_if_failing: it needs a rate"),
        ({"stop_if_failing": 50, "rate": 1}, "stop_if_failing: 50 must be a share, from 0 to below 1"),
        ({"override": {"args": [object()]}}, "override: it must be JSON"),
        ({"action": "purge", "rate": 1}, "action: a purge has no override, no rate"),
        ({"override": {"colour": 1}}, "override: 'colour' is unknown"),
    ],
)
def test_an_operation_that_cannot_be(fleet: Lives, asked: dict[str, Any], told: str) -> None:
    bridge, _ = fleet
    begin: Callable[..., Operation] = bridge.operations.begin
    with pytest.raises(ValueError, match=f"^{told}"):
        begin(**{"action": "retry", **asked})
    assert bridge.operations.list() == ()


def test_an_unknown_operation(fleet: Lives) -> None:
    bridge, _ = fleet
    for act in (bridge.operations.get, bridge.operations.stop, bridge.operations.resume):
        with pytest.raises(OperationNotFound, match="there is no operation 'op-1'"):
            act("op-1")
