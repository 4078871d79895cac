"""The chore that indexes what dead letters say."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ojs_bridge import Bridge
from ojs_bridge.operations import dead_letters
from ojs_bridge.operations.groups import Indexing
from ojs_bridge.store import Letter
from tests.conftest import store_url
from tests.operations.test_groups import store_of
from tests.servers.process import eventually
from tests.store.test_groups import died, fill


def indexing(bridge: Bridge) -> Indexing:
    """The chore of a bridge."""
    return Indexing(bridge.engine.context)


def found(bridge: Bridge, text: str) -> list[str]:
    """The ids of the letters on the first page of a search."""
    return [letter.id for letter in bridge.dead_letters.list(text=text).letters]


def test_a_worker_brings_the_indexes_up_to_date(tmp_path: Path) -> None:
    """By itself, and no call waits for it."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    fill(store_of(Bridge(url)))
    bridge = Bridge(url)
    bridge.start()

    def left(what: str) -> bool:
        with sa.create_engine(url).connect() as connection:
            return bool(connection.execute(sa.text(f"select count(*) from {what}")).scalar_one())

    try:
        unsaid = "ojs_dead_letters where id not in (select id from ojs_letter_texts)"
        eventually(lambda: not left(unsaid), what="texts of all letters")
    finally:
        bridge.stop()


def test_an_error_of_any_kind_is_told_by_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread ends, and another one begins in the next period."""
    chore = indexing(Bridge(f"sqlite:///{tmp_path}/ojs.db"))
    monkeypatch.setattr(chore, "work", lambda: 1 // 0)
    chore.once_a_period()
    eventually(lambda: "were not all indexed" in caplog.text, what="a line of the log")
    assert "ZeroDivisionError" in caplog.text


def test_it_leaves_others_half_of_the_time(tmp_path: Path) -> None:
    """After a batch that took long comes a pause that is as long."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge, engine = Bridge(url), sa.create_engine(url)
    store_of(bridge).bury(died("a", 0, "a needle"))
    with ThreadPoolExecutor() as pool, engine.connect() as other:
        other.exec_driver_sql("begin immediate")
        entered = threading.Event()
        done = pool.submit(lambda: (entered.set(), indexing(bridge).work()))
        assert entered.wait(90)
        begun = time.monotonic()
        time.sleep(2)
        other.rollback()
        done.result()
        assert time.monotonic() - begun > 3
        assert other.execute(sa.text("select count(*) from ojs_letter_texts")).scalar() == 1


@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_one_page_searches_many_indexed_letters(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than it can read."""
    monkeypatch.setattr(dead_letters, "READ", 10)
    monkeypatch.setattr(dead_letters, "LOOK_THROUGH", 40)
    bridge = Bridge(store_url(kind, request))
    store_of(bridge).bury(died("needle", 0, "a needle"))
    for n in range(50):
        store_of(bridge).bury(died(f"hay-{n}", 1 + n / 1000))
    assert found(bridge, "A needle") == []
    indexing(bridge).work()
    assert found(bridge, "A needle") == ["needle"]
    assert bridge.dead_letters.replay_all(text="a needle").matched == 1


def _raise(_name: str, _value: object) -> Any:
    raise ValueError("this redaction is broken")


REDACTIONS = {"hidden": ["secret"], "replaced": lambda name, value: "****" if name == "secret" else value}


def secret() -> Letter:
    """A letter with a secret in an argument and in its error's message."""
    message = {"args": [], "kwargs": {"secret": "hunter22", "user": "ann"}, "options": {}}
    return replace(died("a", 0, "no password like hunter22"), message=message, framework="dramatiq")


@pytest.mark.parametrize(("name", "shown"), [("hidden", "[redacted]"), ("replaced", "****")])
def test_a_text_is_searched_as_it_is_shown(tmp_path: Path, name: str, shown: str) -> None:
    """A redacted letter says what stands in the place of the secret, and not the secret."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    bridge, all_seeing = Bridge(url, redact=REDACTIONS[name]), Bridge(url)
    store_of(bridge).bury(secret())
    indexing(bridge).work()
    assert found(bridge, "like [redacted]") == found(bridge, shown) == found(bridge, "ann") == ["a"]
    assert found(bridge, "hunter22") == []
    assert found(all_seeing, "HUNTER22") == ["a"]


@pytest.mark.parametrize("redact", [_raise, *REDACTIONS.values()])
def test_a_broken_redaction_stops_no_index(
    tmp_path: Path, redact: Callable[[str, Any], Any] | list[str]
) -> None:
    """The letter is looked at in each search."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    store_of(Bridge(url)).bury(secret())
    indexing(Bridge(url, redact=redact)).work()
    assert found(Bridge(url), "hunter22") == ["a"]
