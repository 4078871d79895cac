"""The audit has a record of each operator action, and an action never waits for its record."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, Event, LetterNotFound, Retention
from ojs_bridge.errors import JobNotFound, StoreError, Unpublishable, Unreachable
from ojs_bridge.operations import audit, retention, runner
from ojs_bridge.operations.audit import Actor, Record, acting
from tests.lives import Outbox, bridge_with_outbox
from tests.operations.test_operating import bury
from tests.store.test_parked import parked

Lives = tuple[Bridge, Outbox]
ANN = Actor("ann", "http", "10.0.0.7", "ticket 12")
BOB = Actor("bob", "code", "")


@pytest.fixture
def fleet(url: str) -> Lives:
    """A bridge on an empty store, and the publisher of its framework."""
    return bridge_with_outbox(url)


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Lives]:
    """A bridge on SQLite with two letters."""
    bridge, outbox = bridge_with_outbox(f"sqlite:///{tmp_path}/ojs.db")
    for n in range(2):
        bury(bridge, f"j-{n}")
    yield bridge, outbox


def records(bridge: Bridge, **kind: Any) -> list[Record]:
    return [*bridge.audit.list(**kind).records]


def told(record: Record) -> tuple[Any, ...]:
    return record.action, record.outcome, record.count


def test_each_action_is_a_record(fleet: Lives) -> None:
    """The record says who, from where, what, on what, how many, when, why, and how it ended."""
    bridge, _ = fleet
    store = bridge.store
    assert store is not None
    letters, retries = bridge.dead_letters, bridge.retries
    for n in range(7):
        bury(bridge, f"j-{n}", type="a" if n < 5 else "b")
    for n in range(2):
        store.parked.park(parked(f"r-{n}"))
    before = bridge.engine.now()
    with acting(ANN):
        letters.replay("j-0", args=["secret"], queue="slow")
        letters.delete("j-1")
        letters.replay_all(type="a", confirm=True)
        letters.purge(type="b", confirm=True)
        letters.load(letters.export())
        letters.prune()
        retries.run("r-0")
        retries.cancel("r-1")
        retries.drain(["mail.*"])
    found = records(bridge)
    assert [told(record) for record in reversed(found)] == [
        ("dead_letter.replay", "done", None),
        ("dead_letter.delete", "done", None),
        ("dead_letter.replay", "done", 3),
        ("dead_letter.delete", "done", 2),
        ("dead_letter.export", "done", 0),
        ("dead_letter.import", "done", 0),
        ("dead_letter.prune", "done", 0),
        ("waiting.run", "done", None),
        ("waiting.cancel", "done", None),
        ("waiting.drain", "done", 0),
    ]
    assert {(r.who, r.via, r.address, r.reason) for r in found} == {("ann", "http", "10.0.0.7", "ticket 12")}
    assert all(before - timedelta(milliseconds=1) <= r.at <= bridge.engine.now() for r in found)
    subjects = [record.subject for record in reversed(found)]
    assert subjects[0] == {"ids": ["j-0"], "id_count": 1, "changes": ["args", "queue"]}
    # A replay of many is a bulk operation, of the letters that were there when it began.
    assert subjects[2]["filter"]["type"] == "a"
    assert subjects[2]["operation"] == bridge.operations.list(limit=2)[1].id
    assert subjects[9] == {"tasks": ["mail.*"]}
    assert "secret" not in repr(found)


def test_a_bulk_operation_is_a_record_that_its_end_completes(
    fleet: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    bridge, outbox = fleet
    for n in range(30):
        bury(bridge, f"j-{n:02}")
    operations = bridge.operations
    with acting(ANN):
        begun = operations.begin("replay", ids=[f"j-{n:02}" for n in range(25)])
    [record] = records(bridge)
    assert told(record) == ("dead_letter.replay", "running", None)
    assert record.subject["operation"] == begun.id
    assert (len(record.subject["ids"]), record.subject["id_count"]) == (20, 25)
    outbox.refuses["j-03"] = ValueError("no")
    operations.run(begun)
    [record] = records(bridge)
    assert (told(record), record.who) == (("dead_letter.replay", "done", 24), "ann")
    second = operations.begin("purge")
    monkeypatch.setattr(runner, "SAVED", 0)
    with acting(ANN):
        assert operations.run(second, progress=lambda now: operations.stop(now.id)).state == "stopped"
        operations.run(operations.resume(second.id))
    assert [told(record) for record in records(bridge)[:3]] == [
        ("operation.resume", "done", 0),
        ("operation.stop", "stopping", None),
        ("dead_letter.delete", "stopped", 6),
    ]
    assert operations.stop(second.id).state == "done"
    assert len(records(bridge)) == 4


def test_a_failure_is_a_record(small: Lives) -> None:
    """The text of a foreign error stays out: it may quote an argument."""
    bridge, outbox = small
    for foreign in (ValueError, Unpublishable):
        outbox.refuses["j-0"] = foreign("cannot encode 'hunter2'")
        with pytest.raises(foreign, match="hunter2"):
            bridge.dead_letters.replay("j-0")
    store = bridge.store
    assert store is not None
    store.letters.claim(["j-1"], now=bridge.engine.now(), seconds=60)
    with pytest.raises(LetterNotFound):
        bridge.dead_letters.delete("j-1")
    with pytest.raises(LetterNotFound):
        bridge.dead_letters.delete("nobody")
    with pytest.raises(JobNotFound):
        bridge.retries.run("nobody")
    assert [(r.outcome, r.error) for r in records(bridge)] == [
        ("failed", "dead letter 'j-1' is being replayed, or is gone"),
        ("failed", "Unpublishable"),
        ("failed", "ValueError"),
    ]


def test_a_process_that_dies_leaves_a_record(small: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """The record is written before the action, and once more after it."""
    bridge, outbox = small
    seen: list[Record] = []

    def republish(*_: Any) -> None:
        seen.extend(records(bridge))

    monkeypatch.setattr(outbox, "republish", republish)
    bridge.dead_letters.replay("j-0")
    assert [told(record) for record in seen] == [("dead_letter.replay", "begun", None)]


def test_the_system_knows_the_user_of_code(small: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user who called sudo is the actor; a block of code may have a name of its own, and a reason."""
    bridge, _ = small
    monkeypatch.setenv("LOGNAME", "root")
    monkeypatch.setenv("SUDO_USER", "bob")
    bridge.dead_letters.delete("j-0")
    with bridge.audit.acting("nightly", reason="too old"):
        bridge.dead_letters.delete("j-1")
    nightly, bob = records(bridge)
    assert (bob.who, bob.via, bob.address.partition("@")[0], bob.reason) == ("bob", "code", "root", "")
    assert (nightly.who, nightly.reason) == ("nightly", "too old")


