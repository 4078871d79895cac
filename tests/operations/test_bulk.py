"""Bulk operations are seen, stopped and resumed by any process, and end by themselves when they do harm."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from multiprocessing import get_context
from typing import Any, get_args

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
from ojs_bridge.engine.layers import Layers
from ojs_bridge.engine.runs import Override, Run
from ojs_bridge.engine.storing import Fate, fate_kind
from ojs_bridge.operations import operation, runner
from ojs_bridge.operations.operation import Jobs
from ojs_bridge.rules.decision import DeadLettered, Decision
from ojs_bridge.rules.job import Header, Job, decode, encode, parse_time
from ojs_bridge.store import Document
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.operations.test_operating import bury
from tests.servers import Valkey, eventually

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


class Running(Outbox):
    """A publisher whose jobs run at once: all of them, or each fourth, succeed; the others fail."""

    def __init__(self, bridge: Bridge, *, each: int = 4, attempts: int = 1, takes: int = 0) -> None:
        super().__init__()
        self.bridge, self.each, self.attempts = bridge, each, attempts
        #: The number of jobs that are sent before the first one has run.
        self.takes, self.waits = takes, list[Header]()

    def republish(self, letter: Letter, header: Header, override: Override) -> None:
        """Have a worker take the job."""
        super().republish(letter, header, override)
        self.waits.append(header)
        if len(self.waits) > self.takes:
            self.work(self.waits.pop(0))

    def work(self, header: Header) -> Decision:
        """Run a job once."""
        engine = self.bridge.engine
        bare = Job(header.job.id, "billing.charge", "default", header.job.attempt)
        job = decode(header.text, bare)
        task = engine.task(Layers(task={"max_attempts": self.attempts, "on_exhaustion": "dead_letter"}))
        run = engine.begin(job, bare, task)
        assert isinstance(run, Run)
        raised = ConnectionError("down") if int(job.id[2:]) % self.each else None
        decision = engine.judge(run, raised)
        if isinstance(decision, DeadLettered):
            engine.storing.bury(
                run, engine.carrying.after(run.job, decision), decision, FRAMEWORK, {"args": []}
            )
        engine.settling.settle(run, decision)
        return decision


@pytest.mark.parametrize("action", ["replay", "purge"])
def test_it_is_carried_out_and_listed(fleet: Lives, action: Any) -> None:
    bridge, outbox = fleet
    ids = bury_many(bridge, 30, type="a")
    bury(bridge, "other", type="b")
    begun = bridge.operations.begin(action, type="a")
    assert (begun.state, begun.total, left(bridge)) == ("running", 30, 31)
    seen: list[int] = []
    ended = bridge.operations.run(begun, progress=lambda now: seen.append(now.matched))
    assert (ended.state, ended.succeeded, ended.failed, seen[-1]) == ("done", 30, 0, 30)
    assert published(outbox) == (ids if action == "replay" else [])
    assert left(bridge) == 1
    (listed,) = bridge.operations.list()
    assert listed == bridge.operations.get(begun.id) == ended
    told = listed.to_ojs()
    assert (told["kind"]["type"], told["state"], told["errors"]) == ("a", "done", [])


@pytest.mark.parametrize("action", ["replay", "purge"])
def test_a_selection_is_a_single_operation(fleet: Lives, action: Any) -> None:
    """An id without a letter does not stop the others."""
    bridge, _ = fleet
    ids = bury_many(bridge, 20)
    ended = bridge.operations.run(bridge.operations.begin(action, ids=[*ids[:5], "gone", ids[0], *ids[10:]]))
    assert (ended.state, ended.total, ended.succeeded, left(bridge)) == ("done", 16, 15, 5)


def test_an_operation_with_a_field_of_a_newer_version_deletes_nothing(fleet: Lives) -> None:
    """It is listed all the same. Without that field its filter would choose more."""
    bridge, _ = fleet
    bury_many(bridge, 5)
    keep(bridge, {"attempts": 3})
    (found,) = bridge.operations.list()
    assert (found.state, found.kind) == ("stopped", {"attempts": 3})
    with pytest.raises(ValueError, match=r"^attempts: 3: a filter of this version has no such field$"):
        bridge.operations.run(bridge.operations.resume(found.id))
    ended = bridge.operations.get(found.id)
    assert (ended.state, ended.why[:8], left(bridge)) == ("failed", "attempts", 5)


def keep(bridge: Bridge, kind: Any) -> None:
    """Write a stopped purge as a worker of another version does."""
    body = {
        "id": "op-1662a3a1f346",
        "action": "purge",
        "state": "stopped",
        "updated_at": "2026-11-25T16:39:38.287Z",
        "kind": kind,
        "ids": None,
        "override": {},
        "rate": None,
        "stop_if_failing": None,
        "total": None,
        "matched": 0,
        "succeeded": 0,
        "failed": 0,
        "errors": [],
        "why": "",
        "cursor": None,
        "record": "act-6611c790f83e1-55bdc1",
        "recorded": 0,
    }
    assert bridge.store is not None
    bridge.store.documents.write(Document("operation", body["id"], parse_time(body["updated_at"]), body, 1))


def test_another_process_stops_it_and_a_third_goes_on(fleet: Lives, url: str) -> None:
    """Each letter is replayed once, and the numbers are those of both parts."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 120)
    begun = bridge.operations.begin("replay", rate=20)
    ended: list[Operation] = []
    runner = threading.Thread(target=lambda: ended.append(bridge.operations.run(begun)))
    runner.start()
    eventually(lambda: bridge.operations.get(begun.id).succeeded > 0, what="some progress")
    other = Bridge(url)
    assert other.operations.stop(begun.id).state == "stopping"
    runner.join(90)
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
    begun = bridge.operations.begin("replay", rate=10)
    runner = get_context("fork").Process(target=replay_until_killed, args=(url, begun.id))
    runner.start()
    eventually(lambda: bridge.operations.get(begun.id).succeeded > 0, what="some progress")
    assert runner.pid
    os.kill(runner.pid, signal.SIGKILL)
    runner.join(90)
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
    begun = bridge.operations.begin("replay")
    monkeypatch.setattr(operation, "STALE", timedelta(0))
    monkeypatch.setattr(runner, "SAVED", 0.0)
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
    ended = bridge.operations.run(bridge.operations.begin("replay"))
    assert (ended.state, ended.why, left(bridge)) == ("failed", "connection refused", 30)
    outbox.raises = None
    assert bridge.operations.run(bridge.operations.resume(ended.id)).succeeded == 30


