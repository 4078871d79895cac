"""`ojs-bridge retries drain`: with real apps, whose brokers are in memory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import dramatiq
import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine.scheduler import CLAIM
from ojs_bridge.store import Parked
from tests.cli.running import Ran, run
from tests.cli.test_apps import celery_message

DRAMATIQ = """
import dramatiq
from dramatiq.brokers.stub import StubBroker
from ojs_bridge import Bridge
from ojs_bridge.dramatiq import install

app = broker = StubBroker()
bridge = Bridge("sqlite:///ojs.db")
install(broker, bridge)
for name in ("charge", "mail"):
    dramatiq.actor(lambda: None, broker=broker, actor_name=name)
"""

CELERY = """
from celery import Celery
from ojs_bridge import Bridge
from ojs_bridge.celery import install

app = Celery("shop", broker="memory://")
install(app, bridge := Bridge("sqlite:///ojs.db"))

@app.task(name="charge", shared=False)
def charge(): ...
"""


class App:
    """An app in a folder of its own, and the messages on its queues."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.module = import_module(name)

    @property
    def bridge(self) -> Bridge:
        """The app's bridge."""
        bridge: Bridge = self.module.bridge
        return bridge

    def park(self, job_id: str, type_: str = "charge", message: Any = None, **fields: Any) -> None:
        """Park a retry that is due in an hour."""
        assert self.bridge.store is not None
        sent = dramatiq.Message("default", type_, (), {}, {"retries": 1}, message_id=job_id)
        kept = {"encoded": sent.encode().decode(), "encoding": "utf-8"} if message is None else message
        now = self.bridge.engine.now()
        known = {
            "id": job_id, "key": job_id, "fence": 1, "type": type_, "queue": "default", "attempt": 2,
            "framework": "dramatiq", "max_attempts": 5, "next_retry_at": now + timedelta(hours=1),
            "parked_at": now, "reason": "", "state": {"v": 1, "attempt": 2}, "message": kept,
        }  # fmt: skip
        self.bridge.store.parked.park(Parked(**{**known, **fields}))

    def drain(self, *words: str) -> Ran:
        """Run the command."""
        return run("retries", "drain", "--app", f"{self._name}:app", *words)

    def delayed(self) -> dict[str, dramatiq.Message[Any]]:
        """Take the delayed messages from their queue, and return them by job."""
        queue = self.module.broker.queues["default.DQ"]
        found = [dramatiq.Message.decode(queue.get()) for _ in range(queue.qsize())]
        return {message.message_id: message for message in found}


@pytest.fixture(params=[pytest.param(DRAMATIQ, id="dramatiq")])
def app(
    request: pytest.FixtureRequest, tmp_path: Path, unique: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[App]:
    """An app, imported from its folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / f"{unique}.py").write_text(request.param)
    yield App(unique)
    del sys.modules[unique]


def test_draining_all(app: App) -> None:
    """The command asks; each retry goes on as a delayed message of its framework, its counter in step."""
    for job in ("a", "b"):
        app.park(job)
    due = app.bridge.retries.get("a").next_retry_at.timestamp()
    refused = app.drain()
    assert refused.code == 2
    assert "Publish 2 jobs of the store of" in refused.err
    assert "now, as delayed messages?" in refused.err
    done = app.drain("--yes")
    assert (done.code, done.out, done.err) == (0, "2 jobs published\n", "")
    messages = app.delayed()
    assert set(messages) == {"a", "b"}
    assert 0 <= messages["a"].options["eta"] - due * 1000 <= 1000
    assert (messages["a"].options["retries"], messages["a"].options["ojs"]["attempt"]) == (1, 2)
    assert app.drain("--yes").out == "0 jobs published\n"


def test_draining_some(app: App) -> None:
    """A dry run shows the retries of the named tasks."""
    app.park("a")
    app.park("b", "mail")
    assert [retry["id"] for retry in app.drain("--task", "ma*", "--dry-run", "--json").json] == ["b"]
    assert app.delayed() == {}
    assert app.drain("--task", "ma*", "--task", "x", "--yes", "--json").json == [
        {"published": 1, "failed": [], "held": 0, "others": {}}
    ]
    assert set(app.delayed()) == {"b"}


def test_what_stays_is_told(app: App) -> None:
    """Retries stay that cannot be published, that another worker publishes, or that another framework has."""
    app.park("broken", message={"encoded": "{", "encoding": "utf-8"})
    app.park("theirs")
    app.park("celery's", framework="celery")
    store, now = app.bridge.store, app.bridge.engine.now()
    assert store is not None
    store.parked.claim(["theirs"], now=now, until=now + CLAIM)
    done = app.drain("--yes")
    assert done.code == 1
    assert "0 jobs published" in done.out
    assert "broken" in done.out
    assert "JSON" in done.out or "Decode" in done.out
    assert "staying: 1 job that others" in done.err
    assert "staying: 1 job of celery" in done.err
    assert app.bridge.retries.count() == 3


@pytest.mark.parametrize("app", [pytest.param(CELERY, id="celery")], indirect=True)
def test_celery_s(app: App) -> None:
    """Each message has its whole `eta`, which workers without the bridge do not renew."""
    app.park("a", message=celery_message("a", 7), framework="celery")
    due = app.bridge.retries.get("a").next_retry_at
    assert app.drain("--yes").out == "1 job published\n"
    with app.module.app.connection_for_read() as connection:
        headers = connection.channel().basic_get("celery").headers
    assert datetime.fromisoformat(headers["eta"]) == due
    assert (headers["id"], headers["retries"], json.loads(headers["ojs"])["attempt"]) == ("a", 2, 2)


def test_without_an_app(store: str) -> None:
    """Without an app no retry can be published."""
    Bridge(store).dead_letters.stats()
    refused = run("retries", "drain", "--yes", store=store)
    assert refused.code == 2
    assert "app: none is given, and a message is published by the app" in refused.err
