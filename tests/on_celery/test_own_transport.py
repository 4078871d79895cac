"""A transport that names a message anew at each delivery, as a queue with receipts does."""

from __future__ import annotations

import itertools
import logging
import sqlite3
import time
import uuid
from pathlib import Path
from queue import Empty
from typing import Any

import kombu.transport
import pytest
from celery import Celery
from kombu.transport import virtual
from kombu.utils.json import dumps, loads

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.migration.plan.celery import plans
from tests.on_celery.fleet import worker_here
from tests.servers import eventually

#: Seconds after which a message that was not acknowledged is given out again.
HIDDEN = 1.0


class Channel(virtual.Channel):
    """A table of messages with a visibility timeout."""

    do_restore = supports_fanout = False
    path = ""

    def _table(self, statement: str, *values: Any) -> list[Any]:
        with sqlite3.connect(self.path, timeout=20) as table:
            table.execute("create table if not exists m(id integer primary key, q text, body text, at real)")
            return table.execute(statement, values).fetchall()

    def _put(self, queue: str, message: Any, **_: Any) -> None:
        self._table("insert into m(q, body, at) values(?, ?, ?)", queue, dumps(message), time.time())

    def _get(self, queue: str, timeout: Any = None) -> Any:
        free = "select min(id) from m where q = ? and at <= ?"
        hide = f"update m set at = ? where id = ({free}) returning id, body"
        rows = self._table(hide, time.time() + HIDDEN, queue, time.time())
        if not rows:
            raise Empty
        payload = loads(rows[0][1])
        payload["properties"]["delivery_info"]["row"] = rows[0][0]
        payload["properties"]["delivery_tag"] = uuid.uuid4().hex
        return payload

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        self._table("delete from m where id = ?", self.qos.get(delivery_tag).delivery_info["row"])
        super().basic_ack(delivery_tag)

    def _size(self, queue: str) -> int:
        return int(self._table("select count(*) from m where q = ?", queue)[0][0])

    def _new_queue(self, queue: str, **_: Any) -> None:
        """Do nothing: all are in one table."""


class Transport(virtual.Transport):
    Channel, polling_interval, default_port = Channel, 0.05, None
    driver_type, driver_name = "sql", "table"

    def driver_version(self) -> str:
        return "1"


def test_a_running_job_is_left_alone_and_an_id_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Channel, "path", str(tmp_path / "broker.db"))
    monkeypatch.setitem(kombu.transport.TRANSPORT_ALIASES, "table", f"{__name__}:Transport")
    app = Celery("own", broker="table://", set_as_current=False)
    app.conf.update(task_acks_late=True, worker_enable_remote_control=False)
    install(app, Bridge(store=f"sqlite:///{tmp_path}/ojs.db"))
    runs: list[float] = []

    @app.task(name="long", shared=False)
    def long() -> None:
        runs.append(time.monotonic())
        time.sleep(3 * HIDDEN)

    caplog.set_level(logging.WARNING, "ojs_bridge")
    with worker_here(app):
        long.apply_async(task_id="one")
        eventually(lambda: runs, what="a run")
        time.sleep(4 * HIDDEN)
        long.apply_async(task_id="one")
        eventually(lambda: len(runs) >= 2, what="a second run")
        time.sleep(4 * HIDDEN)
    assert len(runs) == 2
    assert all(after - before >= 3 * HIDDEN for before, after in itertools.pairwise(runs))
    assert f"{__name__}.Transport names a message anew at each delivery" in caplog.text
    (planned,) = plans(app, ["long"])
    assert "unknown-broker" in [hazard.name for hazard in planned.hazards]
