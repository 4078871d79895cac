"""`ojs-bridge shadow`, on a real store."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

import pytest

from ojs_bridge import Bridge
from ojs_bridge.store import Tally
from tests.cli.running import run, spawn_all

NOW = datetime(2026, 11, 22, 10, 0, tzinfo=timezone.utc)
EXAMPLE = {
    "job_id": "j-1",
    "attempt": 2,
    "at": "2026-11-22T10:00:00.000Z",
    "error_type": "external.down",
    "message": "no \x1b[31manswer",
    "native": "retry 2 in 26.1 s",
    "ojs": "retry 2 in 5 s to 15 s",
}
WHY = "retry 2 in 26.1 s; the policy: retry 2 in 5 s to 15 s"


@pytest.fixture
def recorded(store: str) -> Bridge:
    """A store with tallies of two tasks."""
    bridge = Bridge(store)
    assert bridge.store is not None
    bridge.store.record_shadows(
        [
            Tally("celery", "billing.charge", "delay", 30, NOW, WHY, (EXAMPLE,)),
            Tally("celery", "billing.charge", "same", 170, NOW),
            Tally("celery", "billing.charge", "uncompared", 1800, NOW),
            Tally("dramatiq", "mail\x1b[2Jsend", "bridged", 3, NOW),
        ]
    )
    return bridge


@pytest.mark.usefixtures("recorded")
def test_the_report(store: str) -> None:
    """The report has the rate of each task, each kind of difference, and examples; the cursor stays."""
    told = run("shadow", "report", store=store).out
    for words in (
        "shadow_match_rate",
        "200 of 2,000",
        "0.8500",
        "billing.charge: delay, 30 of 200.",
        WHY,
        "j-1",
    ):
        assert words in told
    assert "Both retry, but the policy would not choose the framework's delay." in told
    assert "\x1b" not in told


@pytest.mark.usefixtures("recorded")
def test_the_report_as_json(store: str) -> None:
    """Each task is an object."""
    charge, send = run("shadow", "report", "--json", store=store).json
    assert (charge["task"], charge["framework"]) == ("billing.charge", "celery")
    assert (charge["failed"], charge["compared"], charge["matched"]) == (2000, 200, 170)
    assert (charge["shadow_match_rate"], send["shadow_match_rate"], send["bridged"]) == (0.85, None, 3)
    (delay,) = charge["differences"]
    assert (delay["kind"], delay["count"], delay["explanation"], delay["examples"]) == (
        "delay",
        30,
        WHY,
        [EXAMPLE],
    )
    assert delay["meaning"].startswith("Both retry")


def test_nothing_recorded(store: str) -> None:
    """The output says the possible reasons."""
    Bridge(store).store.prepare()  # type: ignore[union-attr]
    assert "nothing has been recorded" in run("shadow", "report", store=store).out
    assert run("shadow", "report", "--json", store=store).out == ""
    assert run("shadow", "clear", store=store).out == "0 tasks forgotten\n"


def test_clearing(recorded: Bridge, store: str) -> None:
    """The command asks, and then no tally is left."""
    refused = run("shadow", "clear", store=store)
    assert refused.code == 2
    assert "Forget what shadow mode has recorded in sqlite:" in refused.err
    assert recorded.store is not None
    assert len(recorded.store.shadows()) == 4
    assert run("shadow", "clear", "--yes", "--json", store=store).json == [{"tasks": 2}]
    assert recorded.store.shadows() == []


APPS = {
    "of_celery": "from celery import Celery\napp = Celery('proj')\n",
    "of_dramatiq": "from dramatiq.brokers.stub import StubBroker\napp = StubBroker()\n",
}
SHADOW = """
from ojs_bridge import Bridge
from ojs_bridge.migration import shadow
shadow(app, Bridge({store!r}), policies="only-workers-read-it.toml")
"""


@pytest.mark.usefixtures("recorded")
def test_the_app_of_a_shadow(store: str, tmp_path: Path) -> None:
    """The command reads the store of the shadow's bridge, although no task is under a bridge."""
    for name, app in APPS.items():
        (tmp_path / f"{name}.py").write_text(app + SHADOW.format(store=store))
    told = spawn_all(*(("shadow", "report", "--json", "--app", f"{name}:app") for name in APPS), cwd=tmp_path)
    for answer in told:
        assert answer.code == 0, answer.err
        assert [one["task"] for one in answer.json] == ["billing.charge", "mail\x1b[2Jsend"]
