"""A fleet of tasks with Celery's defaults is moved as the guide says, and its worker is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from tests.forking import ended, started
from tests.servers import eventually

BEFORE = """
import os, pathlib, time
from celery import Celery
app = Celery("before", broker=os.environ["BROKER_URL"])

@app.task
def bill(order):
    print(f"bills order {order}", flush=True)
    while not pathlib.Path("go").exists():
        time.sleep(0.1)
"""
FLEET = """
from before import app
from ojs_bridge import Bridge
from ojs_bridge.celery import install
install(app, Bridge(), policies="policies.toml")
"""


def test_a_job_of_a_protected_fleet_outlives_its_worker(tmp_path: Path, valkey_url: str) -> None:
    (tmp_path / "before.py").write_text(BEFORE)
    (tmp_path / "fleet.py").write_text(FLEET)
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("OJS_BRIDGE_")},
        "BROKER_URL": valkey_url,
        "OJS_BRIDGE_STORE": f"sqlite:///{tmp_path}/ojs.db",
        "PYTHONUNBUFFERED": "1",
    }
    plan = ["ojs-bridge", "plan", "before:app", "--protect"]
    told = ended([*plan, "--write", "policies.toml"], env=env, cwd=tmp_path)
    assert told.status == 0, told.err
    assert "1 task; running jobs of 1 are lost when a worker is killed" in " ".join(told.out.split())
    assert ended([*plan, "--diff", "policies.toml"], env=env, cwd=tmp_path).status == 0
    worker = ["celery", "-A", "fleet", "worker", "-l", "INFO", "-c", "1", "--without-mingle"]
    logs = [tmp_path / "first.log", tmp_path / "second.log"]
    first = started(worker, env=env, log=logs[0], cwd=tmp_path, leads=True)
    second = None
    try:
        eventually(lambda: " ready." in logs[0].read_text(), seconds=50, what="the worker")
        sent = ended(["python", "-c", "import before; before.bill.delay(7)"], env=env, cwd=tmp_path)
        assert sent.status == 0, sent.err
        eventually(lambda: "bills order 7" in logs[0].read_text(), what="the first run")
        os.killpg(first.pid, signal.SIGKILL)
        first.wait(30)
        (tmp_path / "go").touch()
        second = started(worker, env=env, log=logs[1], cwd=tmp_path, leads=True)
        eventually(lambda: "succeeded in" in logs[1].read_text(), seconds=60, what="the second run")
        assert "attempt 1 of 3 failed with visibility_timeout" in logs[1].read_text()
    finally:
        for each in (first, second):
            if each is not None and each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
                each.wait(30)
