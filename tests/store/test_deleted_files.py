"""A SQLite file that is deleted or replaced under its workers, whose connections to it still work."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ojs_bridge import Bridge, StoreError, open_store
from ojs_bridge.rules.decision import DeadLettered
from ojs_bridge.rules.failures import Failure
from ojs_bridge.store import Grant, Store
from ojs_bridge.store.sql import SQLStore
from tests.engine.test_reservations import JOB, run
from tests.lives import FRAMEWORK
from tests.store.test_parked import parked
from tests.store.test_reservations import over, reserve
from tests.store.test_store import ids, letter


def unlink(file: Path) -> None:
    file.unlink()


def unlink_all(file: Path) -> None:
    for each in file.parent.glob(f"{file.name}*"):
        each.unlink()


def replace(file: Path) -> None:
    """Replace the file with one that has tables and no letters, as a restored backup does."""
    other = file.with_name("other.db")
    store = open_store(f"sqlite:///{other}")
    store.prepare()
    store.close()
    unlink_all(file)
    other.rename(file)


def empty(file: Path) -> None:
    unlink_all(file)
    file.touch()


def unlink_log(file: Path) -> None:
    file.with_name(f"{file.name}-wal").unlink()


def unlink_companions(file: Path) -> None:
    """Delete the write-ahead log and its index, as a clean-up of files that look temporary does."""
    unlink_log(file)
    file.with_name(f"{file.name}-shm").unlink()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The path of the store's file."""
    return tmp_path / "ojs.db"


@pytest.fixture
def store(file: Path) -> Store:
    """A store with a letter and connections that were used."""
    store = open_store(f"sqlite:///{file}")
    store.letters.bury(letter("earlier"))
    reserve(store, key="earlier")
    return store


WAYS = pytest.mark.parametrize("end", [unlink, unlink_all, replace, empty])
LOGS = pytest.mark.parametrize("end", [unlink_log, unlink_companions])


@WAYS
@pytest.mark.parametrize("write", ["bury", "park", "reserve", "settle"])
def test_what_is_written_to_a_deleted_file_is_an_error_once(
    store: Store, file: Path, end: Callable[[Path], None], write: str
) -> None:
    """The next write goes to the new file, where every store finds it."""
    steps: dict[str, Callable[[], object]] = {
        "bury": lambda: store.letters.bury(letter()),
        "park": lambda: store.parked.park(parked()),
        "reserve": lambda: reserve(store),
        "settle": lambda: store.reservations.settle(over()),
    }
    end(file)
    with pytest.raises(StoreError, match="its file was deleted or replaced"):
        steps[write]()
    for step in steps.values():
        with suppress(StoreError):
            step()
    other = open_store(f"sqlite:///{file}")
    assert (ids(other), other.parked.count(), reserve(other).grant) == (["j-1"], 1, Grant.SETTLED)
    assert ids(store) == ["j-1"]


@WAYS
def test_no_letter_is_lost_when_the_file_is_deleted_while_it_is_written(
    store: Store, file: Path, end: Callable[[Path], None]
) -> None:
    assert isinstance(store, SQLStore)
    with (
        pytest.raises(StoreError, match="its file was deleted or replaced"),
        store.connection(durable=True),
    ):
        end(file)
    store.letters.bury(letter())
    assert ids(open_store(f"sqlite:///{file}")) == ["j-1"]


@WAYS
def test_a_run_that_ends_after_the_file_was_deleted_leaves_its_letter(
    file: Path, end: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """The engine's next try writes to a new file; the log says that the old one is gone."""
    bridge = Bridge(f"sqlite:///{file}")
    begun = run(bridge, JOB)
    end(file)
    decision = DeadLettered("handler", Failure("a.b"), "why")
    bridge.engine.storing.bury(
        begun, bridge.engine.carrying.after(begun.job, decision), decision, FRAMEWORK, {}
    )
    assert [found.id for found in Bridge(f"sqlite:///{file}").dead_letters.list().letters] == ["j-1"]
    assert "its file was deleted or replaced, with all it held; it is opened anew" in caplog.text


def test_a_file_that_is_deleted_while_nothing_is_connected(store: Store, file: Path) -> None:
    """A forked child has no connection yet. The new file may even have the old file's inode number."""
    assert isinstance(store, SQLStore)
    store._dispose(close=True)
    file.write_bytes(b"")
    for _ in range(2):
        with suppress(StoreError):
            store.letters.bury(letter())
    assert ids(open_store(f"sqlite:///{file}")) == ["j-1"]


def test_a_file_is_found_wherever_its_process_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:///ojs.db")
    store.letters.bury(letter())
    monkeypatch.chdir("/")
    assert reserve(store).grant is Grant.TAKEN
    assert store.letters.bury(letter(), over())


@LOGS
@pytest.mark.parametrize("write", ["bury", "park", "reserve", "settle"])
def test_what_is_written_without_the_log_is_an_error_once(
    store: Store, file: Path, end: Callable[[Path], None], write: str
) -> None:
    """A connection goes on to write to the deleted log, which no other connection reads."""
    steps: dict[str, Callable[[], object]] = {
        "bury": lambda: store.letters.bury(letter()),
        "park": lambda: store.parked.park(parked()),
        "reserve": lambda: reserve(store),
        "settle": lambda: store.reservations.settle(over()),
    }
    end(file)
    with pytest.raises(StoreError, match=r"its write-ahead log \(-wal\) was deleted or replaced"):
        steps[write]()
    for step in steps.values():
        step()
    other = open_store(f"sqlite:///{file}")
    assert "j-1" in ids(other)
    assert (other.parked.count(), reserve(other).grant) == (1, Grant.SETTLED)


def test_the_log_that_the_last_connection_deletes_is_not_missed(store: Store, file: Path) -> None:
    """A process that forks closes its connections, and SQLite deletes the log with the last of them."""
    assert isinstance(store, SQLStore)
    for _ in range(2):
        store._dispose(close=True)
        assert not file.with_name(f"{file.name}-wal").exists()
        store.letters.bury(letter())
    assert ids(store) == ids(open_store(f"sqlite:///{file}")) == ["j-1", "earlier"]


def test_the_watch_costs_no_statement_anything(store: Store) -> None:
    """SQLAlchemy looks for listeners at each statement of an engine that has one, but not for a pool's."""
    assert isinstance(store, SQLStore)
    store.letters.bury(letter())
    assert not store._quick._has_events
    assert not store._durable._has_events
