"""Tests without virtual time are told how not to wait; a worker's program refuses a store in memory."""

from __future__ import annotations

import os
from pathlib import Path

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker

import ojs_bridge.celery
import ojs_bridge.dramatiq
from ojs_bridge import Bridge
from ojs_bridge.testing import virtual_time
from tests.forking import started
from tests.servers import eventually

HINT = "a test need not wait for that, see ojs_bridge.testing.virtual_time"
SLOW = {"max_attempts": 3, "initial_interval": "PT30S"}
CELERY = """
from celery import Celery
from ojs_bridge import Bridge
from ojs_bridge.celery import install
app = Celery("shop", broker="memory://")
install(app, Bridge("memory://"))
"""
DRAMATIQ = """
import dramatiq
from dramatiq.brokers.stub import StubBroker
from ojs_bridge import Bridge
from ojs_bridge.dramatiq import install
broker = StubBroker()
install(broker, Bridge("memory://"))
dramatiq.set_broker(broker)
"""


def fails() -> None:
    raise OSError


def test_a_stub_broker(caplog: pytest.LogCaptureFixture) -> None:
    broker = StubBroker()
    ojs_bridge.dramatiq.install(broker, Bridge("memory://", retry=SLOW))
    actor = dramatiq.actor(fails, broker=broker)
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=1)
    worker.start()
    try:
        for _ in range(3):
            actor.send()
        eventually(lambda: caplog.text.count("retrying: attempt 1 of 3") == 3, what="the failures")
    finally:
        worker.stop()
    assert caplog.text.count(HINT) == 1


def test_celerys_broker_in_memory(caplog: pytest.LogCaptureFixture) -> None:
    """Here a worker of virtual time stands in for that of a test, which would wait."""
    app = Celery("shop", broker="memory://", set_as_current=False)
    task = app.task(fails, name="fails", shared=False)
    bridge = ojs_bridge.celery.install(app, Bridge(retry=SLOW))
    with virtual_time(app) as ojs:
        bridge.engine._hints = True
        task.delay()
        ojs.run()
    assert caplog.text.count(HINT) == 1


@pytest.mark.parametrize(
    ("text", "command"),
    [
        (CELERY, ["celery", "-A", "shop", "worker", "--pool", "solo"]),
        (DRAMATIQ, ["dramatiq", "shop", "--processes", "1", "--threads", "1"]),
    ],
    ids=["celery", "dramatiq"],
)
def test_a_program_refuses_a_store_in_memory(tmp_path: Path, text: str, command: list[str]) -> None:
    (tmp_path / "shop.py").write_text(text)
    log = tmp_path / "log"
    worker = started(command, env=os.environ, log=log, cwd=tmp_path)
    try:
        eventually(lambda: worker.poll() is not None, seconds=60, what="the end of the worker")
    finally:
        worker.kill()
    assert worker.returncode != 0
    assert "store: 'memory://' is in one process only, for tests" in log.read_text()
