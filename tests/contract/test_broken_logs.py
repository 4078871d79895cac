"""A log whose handler raises stops no thread of a worker, though broker and store are away meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.fleet import Fleet, attempts, await_runs, end
from tests.contract.steps import raises
from tests.contract.test_out_of_reach import port_of, through
from tests.instrumentation.instruments import BROKEN_LOG
from tests.servers import Proxy, Valkey, eventually

Made = Callable[..., Fleet]


@pytest.mark.requirement("RET-01", "RET-11")
@pytest.mark.parametrize("kind", ["celery-rabbitmq", "dramatiq-valkey"])
def test_every_parked_retry_runs_though_nothing_can_be_logged(
    made: Made, kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    url, broken = request.getfixturevalue(kind.partition("-")[2]).url, tmp_path / "broken"
    with Valkey() as server, Proxy(port_of(url)) as broker, Proxy(port_of(server.url)) as store:
        fleet = made(
            kind,
            broker=through(broker, url),
            store=through(store, server.url),
            park_after="PT0.5S",
            insist=1,
            instruments=("breaking_log",),
        )
        fleet.start(4, **{BROKEN_LOG: str(broken)}).await_ready()
        waits = {n: {"initial_interval": f"PT{n}S", "max_attempts": 2} for n in range(3, 15)}
        jobs = [fleet.send("act", raises(OSError), "ok", policy=policy) for policy in waits.values()]
        await_runs(fleet, *jobs)
        eventually(lambda: fleet.bridge.retries.count() > len(jobs) // 2, what="parked retries")
        broken.touch()
        broker.cut()
        store.cut()
        time.sleep(6)  # for retries to come due
        broker.mend()
        store.mend()
        time.sleep(2)  # for a thread that logs of it
        broken.unlink()
        for job in jobs:
            assert end(fleet, job, seconds=60).type == "job.completed"
            assert attempts(fleet, job) == [1, 2]
        eventually(lambda: fleet.bridge.retries.count() == 0, what="no parked retry")
