"""No error between a delivery and its handler loses the job: the job runs later, or it is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from ojs_bridge.store import Filter
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.steps import sleeps, takes_the_stack, uses_up_descriptors
from tests.faults import AFTERWARDS, KINDS, LACKS, STEPS_OF, Faults, place_of
from tests.servers import eventually


@pytest.mark.parametrize("step", [*itertools.chain(*STEPS_OF.values()), *AFTERWARDS])
def test_every_step_is_there(step: str) -> None:
    owner, name = place_of(step)
    assert callable(getattr(owner, name))


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_whatever_raises_before_a_handler_keeps_the_job(
    made: Callable[..., Fleet], kind: str, tmp_path: Path
) -> None:
    fleet, faults = made(kind, visibility=5, heard=kind.startswith("celery")), Faults(tmp_path)
    fleet.start(2, **faults.env).await_ready()
    store = fleet.bridge.store
    assert store is not None

    def is_somewhere(job: str) -> bool:
        return bool(fleet.runs(job)) or job in fleet.dead() or store.letters.get(job) is not None

    for step, error in zip(STEPS_OF[fleet.framework], itertools.cycle(KINDS), strict=False):
        with faults.at(step, error):
            job = fleet.send("act", "ok")
        eventually(lambda job=job: is_somewhere(job), seconds=45, what=f"the job after {error} at {step}")
    await_runs(fleet, fleet.send("act", "healthy"))


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_what_a_process_lacks_as_a_job_begins_buries_no_job(
    made: Callable[..., Fleet], kind: str, tmp_path: Path
) -> None:
    fleet, faults = made(kind, visibility=5, heard=kind.startswith("celery")), Faults(tmp_path)
    fleet.start(2, **faults.env).await_ready()
    store = fleet.bridge.store
    assert store is not None
    for step, error in zip(STEPS_OF[fleet.framework], itertools.cycle(LACKS), strict=False):
        with faults.at(step, error.__name__):
            job = fleet.send("act", "ok")
        eventually(lambda job=job: fleet.runs(job), seconds=45, what=f"the job after {error} at {step}")
    assert (fleet.dead(), store.letters.count(Filter())) == (set(), 0)


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey", "dramatiq-rabbitmq"])
def test_a_job_that_takes_the_stack_of_its_process_buries_no_other(
    made: Callable[..., Fleet], kind: str
) -> None:
    fleet = made(kind, visibility=5)
    fleet.start(1 if fleet.framework == "celery" else 4).await_ready()
    taking = fleet.send("act", takes_the_stack(4))
    await_runs(fleet, taking)
    jobs = [fleet.send("act", sleeps(0.2)) for _ in range(24)]
    for job in (taking, *jobs):
        eventually(lambda job=job: fleet.runs(job), seconds=60, what="its run")
    assert (fleet.dead(), fleet.bridge.dead_letters.list().letters) == (set(), ())


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_worker_without_descriptors_buries_no_job(
    made: Callable[..., Fleet], kind: str, postgres_store_url: str
) -> None:
    """What it cannot ask the store waits; what it was asking goes on by the connections that are open."""
    fleet = made(kind, store=postgres_store_url)
    fleet.start(1 if fleet.framework == "celery" else 4).await_ready()
    await_end = [fleet.send("act", uses_up_descriptors(6))]
    await_runs(fleet, *await_end)
    await_end += [fleet.send("act", sleeps(0.2)) for _ in range(30)]
    ends = {end(fleet, job).type for job in await_end}
    assert (ends, fleet.bridge.dead_letters.list().letters, fleet.dead()) == ({"job.completed"}, (), set())
