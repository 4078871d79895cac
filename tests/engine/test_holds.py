"""Holds, where those who set them, those who hold jobs and those who release them know different things."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, Dependency
from ojs_bridge.engine.holds import BEGINS, Releaser
from ojs_bridge.engine.runs import Held
from tests.engine.test_limits import Fleet, begin, waiting

BANK = Dependency("bank", jobs=["act"], concurrency=5)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without a worker."""
    fleet = Fleet(tmp_path)
    yield fleet
    for bridge in fleet.bridges:
        bridge.engine.close()


def releaser(bridge: Bridge, *, later: timedelta = timedelta()) -> Releaser:
    """Return the releaser of a worker, whose clock is so much later."""
    assert bridge.store is not None
    return Releaser(bridge.store, lambda: bridge.engine.now() + later, bridge.engine.dependencies)


@pytest.mark.parametrize("name", ["", 7])
@pytest.mark.parametrize("does", ["pause", "limit"])
def test_no_name_is_not_every_name(fleet: Fleet, does: str, name: Any) -> None:
    """The variable of a shell may be empty: jobs of another dependency, and of none, begin all the same."""
    operator, worker = fleet.worker(framework="operator"), fleet.worker(BANK)
    set_ = {"pause": lambda: operator.pause(dependency=name), "limit": lambda: operator.limit(name, rate=1)}
    with pytest.raises(ValueError, match=r"dependency: .* must be the name of a dependency"):
        set_[does]()
    assert not isinstance(begin(worker, "j"), Held)


def test_what_is_held_by_a_worker_that_does_not_know_yet_of_a_change_goes_on(fleet: Fleet) -> None:
    """A limit of 0 holds all jobs; another in its place does not end it, and is a second old in a worker."""
    operator, worker = fleet.worker(BANK, framework="operator"), fleet.worker(BANK)
    operator.limit("bank", concurrency=0)
    assert isinstance(begin(worker, "j-0"), Held)
    operator.limit("bank", concurrency=5)
    at_once, soon = releaser(operator), releaser(operator, later=BEGINS)
    at_once.release()
    soon.release()
    # This worker has read the holds less than a second ago.
    assert isinstance(begin(worker, "j-1"), Held)
    soon.release()
    for job_id in ("j-0", "j-1"):
        assert waiting(worker, job_id).next_retry_at <= worker.engine.now()


@pytest.mark.parametrize("does", ["pause", "limit"])
def test_a_hold_of_a_dependency_that_not_everybody_knows(fleet: Fleet, does: str) -> None:
    """A worker that does not know the dependency does not send its jobs back and forth."""
    operator, worker, other = fleet.worker(framework="o"), fleet.worker(BANK), fleet.worker(framework="other")
    hold = operator.pause(dependency="bank") if does == "pause" else operator.limit("bank", concurrency=0)
    assert isinstance(begin(worker, "j"), Held)
    releaser(other).release()
    assert waiting(worker, "j").next_retry_at > worker.engine.now()
    operator.resume(id=hold.id)
    releaser(other, later=BEGINS).release()
    assert waiting(worker, "j").next_retry_at <= worker.engine.now()
