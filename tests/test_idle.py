"""A worker that has nothing to do asks its broker and its store a few times a second, and no more."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from benchmarks.fleets import BROKER, STORE, Fleet, OnCelery, OnDramatiq
from benchmarks.side import Counts, Side
from tests.servers import Valkey, eventually

JOBS = 10
#: How long an idle worker is watched, in seconds, and the trips that a second has at most: one of the
#: presence, one of the scheduler, and those by which the frameworks ask for messages. A few are of rates.
WATCHED = 10.0
MOST = {"dramatiq": 4.0, "celery": 3.0}


def trips_to(client: redis.Redis) -> int:
    """Return how many scripts have been asked for; an idle worker of the bridge asks for little else."""
    asked = client.info("commandstats")
    return sum(asked.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))


@pytest.mark.parametrize(("framework", "fleet_on"), [("dramatiq", OnDramatiq), ("celery", OnCelery)])
def test_an_idle_worker_asks_seldom(framework: str, fleet_on: Callable[[str], Fleet], tmp_path: Path) -> None:
    with Valkey() as valkey, redis.Redis.from_url(valkey.url) as client:
        server = valkey.url.removesuffix("/0")
        Counts.create(tmp_path / "counts")
        counts, broker, store = str(tmp_path / "counts"), f"{server}/{BROKER}", f"{server}/{STORE}"
        side, fleet = Side(framework, 2, counts, broker, store, bridged=True), fleet_on(server)
        with (tmp_path / "log").open("w") as log:
            worker = subprocess.Popen(
                [sys.executable, *fleet.command(side)],
                env={**os.environ, **side.to_env()},
                stdout=log,
                stderr=log,
                text=True,
            )
        try:
            fleet.fill(side, JOBS, worker)
            eventually(
                lambda: Counts(counts).total() == JOBS and fleet.is_empty(side), seconds=60, what="the jobs"
            )
            time.sleep(2.0)  # until it has nothing more to do for them
            begun, before = time.monotonic(), trips_to(client)
            time.sleep(WATCHED)
            trips, seconds = trips_to(client) - before, time.monotonic() - begun
        finally:
            worker.terminate()
            worker.wait(60)
    assert seconds < trips <= MOST[framework] * seconds + 3
