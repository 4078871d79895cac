"""A worker that is stopped for longer than its reservations, and wakes when its jobs have ended elsewhere."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import dramatiq
import pytest

from tests import zombies
from tests.conftest import store_url
from tests.on_dramatiq.application import Application, end
from tests.on_dramatiq.fleet import Fleet
from tests.servers import Valkey, eventually

NAMES = [name.replace(" ", "_") for name in zombies.LAST_WORDS]


@pytest.mark.requirement("RET-12", "RET-13")
@pytest.mark.parametrize("kind", zombies.STORES)
def test_what_a_run_says_after_it_was_taken_over_is_not_heard(
    kind: str, valkey: Valkey, unique: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings = {"reservation": "PT3S", "heartbeat": "1000", "store": store_url(kind, request)}
    application = Application(valkey.url, unique, tmp_path, "tests.on_dramatiq.late", **settings)
    zombie = application.start(threads=len(NAMES))
    group = [-zombie.pid]
    try:
        application.produce("send()")
        eventually(
            lambda: application.counts() == dict.fromkeys(NAMES, 1), seconds=120, what="all first runs"
        )
        zombies.stop(group, application.store_url)
        with application.working():
            eventually(lambda: application.counts().get("follows-second") == len(NAMES), seconds=90)
            (tmp_path / "go").touch()
            zombies.wake(group)
            dropped = f": attempt 1 {zombies.DROPPED}"
            eventually(lambda: application.log.read_text().count(dropped) >= len(NAMES), seconds=60)
            eventually(lambda: application.ask("left()") == 0, seconds=30, what="empty queues")
    finally:
        zombies.wake(group)
        end(zombie)
    assert application.log.read_text().count(dropped) == len(NAMES)
    assert application.counts() == {**dict.fromkeys(NAMES, 2), "follows-second": len(NAMES)}
    assert application.ask("results()") == dict.fromkeys(zombies.LAST_WORDS, "second")
    assert application.letters() == ()
    assert application.store.count_parked() == 0


@pytest.mark.requirement("RET-12")
def test_a_job_goes_on_though_the_worker_that_took_it_over_died(
    broker: dramatiq.Broker, unique: str, tmp_path: Path
) -> None:
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db", reservation="PT1S")
    runs, goes_on = threading.Event(), threading.Event()

    def handler(n: int) -> None:
        if n == 1:
            runs.set()
            goes_on.wait(30)

    job = fleet.send(fleet.actor(handler))
    with fleet.working():
        assert runs.wait(30)
        zombies.take_over(fleet.bridge.store, job.id)
        time.sleep(1.5)  # longer than the reservation of the first run
        goes_on.set()
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 2
    assert fleet.left() == 0
