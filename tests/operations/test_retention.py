"""Dead letters are kept for a time, and in a number."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ojs_bridge import Bridge, ConfigurationError, Event, Letter, Retention
from ojs_bridge.engine.scheduler import reservation_at
from ojs_bridge.operations.dead_letters import DeadLetters
from ojs_bridge.operations.retention import PERIOD, Pruner, losses
from ojs_bridge.store import Filter, Store
from tests.servers import eventually
from tests.store.test_store import entry, ids, letter

DAY = timedelta(days=1)


def whole(found: Letter) -> Letter:
    """A letter as it is shown without a redaction."""
    return found


def fill(bridge: Bridge, ages: dict[str, int], queue: str = "default") -> Store:
    """Bury letters of so many days."""
    assert bridge.store is not None
    for letter_id, days in ages.items():
        bridge.store.letters.bury(
            letter(letter_id, discarded_at=bridge.engine.now() - days * DAY, queue=queue)
        )
    return bridge.store


@pytest.mark.requirement("DLQ-004")
def test_too_old_and_too_many(url: str) -> None:
    """A letter beyond either limit goes; the oldest go first."""
    bridge = Bridge(url, retention=Retention("P30D", 2))
    store = fill(bridge, {"old": 31, "fourth": 4, "third": 3, "second": 2, "first": 1})
    assert bridge.dead_letters.prune() == 3
    assert ids(store) == ["first", "second"]
    assert bridge.dead_letters.prune() == 0


@pytest.mark.requirement("DLQ-004")
def test_by_default(url: str) -> None:
    """The limits are the spec's own: 180 days, 10,000 letters."""
    bridge = Bridge(url)
    store = fill(bridge, {"too old": 181, "old": 179})
    assert bridge.dead_letters.prune() == 1
    assert ids(store) == ["old"]
    assert bridge.dead_letters.retention == Retention("P180D", 10_000)


@pytest.mark.requirement("DLQ-004")
def test_queues_with_limits_of_their_own(url: str) -> None:
    """Such a queue is counted by itself, and all others together."""
    own = {"billing": Retention("P365D", 3), "noise": Retention("P1D", 0)}
    bridge = Bridge(url, retention=Retention("P30D", 1, queues=own))
    fill(bridge, {f"b-{n}": 100 + n for n in range(5)}, "billing")
    fill(bridge, {"n-1": 0}, "noise")
    fill(bridge, {"m-1": 1}, "mail")
    store = fill(bridge, {"d-1": 2, "d-2": 100})
    assert bridge.dead_letters.prune() == 2 + 1 + 2
    assert ids(store) == ["m-1", "b-0", "b-1", "b-2"]


def deploy(bridge: Bridge, count: int) -> Store:
    """Bury two letters of each of four faults, and then so many of a bad deploy."""
    assert bridge.store is not None
    now = bridge.engine.now()
    for n in range(8):
        at = now - timedelta(hours=20 - n)
        bridge.store.letters.bury(
            letter(f"old-{n}", discarded_at=at, errors=({**entry(3), "type": f"e.{n % 4}"},))
        )
    for n in range(count):
        at = now - timedelta(minutes=count - n)
        bridge.store.letters.bury(letter(f"new-{n}", type="bad.deploy", discarded_at=at))
    return bridge.store


