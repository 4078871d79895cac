"""Graceful shutdown: an attempt is finished or given back, never counted twice; real processes."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.middleware import Shutdown

from ojs_bridge import open_store
from tests.on_dramatiq.application import Application, end
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import Fleet
from tests.servers import eventually


@pytest.fixture(params=["redis", "rabbitmq"])
def application(request: pytest.FixtureRequest, unique: str, tmp_path: Path) -> Application:
    """Workers of jobs that take a while, on each broker."""
    url = url_of(request, request.param)
    return Application(url, unique, tmp_path, "tests.on_dramatiq.mortal", reservation="PT10M")


def test_a_terminated_worker_finishes_a_job_or_gives_its_only_attempt_back(application: Application) -> None:
    application.produce("""
        slow.send_with_options(args=("finished", 1.5), max_retries=0)
        notified.send_with_options(args=("given", 30), max_retries=0)
    """)
    with application.working() as process:
        eventually(lambda: application.counts().keys() >= {"finished", "given"}, seconds=60)
    assert process.returncode == 0
    assert application.counts() == {"finished": 1, "finished-end": 1, "given": 1}
    with application.working():
        # At once, not when the reservation of ten minutes has run out.
        eventually(lambda: application.times("given-end"), seconds=60)
    assert application.counts() == {"finished": 1, "finished-end": 1, "given": 2, "given-end": 1}
    assert application.letters() == ()


def test_a_rolling_restart_ends_every_job_once(application: Application) -> None:
    count = 12
    application.produce(f"""
        for n in range({count}):
            slow.send_with_options(args=(f"slow{{n}}", 0.5), max_retries=0)
            notified.send_with_options(args=(f"notified{{n}}", 1), max_retries=0)
    """)
    old = [application.start(), application.start()]
    new = []
    try:
        for process in old:
            started = len(application.counts())
            eventually(
                lambda started=started: len(application.counts()) > min(started, 4 * count - 1), seconds=30
            )
            new.append(application.start())
            end(process)
            assert process.returncode == 0
        eventually(lambda: sum(w.endswith("-end") for w in application.counts()) == 2 * count, seconds=60)
    finally:
        for process in new:
            end(process)
    counts = application.counts()
    assert {counts[f"{kind}{n}-end"] for kind in ("slow", "notified") for n in range(count)} == {1}
    assert {counts[f"slow{n}"] for n in range(count)} == {1}
    assert application.letters() == ()


class Interrupted:
    """A store during whose first answer the worker is told to shut down."""

    def __init__(self, url: str) -> None:
        self.store = open_store(url)
        self.interrupts = 1

    def reserve(self, *args: Any, **options: Any) -> Any:
        """Reserve, and interrupt."""
        found = self.store.reserve(*args, **options)
        if self.interrupts and not args[0].key.startswith(("proof:", "ojs-bridge:")):
            self.interrupts -= 1
            raise Shutdown
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"], indirect=True)
def test_a_job_whose_begin_is_interrupted_has_used_no_attempt(
    broker: dramatiq.Broker, unique: str, tmp_path: Path
) -> None:
    store = Interrupted(f"sqlite:///{tmp_path}/ojs.db")
    fleet = Fleet(broker, unique, store=store, reservation=timedelta(seconds=6))
    job = fleet.send(fleet.actor(lambda n: None, max_retries=0))
    with fleet.working(threads=1):
        assert fleet.end(job).type == "job.completed"
    assert len(job.runs) == 1
