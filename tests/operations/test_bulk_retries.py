"""Many parked retries are found, run now and cancelled: in code and on the command line."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.operations import waiting
from tests.cli.running import run
from tests.lives import bridge_with_outbox
from tests.store.test_parked import parked


def errors(n: int) -> dict[str, Any]:
    entry = {
        "attempt": 1,
        "type": "auth.expired" if n % 2 else "external.timeout",
        "message": f"no answer {n}",
    }
    return {"v": 1, "attempt": 2, "errors": [entry]}


def fill(bridge: Bridge, number: int = 10) -> None:
    """Park retries that are due in the order of their numbers."""
    assert bridge.store is not None
    now = bridge.engine.now()
    for n in range(number):
        due, at = now + timedelta(hours=1 + n), now - timedelta(minutes=n)
        bridge.store.parked.park(
            parked(f"r-{n}", queue="a" if n < 7 else "b", next_retry_at=due, parked_at=at, state=errors(n))
        )


@pytest.fixture
def bridge(url: str) -> Bridge:
    """A bridge with ten parked retries."""
    found, _ = bridge_with_outbox(url)
    fill(found)
    return found


def due(bridge: Bridge) -> set[str]:
    now = bridge.engine.now()
    return {found.id for found in bridge.retries.list().jobs if found.next_retry_at <= now}


@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ({"error_type": "auth.*"}, [1, 3, 5, 7, 9]),
        ({"text": "NO ANSWER 4"}, [4]),
        ({"queue": "b", "error_type": "external.timeout"}, [8]),
        ({"queue": "a", "text": "nothing"}, []),
    ],
)
def test_the_filters(bridge: Bridge, kind: Any, ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The pages have each match once, whatever their size; a page may have few, and still a cursor."""
    assert bridge.retries.count(**kind) == len(ids)
    for size in (1, 2, 50):
        monkeypatch.setattr(waiting, "READ", size)
        found, cursor = list[str](), None
        while True:
            page = bridge.retries.list(limit=size, cursor=cursor, **kind)
            assert len(page.jobs) <= size
            found += [retry.id for retry in page.jobs]
            cursor = page.next_cursor
            if cursor is None:
                break
        assert found == [f"r-{n}" for n in ids]


def test_the_times_are_those_of_the_parking(bridge: Bridge) -> None:
    now = bridge.engine.now()
    since = bridge.retries.list(since=now - timedelta(minutes=2, seconds=30))
    assert {found.id for found in since.jobs} == {"r-0", "r-1", "r-2"}
    assert bridge.retries.count(until=now - timedelta(minutes=8, seconds=30)) == 1
    for wrong in ({"group": "0123456789abcdef"}, {"since": now.replace(tzinfo=None)}, {"type": ""}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            bridge.retries.list(**wrong)  # type: ignore[arg-type]


def test_many_run_now(bridge: Bridge) -> None:
    """A retry that is overdue already, or that is parked meanwhile, is no trouble."""
    assert bridge.store is not None
    late = bridge.engine.now() - timedelta(hours=1)
    bridge.store.parked.park(parked("late", queue="a", next_retry_at=late, state=errors(0)))
    begun = bridge.operations.begin("run", queue="a", error_type="external.*")
    after = begun.began_at + timedelta(seconds=1)
    new = parked("new", queue="a", state=errors(2), parked_at=after, next_retry_at=after + timedelta(hours=9))
    bridge.store.parked.park(new)
    done = bridge.operations.run(begun)
    assert (done.state, done.matched, done.succeeded) == ("done", 5, 5)
    assert due(bridge) == {"late", "r-0", "r-2", "r-4", "r-6"}
    [record] = bridge.audit.list().records
    assert (record.action, record.count, record.outcome) == ("waiting.run", 5, "done")


def test_many_are_cancelled_by_their_ids(bridge: Bridge) -> None:
    """A retry that a worker publishes at this moment stays, and is told."""
    assert bridge.store is not None
    now = bridge.engine.now()
    bridge.store.parked.claim(["r-1"], now=now, until=now + timedelta(hours=1))
    heard: list[Any] = []
    listening = Bridge(bridge.store, listeners=[heard.append])
    begun = listening.operations.begin("cancel", ids=["r-0", "r-1", "r-1", "gone", "r-2"])
    assert begun.total == 4
    done = listening.operations.run(begun)
    assert (done.matched, done.succeeded, done.failed) == (3, 2, 1)
    assert done.errors == (("r-1", "parked retry 'r-1' is being published, or is gone"),)
    assert {found.id for found in bridge.retries.list().jobs} == {f"r-{n}" for n in (1, *range(3, 10))}
    assert listening.flush(30)
    assert sorted(e.subject for e in heard if e.type == "job.cancelled") == ["r-0", "r-2"]


def test_it_is_stopped_and_resumed(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = bridge.operations
    for name, size in (("LOT", 2), ("READ", 3)):
        monkeypatch.setattr(waiting, name, size)
    monkeypatch.setattr("ojs_bridge.operations.runner.SAVED", 0)
    begun = operations.begin("cancel")
    assert begun.total == 10
    stopped = operations.run(begun, progress=lambda now: operations.stop(now.id))
    assert (stopped.state, stopped.succeeded) == ("stopped", 2)
    done = operations.run(operations.resume(begun.id))
    assert (done.state, done.succeeded, bridge.retries.count()) == ("done", 10, 0)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"override": {"queue": "x"}}, "action: a run has no override"),
        ({"rate": 1}, "action: a run has no override"),
        ({"group": "0123456789abcdef"}, "group: '0123456789abcdef': waiting jobs are in none"),
    ],
)
def test_what_cannot_be(bridge: Bridge, asked: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        bridge.operations.begin("run", **asked)


def test_on_the_command_line(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge = Bridge(url)
    fill(bridge)
    listed = run("retries", "list", "--json", "--text", "answer 3", store=url).json
    assert [found["id"] for found in listed] == ["r-3"]
    refused = run("retries", "run", "--all", "--queue", "b", store=url)
    assert (refused.code, "Run 3 parked retries in sqlite:" in refused.err) == (2, True)
    ran = run("retries", "run", "--all", "--queue", "b", "--yes", store=url)
    assert (ran.code, ran.out) == (0, "3 jobs made due\n")
    assert due(bridge) == {"r-7", "r-8", "r-9"}
    ran = run(
        "retries", "cancel", "--all", "--error-type", "auth.*", "--yes", "--reason", "ticket 12", store=url
    )
    assert (ran.code, ran.out) == (0, "5 jobs cancelled\n")
    assert bridge.audit.list().records[0].reason == "ticket 12"
    for words in (["run"], ["cancel", "r-0", "--all"], ["run", "r-0", "--queue", "b"]):
        wrong = run("retries", *words, store=url)
        assert (wrong.code, "say which" in wrong.err) == (2, True)
