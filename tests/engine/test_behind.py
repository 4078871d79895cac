"""Successes that are settled behind their jobs, within 20 ms."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone

import pytest

from ojs_bridge import Bridge, StoreError
from ojs_bridge.engine import behind as behind_module
from ojs_bridge.engine.behind import Behind
from ojs_bridge.engine.runs import Drop, Lost
from ojs_bridge.rules.decision import Complete
from ojs_bridge.rules.job import Job
from ojs_bridge.store import Reservation, Settle
from tests.conftest import store_url
from tests.engine.test_reservations import JOB, POLICY, begin, run
from tests.servers import eventually


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def behind_url(request: pytest.FixtureRequest) -> str:
    """The URL of a store that settles behind a job."""
    fresh: str = store_url(request.param, request)
    return fresh


def bridge_of(url: str, reservation: timedelta = timedelta(minutes=1)) -> Bridge:
    return Bridge(url, POLICY, reservation=reservation, settle_behind=True)


def succeed(bridge: Bridge, job: Job = JOB) -> None:
    """Run a job that succeeds."""
    bridge.engine.settling.settle(run(bridge, job), Complete())


@pytest.mark.requirement("RET-12")
def test_a_late_copy_is_dropped_here_at_once_and_elsewhere_soon(behind_url: str) -> None:
    """Nothing else has to happen for it. A flush waits for it, as a worker that ends does."""
    here, elsewhere = bridge_of(behind_url), Bridge(behind_url, POLICY)
    jobs = [JOB._replace(id=f"here-{n}") for n in range(9)]
    for job in jobs:
        succeed(here, job)
    assert all(isinstance(begin(here, job), Drop) for job in jobs)
    succeed(here)
    eventually(lambda: isinstance(begin(elsewhere, JOB), Drop))
    succeed(here, JOB._replace(id="last"))
    assert here.flush()
    assert isinstance(begin(elsewhere, JOB._replace(id="last")), Drop)
    here.stop()


def test_a_kill_before_it_is_settled_costs_what_the_guarantees_say(behind_url: str) -> None:
    """A copy waits for the reservation to run out, and the finished attempt is a lost one. Without a copy
    nothing happens.
    """
    process = multiprocessing.get_context("fork").Process(target=succeed_and_die, args=(behind_url,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    other = Bridge(behind_url, POLICY)
    eventually(lambda: isinstance(begin(other, JOB), Lost))


def succeed_and_die(url: str) -> None:
    """End a run, and be killed before its success can be written."""
    behind_module.WITHIN = 60.0
    succeed(bridge_of(url, timedelta(seconds=3)))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_fork_has_its_own(behind_url: str) -> None:
    """It settles what it runs itself; its parent goes on with its own."""
    parent = bridge_of(behind_url)
    succeed(parent)
    if (child := os.fork()) == 0:
        succeed(parent, JOB._replace(id="child's"))
        os._exit(0 if parent.flush() else 1)
    assert os.waitpid(child, 0)[1] == 0
    other = Bridge(behind_url, POLICY)
    assert isinstance(begin(other, JOB._replace(id="child's")), Drop)
    eventually(lambda: isinstance(begin(other, JOB), Drop))
    parent.stop()


def test_while_the_store_is_away_they_wait_and_only_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond that a job waits for its own settling. When the store is back all of them are written, once."""
    monkeypatch.setattr(behind_module, "MOST", 3)
    back, asked, written, lost = threading.Event(), threading.Event(), list[Settle](), list[Job]()

    def write(settles: Sequence[Settle]) -> Sequence[Reservation]:
        asked.set()
        if not back.is_set():
            raise StoreError("away")
        written.extend(settles)
        return [settles[0].reservation]

    jobs = [JOB._replace(id=f"j-{n}") for n in range(4)]
    orders = [Settle(Reservation(job.key, 0), "h", datetime.now(timezone.utc)) for job in jobs]
    behind = Behind(write, lost.append)
    assert [behind.settle(*each) for each in zip(jobs, orders, strict=True)] == [True, True, True, False]
    assert asked.wait(90)
    assert list(behind.waiting) == [job.key for job in jobs[:3]]
    back.set()
    eventually(lambda: not behind.waiting)
    assert written == orders[:3]
    assert lost == jobs[:1], "the worker that lost it says so"