def test_a_batch_that_is_broken_off_is_counted(fleet: Lives) -> None:
    """The operation counts the jobs that were sent before the broker went away."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 30)
    outbox.refuses[ids[10]] = Unreachable("gone")
    ended = bridge.operations.run(bridge.operations.begin("replay"))
    assert (ended.state, ended.succeeded, left(bridge)) == ("failed", 10, 20)
    outbox.refuses.clear()
    done = bridge.operations.run(bridge.operations.resume(ended.id))
    assert (done.succeeded, done.matched, published(outbox)) == (30, 30, ids)


def test_what_has_failed_is_counted_once(fleet: Lives) -> None:
    """An operation that breaks off within a page meets its failed letters again."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 30)
    outbox.refuses |= {ids[3]: ValueError("too long"), ids[25]: Unreachable("gone")}
    ended = bridge.operations.run(bridge.operations.begin("replay", rate=10))
    assert (ended.state, ended.succeeded, left(bridge)) == ("failed", 24, 6)
    del outbox.refuses[ids[25]]
    done = bridge.operations.run(replace(bridge.operations.resume(ended.id), rate=None))
    assert (done.matched, done.succeeded, done.failed) == (30, 29, 1)
    assert [letter_id for letter_id, _ in done.errors] == [ids[3]]


def test_a_slow_rate_does_not_spoil_the_list(fleet: Lives) -> None:
    """However slow it is."""
    bridge, _ = fleet
    bury_many(bridge, 1)
    begun = bridge.operations.begin("replay", rate=1e-300)
    assert [found.id for found in bridge.operations.list()] == [begun.id]


def test_an_interrupt_is_told_and_raised(fleet: Lives) -> None:
    bridge, outbox = fleet
    ids = bury_many(bridge, 30)
    outbox.refuses[ids[10]] = KeyboardInterrupt()
    begun = bridge.operations.begin("replay", ids=ids)
    with pytest.raises(KeyboardInterrupt):
        bridge.operations.run(begun)
    found = bridge.operations.get(begun.id)
    assert (found.state, found.why, found.succeeded) == ("stopped", "its process was interrupted", 10)


