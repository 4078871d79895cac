"""At its start a worker names the settings that weaken the bridge's promises."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from ojs_bridge import Bridge, ConfigurationError
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.celery.worker import check_app


def nothing() -> None:
    """Do nothing."""


def said(
    caplog: pytest.LogCaptureFixture, bridge: Bridge, *, broker: str = "memory://", **options: Any
) -> list[str]:
    """The warnings that a worker logs when it starts."""
    app = Celery("caveats", broker=broker, set_as_current=False, broker_transport_options=options)
    install(app, bridge, policies={"native": {}})
    ojs_task(app, shared=False, lazy=False, name="late")(nothing)
    app.task(shared=False, lazy=False, name="native")(nothing)
    app.task(shared=False, lazy=False, name="untouched")(nothing)
    app.finalize()
    with caplog.at_level(logging.WARNING, "ojs_bridge"):
        check_app(app)
    return [record.getMessage() for record in caplog.records]


@pytest.fixture
def store(tmp_path: Path) -> str:
    """The URL of a store that works."""
    return f"sqlite:///{tmp_path}/ojs.db"


def test_tasks_that_acknowledge_early_are_named(caplog: pytest.LogCaptureFixture, store: str) -> None:
    (line,) = said(caplog, Bridge(store))
    assert line.startswith("acks_late is off for native: a job whose worker dies is lost")


@pytest.mark.parametrize(("seconds", "warned"), [(59, True), (60, False)])
def test_a_visibility_timeout_below_park_after_is_named(
    caplog: pytest.LogCaptureFixture, store: str, valkey_url: str, seconds: int, warned: bool
) -> None:
    lines = said(caplog, Bridge(store), broker=valkey_url, visibility_timeout=seconds)
    found = [line for line in lines if line.startswith("visibility_timeout is 59 s, less than park_after")]
    assert bool(found) is warned


def test_a_visibility_timeout_of_nothing_is_refused(
    caplog: pytest.LogCaptureFixture, valkey_url: str
) -> None:
    with pytest.raises(ConfigurationError, match="visibility_timeout: 0"):
        said(caplog, Bridge(), broker=valkey_url, visibility_timeout=0)


@pytest.mark.parametrize(
    ("fail_open", "begins"),
    [
        (True, "until the store works, dead letters go to"),
        (False, "jobs and retries wait for the store or the broker"),
    ],
)
def test_a_store_that_cannot_be_written_is_named(
    caplog: pytest.LogCaptureFixture, store: str, fail_open: bool, begins: str
) -> None:
    Bridge(store).engine.try_store("")
    readable = store.replace("sqlite:///", "sqlite:///file:") + "?mode=ro&uri=true"
    *_, line = said(caplog, Bridge(readable, fail_open=fail_open))
    assert line.startswith(begins)
    assert "readonly" in line


def test_clocks_that_differ_are_named(caplog: pytest.LogCaptureFixture, valkey_url: str) -> None:
    class Slow(Bridge):
        def _now(self) -> datetime:
            return super()._now() - timedelta(seconds=30.9)  # this clock is asked after the store's

    *_, line = said(caplog, Slow(valkey_url))
    assert line.startswith("this machine's clock and the store's are 30.")
