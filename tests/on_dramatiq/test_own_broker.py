"""A broker of one's own hands out messages that do not say whether they come again."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.broker import Broker, Consumer, MessageProxy
from dramatiq.common import dq_name

from ojs_bridge import Bridge, Unreachable
from ojs_bridge.dramatiq import OJSRetries
from tests.servers import eventually

#: Seconds after which a message that was not acknowledged is given out again.
HIDDEN = 1.0


class TableBroker(Broker):
    """A table of messages with a visibility timeout."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path, self._lock = path, threading.Lock()
        self.table("create table m(id integer primary key, q text, body blob, due real, dead int default 0)")

    def table(self, statement: str, *values: Any) -> list[Any]:
        with self._lock, sqlite3.connect(self._path, timeout=20) as table:
            return table.execute(statement, values).fetchall()

    def declare_queue(self, queue_name: str) -> None:
        if queue_name not in self.queues:
            self.emit_before("declare_queue", queue_name)
            self.queues[queue_name] = True
            self.emit_after("declare_queue", queue_name)
            self.delay_queues.add(dq_name(queue_name))
            self.emit_after("declare_delay_queue", dq_name(queue_name))

    def enqueue(self, message: Any, *, delay: int | None = None) -> Any:
        self.emit_before("enqueue", message, delay)
        words = message.queue_name, message.encode(), time.time() + (delay or 0) / 1000
        self.table("insert into m(q, body, due) values(?, ?, ?)", *words)
        self.emit_after("enqueue", message, delay)
        return message

    def consume(self, queue_name: str, prefetch: int = 1, timeout: int = 5000) -> Consumer:
        return TableConsumer(self, queue_name)


class TableConsumer(Consumer):
    def __init__(self, broker: TableBroker, queue: str) -> None:
        self._broker, self._queue = broker, queue

    def __next__(self) -> Any:
        free = "select min(id) from m where q = ? and due <= ? and dead = 0"
        hide = f"update m set due = ? where id = ({free}) returning id, body"
        rows = self._broker.table(hide, time.time() + HIDDEN, self._queue, time.time())
        if not rows:
            time.sleep(0.05)
            return None
        message: Any = MessageProxy(dramatiq.Message.decode(rows[0][1]))
        message.row = rows[0][0]
        return message

    def ack(self, message: Any) -> None:
        self._broker.table("delete from m where id = ?", message.row)

    def nack(self, message: Any) -> None:
        self._broker.table("update m set dead = 1 where id = ?", message.row)

    def requeue(self, messages: Any) -> None:
        for message in messages:
            self._broker.table("update m set due = 0 where id = ?", message.row)


@pytest.mark.parametrize("stored", [True, False])
def test_a_broker_of_ones_own_promises_less_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, stored: bool
) -> None:
    broker = TableBroker(tmp_path / "broker.db")
    bridge = Bridge(store=f"sqlite:///{tmp_path}/ojs.db" if stored else None)
    broker.add_middleware(OJSRetries(bridge))
    runs: list[float] = []

    @dramatiq.actor(broker=broker)
    def long() -> None:
        runs.append(time.monotonic())
        time.sleep(3 * HIDDEN)

    @dramatiq.actor(broker=broker, ojs_retry={"max_attempts": 1, "on_exhaustion": "dead_letter"})
    def bad() -> None:
        raise OSError

    caplog.set_level(logging.WARNING, "ojs_bridge")
    worker = dramatiq.Worker(broker, worker_threads=4, worker_timeout=100)
    worker.start()
    try:
        bad.send()
        if stored:
            long.send()
            eventually(lambda: runs, what="a run")
            time.sleep(4 * HIDDEN)
            assert len(runs) == 1
            assert [letter.type for letter in bridge.dead_letters.list().letters] == ["bad"]
        else:
            eventually(lambda: broker.table("select 1 from m where dead = 1"), what="a dead message")
            with pytest.raises(Unreachable, match="cannot look"):
                bridge.broker_letters.list()
            assert "where `Bridge.broker_letters` finds them" not in caplog.text
        assert "TableBroker is no broker of Dramatiq's own" in caplog.text
    finally:
        worker.stop()
