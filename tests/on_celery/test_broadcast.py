"""A broadcast has a copy for each worker, under one id: the bridge leaves it to Celery."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from celery import Celery
from kombu.common import Broadcast

from tests.contract.notes import client
from tests.on_celery.fleet import celery
from tests.servers import RabbitMQ, Valkey, eventually

WORKERS = ("a", "b", "c")


def test_each_worker_runs_a_broadcast_and_nothing_multiplies(
    rabbitmq: RabbitMQ, valkey: Valkey, unique: str, tmp_path: Path
) -> None:
    named = {"APP_NAME": unique, "APP_BROKER": rabbitmq.url, "APP_NOTES": valkey.url}
    env = {**os.environ, **named, "APP_STORE": f"sqlite:///{tmp_path}/ojs.db"}
    log = tmp_path / "log"
    command = ["-A", "tests.on_celery.broadcasting", "worker", "-P", "solo", "-l", "WARNING", "-n"]
    workers = [celery([*command, f"{name}@here"], env, log) for name in WORKERS]
    app = Celery(unique, broker=rabbitmq.url, set_as_current=False)
    routes = {"told": {"queue": unique, "exchange": unique}}
    app.conf.update(task_queues=[Broadcast(unique)], task_routes=routes)
    notes = client(valkey.url)
    try:
        eventually(lambda: len(app.control.ping(timeout=1)) == len(WORKERS), seconds=60)
        app.send_task("told", (0,), task_id="job")
        eventually(lambda: notes.llen(f"{unique}:runs") >= len(WORKERS), seconds=30)
        app.send_task("told", (1,), task_id="fails")
        # Natively each worker's retry is a broadcast, too: three runs, and then nine.
        eventually(lambda: notes.llen(f"{unique}:runs") >= 15, seconds=30)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(30)
    runs = Counter(notes.lrange(f"{unique}:runs", 0, -1))
    assert runs == {f"{name}@here {n}": count for name in WORKERS for n, count in ((0, 2), (1, 3))}
    assert log.read_text().count("task told: its broadcasts stay native, since each worker runs a copy") == 3