def test_the_listeners_hear_of_it(small: Lives) -> None:
    events: list[Event] = []
    bridge = Bridge(small[0].store, listeners=[events.append])
    with acting(ANN):
        bridge.dead_letters.delete("j-0")
    assert bridge.flush(30)
    [event] = [event for event in events if event.type == "operator.action"]
    [record] = records(bridge)
    assert event.to_ojs()["data"] == record.to_ojs()
    assert (event.data["who"], event.data["outcome"], event.data["reason"]) == ("ann", "done", "ticket 12")


def test_filters_and_pages(fleet: Lives) -> None:
    """The pages have each record once, whatever the filter."""
    bridge, _ = fleet
    for n in range(9):
        bury(bridge, f"j-{n}", queue=f"q-{n}")
        with acting(Actor(f"{'ann' if n % 2 else 'bob'}@shop", "code", "")):
            bridge.dead_letters.purge(queue=f"q-{n}", confirm=True)
    found, cursor = list[Record](), None
    while True:
        page = bridge.audit.list(who="ann@*", limit=3, cursor=cursor)
        found += page.records
        cursor = page.next_cursor
        if cursor is None:
            break
    assert [r.subject["filter"]["queue"] for r in found] == ["q-7", "q-5", "q-3", "q-1"]
    young = [record for record in records(bridge) if record.at >= found[1].at]
    assert records(bridge, since=found[1].at) == young != records(bridge)
    assert [*young, *records(bridge, until=found[1].at)] == records(bridge)
    assert records(bridge, action="retry.*") == []
    assert len(records(bridge, action="dead_letter.*", limit=1)) == 1
    for wrong in ({"limit": 0}, {"who": ""}, {"cursor": "x"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            bridge.audit.list(**wrong)  # type: ignore[arg-type]


def test_an_action_does_not_wait_for_its_record(
    small: Lives, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the record that the store could not take."""
    bridge, _ = small

    def away(*_: Any, **__: Any) -> bool:
        raise StoreError("the disk is full")

    monkeypatch.setattr(bridge.store.documents, "write", away)
    with acting(ANN), caplog.at_level(logging.WARNING):
        bridge.dead_letters.delete("j-0")
    assert [letter.id for letter in bridge.dead_letters.list().letters] == ["j-1"]
    [line] = [r.message for r in caplog.records if "not on record" in r.message]
    assert "the disk is full" in line
    assert '"who": "ann"' in line
    assert '"outcome": "done"' in line


def test_long_texts_are_cut(small: Lives) -> None:
    bridge, _ = small
    with bridge.audit.acting("x" * 2000, reason="y" * 2000):
        assert [*bridge.dead_letters.export(text="z" * 2000)] == []
    [record] = records(bridge)
    assert {len(record.who), len(record.reason), len(record.subject["filter"]["text"])} == {1001}


def test_long_ids_are_cut(small: Lives) -> None:
    bridge, _ = small
    with bridge.audit.recording("a.b", ids=["x" * 10**6]):
        pass
    [record] = records(bridge)
    assert [len(each) for each in record.subject["ids"]] == [1001]


def test_a_filter_that_matches_little_asks_the_store_little(
    small: Lives, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pages have each record once, also where a page of the store has more than are asked for."""
    bridge, _ = small
    for n in range(300):
        with acting(ANN if n % 29 == 0 else BOB), bridge.audit.recording("a.b", n=n):
            pass
    asked, store = list[int](), bridge.store
    assert store is not None
    usual = store.documents.list
    monkeypatch.setattr(store.documents, "list", lambda *a, **k: asked.append(1) or usual(*a, **k))
    found, cursor, pages = list[int](), None, 0
    while cursor is not None or not pages:
        page = bridge.audit.list(who=ANN.name, limit=2, cursor=cursor)
        found += [record.subject["n"] for record in page.records]
        cursor, pages = page.next_cursor, pages + 1
    assert found == [*range(290, -1, -29)]
    assert len(asked) <= 3 * pages


def test_records_are_kept_for_half_a_year(small: Lives, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that prunes the letters deletes older records, too."""
    bridge = Bridge(small[0].store, retention=Retention())
    bridge.dead_letters.delete("j-0")
    bridge.dead_letters.prune_once_a_period()
    assert len(records(bridge)) == 1
    assert retention.RECORDS[audit.KIND] == timedelta(days=180)
    monkeypatch.setitem(retention.RECORDS, audit.KIND, timedelta(seconds=-1))
    bridge.dead_letters._pruner()._prune_and_forget()
    assert records(bridge) == []


def test_marks(fleet: Lives) -> None:
    """The newest mark comes first; each has its text, its time and its writer's name."""
    bridge, _ = fleet
    marks = bridge.marks
    now = bridge.engine.now()
    with acting(ANN):
        new = marks.add(" v42 ")
    old = marks.add("v41", at=now - timedelta(days=1))
    assert [(mark.text, mark.id) for mark in marks.list()] == [("v42", new.id), ("v41", old.id)]
    assert (new.by, marks.list(since=now - timedelta(hours=1))[0].by) == ("ann", "ann")
    assert len(marks.list(since=now - timedelta(hours=1))) == len(marks.list(limit=1)) == 1
    for text, at in (("", None), ("x" * 1001, None), ("v1", now.replace(tzinfo=None))):
        with pytest.raises(ValueError, match=r"text|at"):
            marks.add(text, at=at)
    written = [(record.action, record.subject["text"], record.who) for record in records(bridge)]
    assert written[::-1] == [("mark.add", "v42", "ann"), ("mark.add", "v41", Actor.current().name)]


def test_an_action_that_breaks_off_tells_how_far_it_came(fleet: Lives) -> None:
    """The audit has the number of the jobs that were sent, also within a batch."""
    bridge, outbox = fleet
    for n in range(30):
        bury(bridge, f"j-{n:02}", discarded_at=bridge.engine.now() - timedelta(seconds=60 - n))
    outbox.refuses["j-10"] = Unreachable("gone")
    with pytest.raises(Unreachable):
        bridge.dead_letters.replay_all(confirm=True)
    [record] = bridge.audit.list(action="dead_letter.replay").records
    assert (record.outcome, record.count) == ("failed", 10)