def test_a_fault_pushes_no_other_out(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its group loses its oldest; log, audit and counts say how many went, and what would keep them."""
    bridge = Bridge(url, retention=Retention(max_count=10))
    store = deploy(bridge, 30)
    bridge.dead_letters.prune_once_a_period()
    assert ids(store) == ["new-29", "new-28", *(f"old-{n}" for n in reversed(range(8)))]
    [warning] = [record for record in caplog.records if "were deleted" in record.message]
    assert warning.levelname == "WARNING"
    assert warning.message == (
        "28 dead letters were deleted, because there are more than max_count: "
        "28 of bad.deploy: external.timeout; an export keeps them, and so does Retention(archive=...)"
    )
    [record] = bridge.audit.list().records
    assert (record.action, record.outcome, record.count) == ("dead_letter.prune", "done", 28)
    assert record.subject == {"limit": "max_count", "groups": {"bad.deploy: external.timeout": 28}}
    told = Bridge(url).dead_letters.stats().retention
    assert (told["overflow"], told["overflow_of"]) == (28, {"bad.deploy: external.timeout": 28})
    assert told["fullness"] == {"*": 3.8}


def test_what_goes_is_in_the_archive(url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The warning says so."""
    archive = tmp_path / "dead.jsonl"
    bridge = Bridge(url, retention=Retention(max_count=10, archive=archive))
    deploy(bridge, 30)
    assert bridge.dead_letters.prune() == 28
    gone = [json.loads(line)["id"] for line in archive.read_text().splitlines()]
    assert gone == [f"new-{n}" for n in range(28)]
    assert "external.timeout; they are in the archive" in caplog.text


def test_a_limit_that_is_nearly_met_is_warned_of_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """Before anything goes; and again when it was less full meanwhile."""
    bridge = Bridge(url, retention=Retention(max_count=40))
    store = deploy(bridge, 28)
    for _ in range(2):
        assert bridge.dead_letters.prune() == 0
    assert bridge.dead_letters.stats().retention["fullness"] == {"*": 0.9}
    assert bridge.dead_letters.stats().retention["overflow"] == 0
    assert caplog.text.count("dead letters are nearly as many as max_count (* 90%)") == 1
    bridge.dead_letters.delete("new-0")
    bridge.dead_letters.prune()
    store.letters.bury(letter("one-more", discarded_at=bridge.engine.now()))
    bridge.dead_letters.prune()
    assert caplog.text.count("nearly as many") == 2


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(0, 200))
def test_the_largest_groups_lose_the_most(counts: list[int], excess: int) -> None:
    """What stays is as even as can be, and as many as shall stay."""
    at = datetime(2026, 11, 21, 10, tzinfo=timezone.utc)
    sizes = {f"g{n}": (count, at + n * DAY) for n, count in enumerate(counts)}
    lost = losses(sizes, excess)
    left = {name: count - lost.get(name, 0) for name, (count, _) in sizes.items()}
    assert sum(lost.values()) == min(excess, sum(counts))
    assert all(count > 0 for count in lost.values())
    assert all(left[name] >= max(left.values()) - 1 for name in lost)


