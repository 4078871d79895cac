"""A worker's program refuses a store in memory."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.forking import started
from tests.servers import eventually

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
