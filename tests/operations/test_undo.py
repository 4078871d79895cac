"""An undo brings deleted letters back for an hour: none is lost or doubled, and no job lives twice."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from multiprocessing import get_context
from typing import Any

import pytest

from ojs_bridge import Bridge, NotFound, NotUndoable, StoreError, Undone
from ojs_bridge.operations import audit, operation, retention
from ojs_bridge.rules.decision import Complete
from ojs_bridge.store import EVERYTHING, Bin, Document
from tests.cli.running import run
from tests.conftest import store_url
from tests.http.doors import served
from tests.lives import FRAMEWORK, Outbox, bridge_with_outbox
from tests.operations.test_bulk import Running, bury_many, left
from tests.operations.test_operating import bury
from tests.servers import eventually

Lives = tuple[Bridge, Outbox]


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind."""
    return store_url(request.param, request)


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


def ids_of(bridge: Bridge) -> list[str]:
    return sorted(letter.id for letter in bridge.dead_letters.list(limit=1000).letters)


def all_ids(bridge: Bridge) -> set[str]:
    return {letter.id for page, _ in bridge.dead_letters.pages(EVERYTHING, None) for letter in page}


def in_bin(bridge: Bridge, deletion: str) -> set[str]:
    """What is there, also if its hour is over."""
    assert bridge.store is not None
    since = datetime.fromtimestamp(0, timezone.utc)
    return {letter.id for page in bridge.store.letters.binned(deletion, since=since) for letter in page}


def test_a_deletion_is_undone_by_its_record_and_a_purge_by_its_operation(fleet: Lives) -> None:
    bridge, _ = fleet
    ids = bury_many(bridge, 5)
    before = bridge.dead_letters.list().letters
    bridge.dead_letters.delete(ids[0])
    [record] = bridge.audit.list().records
    assert record.subject["undo_until"] > record.to_ojs()["at"]
    purged = bridge.operations.run(bridge.operations.begin("purge"))
    assert left(bridge) == 0
    assert bridge.audit.undo(record.id) == Undone(1, 0)
    of_purge = bridge.audit.list(action="dead_letter.delete").records[0]
    assert of_purge.subject["operation"] == purged.id
    assert bridge.operations.undo(purged.id) == Undone(4, 0)
    assert bridge.dead_letters.list().letters == before
    for asked in (purged.id, of_purge.id, record.id):
        with pytest.raises(NotUndoable, match="is in the bin: a bin keeps letters for 1 h"):
            bridge.operations.undo(asked)
    undone = bridge.audit.list(action="dead_letter.undo").records
    assert [(each.subject["deletion"], each.outcome, each.count) for each in undone][-2:] == [
        (purged.id, "done", 4),
        (record.id, "done", 1),
    ]


def test_what_is_deleted_for_ever_is_gone(fleet: Lives) -> None:
    bridge, _ = fleet
    ids = bury_many(bridge, 4, type="a")
    bridge.dead_letters.delete(ids[0], forever=True)
    assert bridge.dead_letters.purge(type="a", confirm=True, forever=True).succeeded == 3
    for record in bridge.audit.list().records:
        assert (record.subject["forever"], "undo_until" in record.subject) == (True, False)
        with pytest.raises(NotUndoable):
            bridge.audit.undo(record.id)


def test_an_undo_that_cannot_be(fleet: Lives) -> None:
    bridge, _ = fleet
    bury_many(bridge, 2)
    replay = bridge.operations.run(bridge.operations.begin("replay", ids=["j-000"]))
    with pytest.raises(NotUndoable, match="is a replay, which has no undo"):
        bridge.operations.undo(replay.id)
    with pytest.raises(NotUndoable, match=r"is of the action dead_letter\.replay, which has no undo"):
        bridge.operations.undo(replay.record)
    purge = bridge.operations.begin("purge")
    for asked in (purge.id, purge.record):
        with pytest.raises(NotUndoable, match="is running: stop it first"):
            bridge.operations.undo(asked)
    assert bridge.store is not None
    bridge.store.documents.write(Document(audit.KIND, "act-new", bridge.engine.now(), {"who": {"name": 7}}))
    with pytest.raises(NotFound, match="there is no record 'act-new'"):
        bridge.operations.undo("act-new")
    with pytest.raises(NotFound, match="there is no record 'op-1'"):
        bridge.operations.undo("op-1")
    with pytest.raises(ValueError, match=r"^forever: True goes with a purge, and this is a replay"):
        bridge.operations.begin("replay", forever=True)


