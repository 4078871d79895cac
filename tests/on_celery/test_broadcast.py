"""A broadcast has a copy for each worker, under one id: the bridge leaves it to Celery."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest
from celery import Celery
from kombu import Exchange
from kombu.common import Broadcast

from tests.contract.notes import client
from tests.on_celery.fleet import celery
from tests.servers import Valkey, eventually

WORKERS = ("a", "b", "c")


def answering(app: Celery) -> set[str]:
    """The workers that answer now.

    Each question has a connection of its own. On Redis, one of the app's pool would wait for answers on, and
    with it each later fork of this process; on RabbitMQ, one that is used again has lost its reply queue.
    """
    with app.connection_for_write() as connection:
        return {name for answer in app.control.ping(timeout=1, connection=connection) for name in answer}


@pytest.mark.parametrize("broker", ["rabbitmq", "valkey"])
def test_each_worker_runs_a_broadcast_and_nothing_multiplies(
    broker: str, valkey: Valkey, unique: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(broker).url
    named = {"APP_NAME": unique, "APP_BROKER": url, "APP_NOTES": valkey.url}
    env = {**os.environ, **named, "APP_STORE": f"sqlite:///{tmp_path}/ojs.db"}
    log = tmp_path / "log"
    command = ["-A", "tests.on_celery.broadcasting", "worker", "-P", "solo", "-l", "WARNING", "-n"]
    workers = [celery([*command, f"{name}@here"], env, log) for name in WORKERS]
    app = Celery(unique, broker=url, set_as_current=False)
    routes = {"told": {"queue": unique, "exchange": unique, "routing_key": "celery"}}
    app.conf.update(task_queues=[Broadcast(unique)], task_routes=routes)
    # On Redis a connection sends to the fanouts that it has declared, and to no others.
    declare = [Exchange(unique, type="fanout")]
    notes = client(valkey.url)
    try:
        # The workers of other tests may answer, too.
        eventually(lambda: answering(app) >= {f"{name}@here" for name in WORKERS}, seconds=60)
        app.send_task("told", (0,), task_id="job", declare=declare)
        eventually(lambda: notes.llen(f"{unique}:runs") >= len(WORKERS), seconds=30)
        app.send_task("told", (1,), task_id="fails", declare=declare)
        # Natively each worker's retry is a broadcast, too: three runs, and then nine. On Redis it goes
        # nowhere, since the worker's connection for sending has not declared the fanout.
        retries = 3 if broker == "rabbitmq" else 0
        eventually(lambda: notes.llen(f"{unique}:runs") >= 6 + 3 * retries, seconds=30)
        time.sleep(1)  # for what must not happen: another copy
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait(90)
    runs = Counter(notes.lrange(f"{unique}:runs", 0, -1))
    assert runs == {
        f"{name}@here {n}": count for name in WORKERS for n, count in ((0, 2), (1, retries)) if count
    }
    assert log.read_text().count("task told: its broadcasts stay native, since each worker runs a copy") == 3