@pytest.mark.requirement("DLQ-004")
def test_an_archive(url: str, tmp_path: Path) -> None:
    """The archive is JSON Lines, each letter with its whole history; earlier lines stay."""
    archive = tmp_path / "dead.jsonl"
    archive.write_text('{"id": "earlier"}\n')
    bridge = Bridge(url, retention=Retention("P30D", archive=archive))
    fill(bridge, {"older": 41, "old": 40, "new": 1})
    assert bridge.dead_letters.prune() == 2
    lines = [json.loads(line) for line in archive.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["earlier", "older", "old"]
    assert lines[1]["errors"][0]["type"] == "external.timeout"
    assert lines[1]["message"] == {"args": [7]}


@pytest.mark.requirement("DLQ-004")
def test_an_archive_has_only_what_was_pruned(url: str, tmp_path: Path) -> None:
    """A letter that a replay holds stays out of it."""
    archive = tmp_path / "dead.jsonl"
    bridge = Bridge(url, retention=Retention("P30D", archive=archive))
    store = fill(bridge, {"held": 41, "old": 40})
    held = store.letters.claim(["held"], now=bridge.engine.now(), seconds=60)
    assert bridge.dead_letters.prune() == 1
    assert [json.loads(line)["id"] for line in archive.read_text().splitlines()] == ["old"]
    assert ids(store) == ["held"]
    assert store.letters.delete(["held"], held.claim) == 1


def test_an_archive_that_cannot_be_written_loses_nothing(url: str, tmp_path: Path) -> None:
    bridge = Bridge(url, retention=Retention("P30D", archive=tmp_path / "missing" / "dead.jsonl"))
    store = fill(bridge, {"old": 40})
    with pytest.raises(FileNotFoundError):
        bridge.dead_letters.prune()
    assert ids(store) == ["old"]
    assert store.letters.claim(["old"], now=bridge.engine.now(), seconds=60).letters, (
        "it can be replayed at once"
    )


@pytest.mark.requirement("DLQ-005")
def test_one_worker_of_a_fleet_prunes_at_a_time(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker prunes when it starts and every five minutes; one event says how many letters went."""
    now = datetime.now(timezone.utc)
    monkeypatch.setattr(Bridge, "_now", lambda _: now)  # or five minutes may end in the middle
    told: list[Event] = []
    fleet = [Bridge(url, retention=Retention("P30D"), listeners=[told.append]) for _ in range(4)]
    store = fill(fleet[0], {f"j-{n}": 40 for n in range(700)})
    for bridge in fleet:
        bridge.start()
    eventually(lambda: store.letters.count(Filter()) == 0, what="they were pruned")
    eventually(lambda: told, what="it was told")
    for bridge in fleet:
        bridge.stop()
    pruned = [event.data for event in told if event.type == "dead_letter.pruned"]
    assert pruned == [{"count": 700, "pruning_policy": "delete"}]
    fill(fleet[0], {"late": 40})
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda bridge: bridge.dead_letters.prune_once_a_period(), fleet))
    assert ids(store) == ["late"]  # in the next five minutes


@pytest.mark.requirement("DLQ-005")
def test_who_died_while_pruning_stands_in_nobodys_way(url: str) -> None:
    """The next five minutes have a reservation of their own."""
    bridge = Bridge(url, retention=Retention("P30D"))
    store, now = fill(bridge, {"old": 40}), bridge.engine.now()
    until = now + timedelta(minutes=10)
    held = reservation_at("prune", PERIOD, now)
    store.reservations.reserve(held, publication="", holder="dead", mark="its", now=now, until=until)

    def pruner(at: datetime) -> Pruner:
        return Pruner(store, Retention("P30D"), lambda: at, lambda: at, whole)

    assert pruner(now).prune_once_a_period() is None
    assert ids(store) == ["old"]
    assert pruner(now + timedelta(minutes=5)).prune_once_a_period() == 1
    assert ids(store) == []


def test_a_clock_that_is_ahead_deletes_nothing(url: str) -> None:
    """Letters go by their age at the store's time, if a worker's is later. So do records."""
    bridge = Bridge(url, retention=Retention("P30D"))
    store = fill(bridge, {"old": 40, "young": 20})
    bridge.marks.add("v42")
    ahead = replace(bridge.engine.context, clock=lambda: bridge.engine.now() + 1000 * DAY)
    DeadLetters(ahead, Retention("P30D")).prune_once_a_period()
    assert ids(store) == ["young"]
    assert [mark.text for mark in bridge.marks.list()] == ["v42"]


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no duration": (lambda: Retention("soon"), "retention: max_age: 'soon'"),
    "no time": (lambda: Retention("PT0S"), "retention: max_age: 'PT0S' must be greater than zero"),
    "negative": (
        lambda: Retention(max_count=-1),
        "retention: max_count: -1 must be an integer of at least 0",
    ),
    "a number of text": (
        lambda: Retention(max_count="9"),  # type: ignore[arg-type]
        "retention: max_count: '9' must be an integer of at least 0",
    ),
    "queues of queues": (
        lambda: Retention(queues={"a": Retention(queues={"b": Retention()})}),
        "retention: queues: 'a' must have a Retention of max_age and max_count alone",
    ),
    "an empty queue": (
        lambda: Retention(queues={"": Retention()}),
        "retention: queues: '' must be the name of a queue",
    ),
    "no queues": (lambda: Retention(queues=7), "retention: queues: 7 must map queues to a Retention"),  # type: ignore[arg-type]
    "no path": (lambda: Retention(archive=7), "retention: archive: 7 must be the path of a file"),  # type: ignore[arg-type]
    "an empty path": (lambda: Retention(archive=""), "retention: archive: '' must be the path of a file"),
    "no retention": (lambda: Bridge(retention=7), "retention: 7 is not a Retention"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("make", "says"), WRONG.values(), ids=WRONG)
def test_a_wrong_retention(make: Callable[[], object], says: str) -> None:
    """The error comes where the retention is made."""
    with pytest.raises(ConfigurationError) as error:
        make()
    assert says in str(error.value)
