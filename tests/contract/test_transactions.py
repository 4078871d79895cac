"""A job that is sent in a transaction runs soon after the commit, and never without one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.contract.conftest import SERVED, make, working
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.steps import raises
from tests.servers import eventually
from tests.transactions import WAYS, Undone, savepoint

ON_POSTGRES = [name for name, (store, _) in WAYS.items() if store == "postgres"]
ON_SQLITE = [name for name, (store, _) in WAYS.items() if store == "sqlite"]


@pytest.fixture(scope="module", params=SERVED)
def on_postgres(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, transactions_url: str
) -> Iterator[Fleet]:
    """A working fleet of each framework on each of its brokers, with a store in PostgreSQL."""
    folder = tmp_path_factory.mktemp(request.param)
    with working(make(request, request.param, folder, store=transactions_url)) as fleet:
        yield fleet
        fleet.bridge.engine.close()


@pytest.fixture(scope="module")
def transactions_url(postgres: Any) -> Iterator[str]:
    """The URL of a database for these tests."""
    postgres.execute("CREATE DATABASE transactions")
    yield postgres.url_of("transactions")
    postgres.execute("DROP DATABASE transactions WITH (FORCE)")


@pytest.fixture
def fleet(on_postgres: Fleet) -> Fleet:
    """The fleet."""
    return on_postgres


@pytest.mark.parametrize("way", ON_POSTGRES)
def test_a_job_runs_soon_after_the_commit_and_not_before(fleet: Fleet, way: str) -> None:
    _, begin = WAYS[way]
    with begin(fleet.store) as given:
        jobs = [fleet.send("act", number, within=given) for number in range(5)]
        time.sleep(0.2)
        assert [fleet.runs(job) for job in jobs] == [[]] * 5
    committed = time.time()
    for job in jobs:
        assert end(fleet, job).type == "job.completed"
    assert [len(fleet.runs(job)) for job in jobs] == [1] * 5
    print(f"{fleet.framework} {way}: {fleet.runs(jobs[0])[0].at - committed:.3f} s after the commit")
    eventually(lambda: fleet.bridge.scheduled.count() == 0, what="an empty store")


@pytest.mark.parametrize("way", ON_POSTGRES)
def test_what_is_rolled_back_never_runs(fleet: Fleet, way: str) -> None:
    _, begin = WAYS[way]
    with suppress(Undone), begin(fleet.store) as given:
        undone = [fleet.send("act", "ok", within=given)]
        raise Undone
    with begin(fleet.store) as given:
        with savepoint(given):
            undone.append(fleet.send("act", "ok", within=given))
            raise Undone
        with savepoint(given):
            kept = fleet.send("act", "ok", within=given)
    assert end(fleet, kept).type == "job.completed"
    assert [fleet.runs(job) for job in undone] == [[], []]
    assert fleet.bridge.scheduled.count() == 0


def test_a_job_of_a_transaction_is_as_any_other(fleet: Fleet) -> None:
    _, begin = WAYS["psycopg"]
    with begin(fleet.store) as given:
        job = fleet.send("act", raises(OSError, "first"), "second", within=given, policy={"max_attempts": 7})
        same = [fleet.send("act", "ok", within=given, id=f"{fleet.queue}-same") for _ in range(2)]
        later = fleet.send("act", "ok", within=given, delay=1.5)
        followed = fleet.send("act", "result", within=given, followed_by=f"{fleet.queue}-next")
    began = time.time()
    assert end(fleet, job).type == "job.completed"
    assert [(run.attempt, run.ojs["retry"]) for run in fleet.runs(job)] == [
        (1, {"max_attempts": 7}),
        (2, {"max_attempts": 7}),
    ]
    await_runs(fleet, same[0], runs=2)
    await_runs(fleet, later)
    assert fleet.runs(later)[0].at >= began + 1.4
    eventually(lambda: fleet.followed(f"{fleet.queue}-next") == ["result"], what="its next job")
    assert end(fleet, followed).type == "job.completed"
