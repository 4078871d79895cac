"""A job that is sent in a transaction runs soon after the commit, and never without one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from ojs_bridge import NotInTransaction
from tests.contract.conftest import SERVED, make, working
from tests.contract.fleet import Fleet, await_runs, end
from tests.contract.sender import STEPS
from tests.contract.steps import raises
from tests.forking import Forked, module
from tests.servers import Postgres, eventually
from tests.transactions import WAYS, Undone, fail, of_psycopg, savepoint

ON_POSTGRES = [name for name, (store, _) in WAYS.items() if store == "postgres"]


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
def transactions_url(postgres: Postgres) -> Iterator[str]:
    """The URL of a database for these tests."""
    name = f"t{uuid4().hex[:10]}"
    postgres.execute(f"CREATE DATABASE {name}")
    yield postgres.url_of(name)
    postgres.execute(f"DROP DATABASE {name} WITH (FORCE)")


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
    eventually(lambda: fleet.bridge.scheduled.count() == 0, what="an empty store")


def test_a_job_of_a_transaction_is_as_any_other(fleet: Fleet) -> None:
    _, begin = WAYS["psycopg"]
    with begin(fleet.store) as given:
        job = fleet.send("act", raises(OSError, "first"), "second", within=given, policy={"max_attempts": 7})
        same = [fleet.send("act", "ok", within=given, id=f"{fleet.queue}-same") for _ in range(2)]
        sent = time.time()
        later = fleet.send("act", "ok", within=given, delay=1.5)
        followed = fleet.send("act", "result", within=given, followed_by=f"{fleet.queue}-next")
    assert end(fleet, job).type == "job.completed"
    assert [(run.attempt, run.ojs["retry"]) for run in fleet.runs(job)] == [
        (1, {"max_attempts": 7}),
        (2, {"max_attempts": 7}),
    ]
    await_runs(fleet, same[0], runs=2)
    await_runs(fleet, later)
    (run,) = fleet.runs(later)
    assert (run.at >= run.due, run.due >= sent + 1.5) == (True, True)
    eventually(lambda: fleet.followed(f"{fleet.queue}-next") == ["result"], what="its next job")
    assert end(fleet, followed).type == "job.completed"


@pytest.mark.parametrize("way", [name for name in ON_POSTGRES if name in ("psycopg", "django")])
def test_a_sender_that_is_killed_after_the_commit_has_sent_its_job_once(
    fleet: Fleet, way: str, tmp_path: Path
) -> None:
    """What it has claimed is published when its claim has ended."""
    jobs = {step: f"{fleet.queue}-{way}-{step}" for step in STEPS}
    environment = {**os.environ, **fleet.settings.to_env()}
    senders = [
        Forked(
            module,
            *("tests.contract.sender", fleet.framework, way, step, job),
            env=environment,
            log=tmp_path / f"{step}.log",
        )
        for step, job in jobs.items()
    ]
    for step, sender in zip(STEPS, senders, strict=True):
        assert sender.wait(90) == -signal.SIGKILL, (tmp_path / f"{step}.log").read_text()
    for step in STEPS:
        if step != "sent":
            assert end(fleet, jobs[step]).type == "job.completed"
    eventually(lambda: fleet.bridge.scheduled.count() == 0, seconds=60, what="an empty store")
    eventually(lambda: fleet.left() == 0, what="an empty queue")
    assert {step: len(fleet.runs(job)) for step, job in jobs.items()} == {
        **dict.fromkeys(STEPS, 1),
        "sent": 0,
    }


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_database_that_is_killed_keeps_what_was_committed(made: Callable[..., Fleet], kind: str) -> None:
    with Postgres() as server:
        fleet = made(kind, store=server.url)
        fleet.start(2).await_ready()
        with suppress(psycopg.OperationalError), of_psycopg(server.url) as given:
            lost = fleet.send("act", "ok", within=given)
            server.kill()
        server.restart()
        with of_psycopg(server.url) as given:
            kept = [fleet.send("act", "ok", within=given) for _ in range(20)]
        server.kill()
        time.sleep(1)
        server.restart()
        for job in kept:
            assert end(fleet, job).type == "job.completed"
        eventually(lambda: fleet.bridge.scheduled.count() == 0, seconds=60, what="an empty store")
        assert [len(fleet.runs(job)) for job in (lost, *kept)] == [0, *[1] * 20]
        fleet.bridge.engine.close()
        fleet.close()


def test_what_cannot_be_sent_in_a_transaction_is_not_sent(fleet: Fleet, postgres_url: str) -> None:
    _, begin = WAYS["psycopg"]
    with begin(postgres_url) as elsewhere:
        for given, why in ((7, "is not a connection"), (elsewhere, "does not see the tables of the store")):
            with pytest.raises(NotInTransaction, match=why):
                fleet.send("act", "ok", within=given)
    with suppress(Undone), begin(fleet.store) as failed:
        fail(failed)
        with pytest.raises(NotInTransaction, match="the transaction has failed"):
            fleet.send("act", "ok", within=failed)
        raise Undone
    eventually(lambda: (fleet.bridge.scheduled.count(), fleet.left()) == (0, 0), what="no job anywhere")
