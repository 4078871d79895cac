"""Whatever is raised between a delivery and its handler: the job runs later or is kept, and is never gone."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults import KINDS, STEPS, Faults, place_of
from tests.on_celery.fleet import Fleet
from tests.on_celery.worker_steps import AFTERWARDS, OWN
from tests.servers import eventually


@pytest.mark.parametrize("step", [*STEPS, *OWN, *AFTERWARDS])
def test_every_step_is_there(step: str) -> None:
    owner, name = place_of(step)
    assert callable(getattr(owner, name))


@pytest.mark.requirement("RET-01")
def test_whatever_raises_before_a_handler_keeps_the_job(
    separate: Callable[..., Fleet], tmp_path: Path
) -> None:
    fleet, faults = separate(visibility=5), Faults(tmp_path)
    fleet.start("-c", "2", env=faults.env).await_ready()
    store = fleet.bridge.store
    assert store is not None
    found: set[str] = set()

    def is_somewhere(job_id: str) -> bool:
        found.update(message.headers["id"] for message in fleet.buried(fleet.settings.queue))
        ran = fleet.runs(fleet.app.AsyncResult(job_id))
        return bool(ran) or job_id in found or store.get(job_id) is not None

    for step, kind in zip((*STEPS, *OWN), itertools.cycle(KINDS), strict=False):
        with faults.at(step, kind):
            job = fleet.send("act", "'ok'")
        eventually(lambda job=job: is_somewhere(job.id), seconds=45, what=f"the job after {kind} at {step}")
    assert fleet.send("ping").get(timeout=20) == "pong"


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", ["RuntimeError", "OddStoreError"])
def test_a_crash_that_cannot_be_judged_is_judged_later(
    separate: Callable[..., Fleet], tmp_path: Path, kind: str
) -> None:
    fleet, faults = separate(visibility=5), Faults(tmp_path)
    fleet.start("-c", "2", env=faults.env).await_ready()
    with faults.at("celery.execution:TaskRun.resume", kind):
        job = fleet.send("act_kept", "sigkill()", "'again'")
    assert fleet.end(job) == "SUCCESS"
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]
    with faults.at("celery.request:OJSRequest._ojs_forget", kind):
        assert fleet.send("act", "'ok'").get(timeout=30) == "ok"
    assert fleet.send("ping").get(timeout=20) == "pong"