def test_workers_empty_the_bin_after_an_hour(fleet: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis does so by itself. What retention deletes is in no bin."""
    bridge, _ = fleet
    bury_many(bridge, 3)
    purged = bridge.operations.run(bridge.operations.begin("purge"))
    bridge.dead_letters.prune_once_a_period()
    assert len(in_bin(bridge, purged.id)) == 3
    assert bridge.store is not None
    if bridge.store.backend == "sql":
        monkeypatch.setattr(retention, "BIN_KEPT", timedelta(seconds=-1))
        bridge.dead_letters._pruner()._prune_and_forget()
        assert in_bin(bridge, purged.id) == set()


@pytest.mark.parametrize("way", ["no one", "prune", "serve"])
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_what_was_deleted_an_hour_ago_is_gone_though_no_worker_lives(
    request: pytest.FixtureRequest, kind: str, way: str
) -> None:
    """An undo refuses it at once. The command that prunes, and a server, delete it for good."""
    url = store_url(kind, request)
    bridge, _ = bridge_with_outbox(url)
    assert bridge.store is not None
    now = bridge.engine.now()
    for name, minutes in (("old", 61), ("young", 59)):
        into = Bin("d", now - timedelta(minutes=minutes))
        bridge.store.letters.prune([bury(bridge, name)], now=now, into=into)
    if way == "prune":
        words = ("dead-letters", "prune", "--max-age", "P180D", "--max-count", "100", "--yes")
        assert run(*words, store=url).code == 0
    elif way == "serve":
        with served(url):
            eventually(lambda: in_bin(bridge, "d") == {"young"}, what="a bin without what is old")
    assert in_bin(bridge, "d") == ({"young"} if way != "no one" else {"young", "old"})
    assert bridge.audit.bring_back("d") == Undone(1, 0)
    assert ids_of(bridge) == ["young"]
    with pytest.raises(NotUndoable, match="nothing of the deletion 'd' is in the bin: a bin keeps"):
        bridge.audit.bring_back("d")


@pytest.mark.parametrize("each", [1, 2])
def test_a_job_that_a_killed_replay_has_sent_does_not_come_back(fleet: Lives, each: int) -> None:
    """The replay published, and was killed before it deleted the letter; an operator deleted it. Then it ran.

    Whether it succeeded or died again, the letter that was deleted stays away.
    """
    bridge, _ = fleet
    letters = bridge.store.letters  # type: ignore[union-attr]
    worker = bridge.engine.context.publishers[FRAMEWORK] = Running(bridge, each=each, takes=99)
    bury(bridge, "j-001")
    stored = letters.get("j-001")
    bridge.operations.run(bridge.operations.begin("replay", ids=["j-001"]))
    assert stored is not None
    letters.bury(stored)
    bridge.dead_letters.delete("j-001")
    [record] = bridge.audit.list(action="dead_letter.delete").records
    worker.work(worker.waits.pop())
    died = [letter.discarded_at for letter in bridge.dead_letters.list().letters]
    assert len(died) == (each == 2)
    undone = bridge.audit.undo(record.id)
    why = "its job has died again" if died else "its job has begun again"
    assert undone == Undone(0, 1, (("j-001", why),))
    assert [letter.discarded_at for letter in bridge.dead_letters.list().letters] == died


def purge_until_killed(url: str, operation_id: str) -> None:
    bridge, _ = bridge_with_outbox(url)
    bridge.operations.run(bridge.operations.get(operation_id))


def test_a_purge_of_many_that_is_killed_loses_no_letter(
    fleet: Lives, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any moment each letter is among the others or in the bin; an undo brings all of them back."""
    bridge, _ = fleet
    assert bridge.store is not None
    ids = {f"j-{n:04}" for n in range(6000)}
    template = bury(bridge, "template")
    lots = sorted(ids)
    for at in range(0, len(lots), 500):
        bridge.store.letters.bury_all([replace(template, id=name, key=name) for name in lots[at : at + 500]])
    bridge.dead_letters.delete("template", forever=True)
    begun = bridge.operations.begin("purge")
    runner = get_context("fork").Process(target=purge_until_killed, args=(url, begun.id))
    runner.start()
    eventually(lambda: left(bridge) < len(ids), seconds=60, what="some deletions")
    assert runner.pid
    os.kill(runner.pid, signal.SIGKILL)
    runner.join(90)
    there, gone = all_ids(bridge), in_bin(bridge, begun.id)
    assert (there | gone, there & gone) == (ids, set())
    monkeypatch.setattr(operation, "STALE", timedelta(0))
    assert bridge.operations.undo(begun.id).restored == len(gone)
    assert left(bridge) == len(ids)
    again = bridge.operations.run(bridge.operations.resume(begun.id))
    assert again.state == "done"
    bridge.operations.undo(begun.id)
    assert all_ids(bridge) == ids


def test_an_undo_that_is_broken_off_goes_on_when_it_is_asked_again(
    fleet: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each letter is there once, and what stays is counted, though its reasons are told for some alone."""
    bridge, _ = fleet
    assert bridge.store is not None
    ids, letters = bury_many(bridge, 950), bridge.store.letters
    purged = bridge.operations.run(bridge.operations.begin("purge"))
    for n in range(120):
        bury(bridge, ids[n])
    restore, calls = letters.restore, list[str]()

    def breaking_off(*asked: Any) -> Collection[str]:
        calls.append("")
        if len(calls) == 3:
            raise StoreError("the connection is gone")
        return restore(*asked)

    monkeypatch.setattr(letters, "restore", breaking_off)
    with pytest.raises(StoreError):
        bridge.operations.undo(purged.id)
    there = left(bridge)
    undone = bridge.operations.undo(purged.id)
    assert 120 < there < 950 == left(bridge) == undone.restored + there
    assert (undone.stayed, len(undone.reasons)) == (120, 100)
    assert {why for _, why in undone.reasons} == {"its job has died again"}


class Fleet(Running):
    """A publisher whose jobs wait for workers; it counts the successes of each job."""

    def __init__(self, bridge: Bridge) -> None:
        super().__init__(bridge, each=2, takes=10**6)
        self.successes: list[str] = []

    def run_one(self) -> bool:
        """Run the job that has waited longest; return whether there was one."""
        try:
            header = self.waits.pop(0)
        except IndexError:
            return False
        if isinstance(self.work(header), Complete):
            self.successes.append(header.job.id)
        return True


def undo_all(bridge: Bridge) -> None:
    for record in bridge.audit.list(action="dead_letter.delete", limit=1000).records:
        with suppress(NotUndoable, NotFound):
            bridge.audit.undo(record.id)


def test_operators_and_workers_at_once_lose_and_double_nothing(url: str) -> None:
    """Three operators delete, purge, replay and undo, while eight threads run the jobs that they send.

    The even jobs succeed, the odd ones die again. In the end a job has either succeeded, once, or a letter.
    """
    bridges = [bridge_with_outbox(url)[0] for _ in range(3)]
    ids = bury_many(bridges[0], 60)
    fleets = [Fleet(bridge) for bridge in bridges]
    for bridge, fleet in zip(bridges, fleets, strict=True):
        bridge.engine.context.publishers[FRAMEWORK] = fleet
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set() or any(fleet.waits for fleet in fleets):
            if not any(fleet.run_one() for fleet in fleets):
                ended.wait(0.02)

    def operate(turn: int) -> None:
        operator = bridges[turn]
        for n in range(4):
            acts: list[Callable[[], object]] = [
                lambda n=n: operator.dead_letters.delete(ids[(7 * n + turn) % 60]),  # type: ignore[misc]
                lambda n=n: operator.dead_letters.replay(ids[(11 * n + 3 * turn) % 60]),  # type: ignore[misc]
                lambda: operator.dead_letters.purge(confirm=True),
                lambda: undo_all(operator),
                lambda n=n: operator.operations.run(  # type: ignore[misc]
                    operator.operations.begin("replay", limit=3, newest=n % 2 == 0)
                ),
            ]
            for act in acts:
                with suppress(NotFound, NotUndoable):
                    act()

    with ThreadPoolExecutor(11) as pool:
        working = [pool.submit(work) for _ in range(8)]
        operating = [pool.submit(operate, turn) for turn in range(3)]
        try:
            for done in operating:
                done.result()
        finally:
            ended.set()
        for done in working:
            done.result()
    undo_all(bridges[0])
    successes = Counter(job for fleet in fleets for job in fleet.successes)
    assert max(successes.values(), default=1) == 1
    assert sorted([*ids_of(bridges[0]), *successes]) == ids
    assert all(int(job[2:]) % 2 == 0 for job in successes)
