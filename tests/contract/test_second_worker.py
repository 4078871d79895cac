"""A process may have several workers, as those of test suites have, of one app or of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import dramatiq
import pytest

from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, end
from tests.contract.fleets import OnCelery
from tests.contract.steps import raises
from tests.on_celery.fleet import worker_here
from tests.servers import eventually

Made = Callable[..., Fleet]


@contextmanager
def working_here(fleet: Fleet) -> Iterator[None]:
    """Have a worker in this process."""
    if isinstance(fleet, OnCelery):
        with worker_here(fleet._fleet.app):
            yield
        return
    worker = dramatiq.Worker(fleet._broker, worker_timeout=100, worker_threads=2)
    worker.start()
    try:
        yield
    finally:
        worker.stop()


def works(*fleets: Fleet) -> None:
    """See jobs of each fleet succeed that wait in the store after their first run, and leave nothing."""
    sent = [(fleet, fleet.send("act", raises(OSError), "ok")) for fleet in fleets for _ in range(3)]
    for fleet, job in sent:
        assert end(fleet, job).type == "job.completed"
        assert attempts(fleet, job) == [1, 2]
    for fleet in fleets:
        eventually(lambda fleet=fleet: fleet.left() == 0, what="an empty queue")


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind != "celery-rabbitmq"])
def test_workers_of_one_process_follow_each_other(made: Made, kind: str) -> None:
    one, other = (made(kind, park_after="PT0.05S") for _ in range(2))
    for fleet in (one, one, other, one):
        with working_here(fleet):
            works(fleet)


@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind.startswith("dramatiq")])
def test_workers_of_one_process_work_side_by_side(made: Made, kind: str) -> None:
    """Celery has one event loop for a process, in which two of its workers fail natively, too."""
    fleet, other = (made(kind, park_after="PT0.05S") for _ in range(2))
    with working_here(fleet), working_here(other):
        with working_here(fleet):
            works(fleet, other)
        works(fleet, other)