def test_a_store_that_dies_under_it_loses_no_letter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The letters of the batch under way may be sent again, when the claim of that batch is over."""
    with Valkey() as server:
        bridge, outbox = bridge_with_outbox(server.url, storage_retry=StorageRetry.disabled())
        ids = bury_many(bridge, 60)
        begun = bridge.operations.begin("replay", rate=20)
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
    monkeypatch.setattr(runner, "LOOKED", 0.0)
    bridge.engine.context.publishers[FRAMEWORK] = Running(bridge)
    ended = bridge.operations.run(bridge.operations.begin("replay", rate=20, stop_if_failing=0.5))
    assert ended.state == "stopped"
    assert ended.why == "15 of the last 20 replayed jobs that have run have failed"
    assert ended.succeeded == 20


@pytest.mark.parametrize("takes", [0, 20])
def test_it_stops_when_attempts_fail_whose_jobs_have_attempts_left(
    fleet: Lives, monkeypatch: Any, takes: int
) -> None:
    """A policy that outlasts the replay hides nothing, and neither do jobs that have not run yet."""
    bridge, _ = fleet
    bury_many(bridge, 120)
    monkeypatch.setattr(runner, "LOOKED", 0.0)
    bridge.engine.context.publishers[FRAMEWORK] = Running(bridge, attempts=9, takes=takes)
    ended = bridge.operations.run(bridge.operations.begin("replay", rate=20, stop_if_failing=0.5))
    assert (ended.state, ended.succeeded) == ("stopped", 20 + takes)
    assert told(bridge, ended) == Jobs(20 + takes, takes, 15, 5, 0, 0, 15)


def test_what_became_of_the_jobs(fleet: Lives) -> None:
    """Those that wait, run, have succeeded, after a failed attempt, too, and those that have died again."""
    bridge, _ = fleet
    ids = bury_many(bridge, 12)
    outbox = bridge.engine.context.publishers[FRAMEWORK] = Running(bridge, attempts=2, takes=99)
    begun = bridge.operations.begin("replay", ids=ids)
    assert told(bridge, begun) == Jobs(0, 0, 0, 0, 0, 0, 0)
    done = bridge.operations.run(begun)
    assert told(bridge, done) == Jobs(12, 12, 0, 0, 0, 0, 0)
    for header in outbox.waits[:8]:
        outbox.work(header)
    assert told(bridge, done) == Jobs(12, 4, 6, 2, 0, 0, 6)
    again = [header for header in outbox.waits[:8] if int(header.job.id[2:]) % 4]
    for n, header in enumerate(again):
        outbox.each = 1 if n == 0 else 4
        second = header.job._replace(attempt=2, fence=header.job.fence + 1)
        outbox.work(encode(second))
    assert told(bridge, done) == Jobs(12, 4, 0, 3, 0, 5, 6)
    assert str(told(bridge, done)) == "3 succeeded, 4 not begun, 5 died again"
    dead, more = bridge.operations.died_again(done.id, limit=3)
    rest, end = bridge.operations.died_again(done.id, limit=3, cursor=more)
    assert {letter.id for letter in (*dead, *rest)} == {header.job.id for header in again[1:]}
    assert end is None
    assert bridge.operations.get(done.id).to_ojs()["died_again"] == 5
    bridge.dead_letters.delete(dead[0].id)
    assert len(bridge.operations.died_again(done.id)[0]) == 4


def test_a_job_that_is_replayed_alone_belongs_to_no_operation(fleet: Lives) -> None:
    """Nor does one that an operation has sent before; and no other job writes of its fate."""
    bridge, _ = fleet
    bury_many(bridge, 2)
    outbox = bridge.engine.context.publishers[FRAMEWORK] = Running(bridge)
    done = bridge.operations.run(bridge.operations.begin("replay", ids=["j-001"]))
    bridge.dead_letters.replay("j-001")
    bridge.dead_letters.replay("j-000")
    assert "operation" not in outbox.published[-1][1].state
    assert told(bridge, done) == Jobs(1, 0, 0, 0, 0, 1, 1)


def test_the_fates_of_an_operations_jobs_go_with_it(fleet: Lives, monkeypatch: Any) -> None:
    """After thirty days."""
    bridge, _ = fleet
    assert bridge.store is not None
    ids = bury_many(bridge, 3)
    bridge.engine.context.publishers[FRAMEWORK] = Running(bridge)
    done = bridge.operations.run(bridge.operations.begin("replay", ids=ids))
    kinds = [fate_kind(done.id, fate) for fate in get_args(Fate)]
    assert sum(bridge.store.documents.count(kinds).values()) == 3 + 1 + 2 + 2
    monkeypatch.setattr(operation, "KEPT", timedelta(seconds=-1))
    bridge.operations.begin("purge", ids=ids)
    assert bridge.store.documents.count(kinds) == {}


def test_the_numbers_of_the_audit_add_up(fleet: Lives, monkeypatch: Any) -> None:
    """Each record has what was done under it; to ask for a stop sends nothing."""
    bridge, outbox = fleet
    ids = bury_many(bridge, 30)
    outbox.refuses[ids[10]] = Unreachable("gone")
    first = bridge.operations.run(bridge.operations.begin("replay"))
    outbox.refuses[ids[17]] = outbox.refuses.pop(ids[10])
    second = bridge.operations.run(bridge.operations.resume(first.id))
    outbox.refuses.clear()
    # The third process is gone before it has sent anything.
    bridge.operations.resume(second.id)
    monkeypatch.setattr(operation, "STALE", timedelta(0))
    bridge.operations.stop(second.id)
    monkeypatch.undo()
    assert bridge.operations.run(bridge.operations.resume(second.id)).succeeded == 30
    records = [(r.action, r.outcome, r.count) for r in reversed(bridge.audit.list().records)]
    assert records == [
        ("dead_letter.replay", "failed", 10),
        ("operation.resume", "failed", 7),
        ("operation.resume", "stopped", 0),
        ("operation.stop", "stopped", None),
        ("operation.resume", "done", 13),
    ]


def told(bridge: Bridge, operation: Operation) -> Jobs:
    """What became of an operation's jobs."""
    found = bridge.operations.get(operation.id).jobs
    assert found is not None
    return found


def test_jobs_that_succeed_stop_nothing(fleet: Lives, monkeypatch: Any) -> None:
    bridge, _ = fleet
    bury_many(bridge, 60)
    monkeypatch.setattr(runner, "LOOKED", 0.0)
    bridge.engine.context.publishers[FRAMEWORK] = Running(bridge, each=1)
    ended = bridge.operations.run(bridge.operations.begin("replay", rate=1000, stop_if_failing=0.0))
    assert (ended.state, told(bridge, ended).succeeded) == ("done", 60)


def test_an_override_goes_to_all_and_shows_no_argument(fleet: Lives) -> None:
    bridge, outbox = fleet
    bury_many(bridge, 3)
    begun = bridge.operations.begin("replay", override={"queue": "slow", "args": ["secret"]})
    assert bridge.operations.run(bridge.operations.get(begun.id)).succeeded == 3
    assert {override.queue for override in outbox.overrides} == {"slow"}
    told = bridge.operations.get(begun.id).to_ojs()
    assert told["changes"] == ["args", "queue"]
    assert "secret" not in str(told)


def test_a_replay_is_called_retry_in_json_and_in_the_store(fleet: Lives) -> None:
    bridge, outbox = fleet
    begun = bridge.operations.begin("replay", ids=bury_many(bridge, 2))
    document = bridge.store.documents.get(operation.KIND, begun.id)
    assert (begun.action, begun.to_ojs()["action"], document.body["action"]) == ("replay", "retry", "retry")
    ended = bridge.operations.run(bridge.operations.get(begun.id))
    assert (ended.action, ended.succeeded, len(published(outbox))) == ("replay", 2, 2)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"action": "burn"}, "action: 'burn' must be one of replay, purge"),
        ({"action": "retry"}, "action: 'retry' must be one of replay, purge"),
        ({"ids": []}, "ids: 0 of them; there must be 1 to 10000"),
        ({"ids": ["a"], "type": "b"}, "ids: either ids or a filter, not both"),
        ({"rate": 0}, "rate: 0 must be a number of jobs a second above zero"),
        ({"stop_if_failing": 0.5}, "stop_if_failing: 0.5 needs a rate"),
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
        begin(**{"action": "replay", **asked})
    assert bridge.operations.list() == ()


def test_an_unknown_operation(fleet: Lives) -> None:
    bridge, _ = fleet
    for act in (bridge.operations.get, bridge.operations.stop, bridge.operations.resume):
        with pytest.raises(OperationNotFound, match="there is no operation 'op-1'"):
            act("op-1")
