"""However a process manager stops a worker, its jobs use no attempt, and go on elsewhere.

Most of them send their signal to all processes of the worker, as a terminal does.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, Worker, attempts, await_runs, end
from tests.contract.notes import client
from tests.contract.steps import KEEP, dies, raises, sleeps, waits_for
from tests.servers import eventually

Made = Callable[..., Fleet]
#: Which of a worker's processes hear a signal; a number is a pause in seconds.
Sent: TypeAlias = "tuple[str, signal.Signals] | float"
TERM, INT, QUIT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP
ONCE = {"max_attempts": 1, **KEEP}
STOPS: dict[str, list[Sent]] = {
    "TERM to the main process": [("main", TERM)],
    "TERM to all": [("all", TERM)],
    "TERM to all, twice": [("all", TERM), 0.3, ("all", TERM)],
    "TERM to all, and again later": [("all", TERM), 2.5, ("all", TERM)],
    "TERM to the children first": [("children", TERM), 0.5, ("main", TERM)],
    "TERM to the children last": [("main", TERM), 0.5, ("children", TERM)],
    "INT to all, twice": [("all", INT), 1.0, ("all", INT)],
    "QUIT to the main process": [("main", QUIT)],
    "QUIT to all": [("all", QUIT)],
    "HUP to all": [("all", HUP)],
    "HUP to all, then TERM": [("all", HUP), ("all", TERM)],
}
ALL: tuple[tuple[str, str, str], ...] = (
    ("celery-valkey", "", "TERM to all"),
    ("celery-valkey", "", "TERM to the children first"),
    ("celery-valkey", "", "QUIT to all"),
    ("celery-valkey", "", "HUP to all, then TERM"),
    ("celery-rabbitmq", "", "TERM to all, twice"),
    ("celery-rabbitmq", "", "TERM to the children last"),
    ("celery-rabbitmq", "", "HUP to all"),
    ("celery-rabbitmq", "", "INT to all, twice"),
    ("celery-rabbitmq", "-P gevent", "TERM to all, twice"),
    ("celery-valkey", "-P threads", "INT to all, twice"),
    ("celery-valkey", "-P solo", "QUIT to the main process"),
    ("dramatiq-valkey", "--processes 2", "TERM to all"),
    ("dramatiq-valkey", "--processes 2", "TERM to all, and again later"),
    ("dramatiq-valkey", "--processes 2", "HUP to all, then TERM"),
    ("dramatiq-valkey", "--processes 2", "QUIT to the main process"),
    ("dramatiq-rabbitmq", "--processes 2", "TERM to the children first"),
    ("dramatiq-rabbitmq", "--processes 2", "INT to all, twice"),
    ("dramatiq-rabbitmq", "--processes 2", "QUIT to all"),
    ("dramatiq-valkey", "gevent --processes 2", "QUIT to all"),
    ("dramatiq-rabbitmq", "gevent --processes 2", "QUIT to the main process"),
)


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("kind", "options", "stop"), ALL)
def test_a_stop_uses_no_attempt(made: Made, kind: str, options: str, stop: str) -> None:
    # On a loaded machine a process may be killed before it has given its jobs back.
    stops_without_a_loss(made(kind, visibility=5, reservation="PT20S"), options.split(), STOPS[stop])


#: Stops whose job runs longer than the grace period, and how many processes hear of each.
KILLS: tuple[tuple[str, str, str, int], ...] = (
    ("celery-valkey", "", "TERM to the main process", 1),
    ("celery-rabbitmq", "-P threads", "HUP to all", 1),
    ("celery-rabbitmq", "-P solo", "TERM to all", 1),
    ("celery-valkey", "-P gevent", "TERM to all", 1),
    ("dramatiq-valkey", "--processes 2", "HUP to all", 2),
    ("dramatiq-rabbitmq", "--processes 2", "TERM to all", 2),
)


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize(("kind", "options", "stop", "heard"), KILLS)
def test_a_stop_that_ends_in_a_kill_uses_no_attempt(
    made: Made, kind: str, options: str, stop: str, heard: int
) -> None:
    is_killed_without_a_loss(made(kind, visibility=5, reservation="PT3S"), options, STOPS[stop], heard)


def is_killed_without_a_loss(fleet: Fleet, options: str, stop: list[Sent], heard: int) -> None:
    """Stop a worker with a job, kill it when the store knows, and see the job end elsewhere."""
    fleet.start(1, *options.split()).await_ready()
    job = fleet.send("act", waits_for("never"), "ok", policy=ONCE)
    await_runs(fleet, job)
    tell(fleet.worker, stop)
    eventually(lambda: stops_noted(fleet) == heard, what="the store knows of the stop")
    fleet.worker.kill()
    fleet.start(1, *options.split()).await_ready()
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1, 1]
    assert "job.failed" not in fleet.types(job)


def stops_noted(fleet: Fleet) -> int:
    """Count the processes, with their forks, that have noted in the store that they were told to stop."""
    with closing(sqlite3.connect(fleet.store.removeprefix("sqlite:///"))) as store:
        query = "select count(*) from ojs_suspects where family like 'stop:%'"
        return int(store.execute(query).fetchone()[0])


@pytest.mark.requirement("RET-12")
def test_an_orphaned_process_that_ends_before_its_job_uses_no_attempt(made: Made) -> None:
    """Dramatiq's main process dies of QUIT, and its worker processes wait for their jobs for a while only."""
    fleet = made("dramatiq-rabbitmq", reservation="PT3S")
    fleet.start(1, "--processes", "2").await_ready()
    job = fleet.send("act", waits_for("never"), "ok", policy=ONCE)
    await_runs(fleet, job)
    tell(fleet.worker, STOPS["QUIT to the main process"])
    fleet.start(1).await_ready()
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1, 1]


@pytest.mark.requirement("RET-01")
def test_an_orphaned_process_that_its_job_kills_has_used_an_attempt(made: Made) -> None:
    """No process manager has told it to stop: its main process was killed, and then a job killed it."""
    fleet = made("dramatiq-rabbitmq", reservation="PT3S")
    fleet.start(1).await_ready()
    job = fleet.send("act", sleeps(3, dies()), policy=ONCE)
    await_runs(fleet, job)
    tell(fleet.worker, [("main", signal.SIGKILL)])
    eventually(lambda: "has died, and the worker ends" in fleet.worker.log, what="the word of the orphan")
    fleet.start(1).await_ready()
    assert end(fleet, job).type == "job.discarded"
    assert attempts(fleet, job) == [1]


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", ["dramatiq-valkey", "dramatiq-rabbitmq"])
def test_a_run_that_fails_in_an_orphaned_process_has_used_its_attempt(made: Made, kind: str) -> None:
    """Dramatiq logs the failure first, in a pipe that its main process does not read any more."""
    fleet = made(kind, visibility=5, reservation="PT3S")
    fleet.start(1).await_ready()
    job = fleet.send("act", sleeps(3, raises(OSError, "x" * 200_000)), policy=ONCE)
    await_runs(fleet, job)
    tell(fleet.worker, [("main", signal.SIGKILL)])
    assert end(fleet, job).type == "job.discarded"
    assert (attempts(fleet, job), fleet.types(job).count("job.snoozed")) == ([1], 0)


@pytest.mark.skipif(version("celery") < "5.5", reason="Celery 5.5 brought soft shutdowns")
@pytest.mark.parametrize(
    ("stop", "env"), [("QUIT to all", {}), ("TERM to all", {"REMAP_SIGTERM": "SIGQUIT"})]
)
def test_a_soft_shutdown_of_all_processes_uses_no_attempt(made: Made, stop: str, env: dict[str, str]) -> None:
    fleet = made("celery-valkey", visibility=5, soft_shutdown=2)
    stops_without_a_loss(fleet, [], STOPS[stop], **env)


@pytest.mark.skipif(version("celery") < "5.5", reason="Celery 5.5 brought soft shutdowns")
def test_a_soft_shutdown_that_ends_in_a_kill_uses_no_attempt(made: Made) -> None:
    fleet = made("celery-rabbitmq", reservation="PT3S", soft_shutdown=600)
    is_killed_without_a_loss(fleet, "", STOPS["QUIT to the main process"], 1)


def stops_without_a_loss(fleet: Fleet, options: list[str], stop: list[Sent], **env: str) -> None:
    """Stop a worker with jobs, of which some run, and see them end elsewhere at their first attempt."""
    fleet.start(2, *options, **env).await_ready()
    key = f"go:{fleet.queue}"
    jobs = [fleet.send("act", waits_for(key), policy=ONCE) for _ in range(4)]
    # Dramatiq 2.0 begins with any job of those that it has fetched together.
    eventually(lambda: any(fleet.runs(job) for job in jobs), seconds=60, what="a run")
    old = fleet.worker
    tell(old, stop)
    time.sleep(0.5)  # for those that end at once
    client(fleet.settings.backend).set(key, 1)
    old.process.wait(60)
    fleet.start(2, *options).await_ready()
    for job in jobs:
        assert end(fleet, job).type == "job.completed", old.log[-20_000:]
        assert {*attempts(fleet, job)} == {1}
        assert "job.failed" not in fleet.types(job)


def tell(worker: Worker, stop: list[Sent]) -> None:
    """Send a worker's processes the signals of a stop."""
    main = worker.process.pid
    children = below(main)
    for sent in stop:
        if isinstance(sent, float):
            time.sleep(sent)
            continue
        to, number = sent
        with suppress(ProcessLookupError):
            if to == "all":
                os.killpg(main, number)
            for process in {"main": [main], "children": children}.get(to, []):
                os.kill(process, number)


def below(process: int) -> list[int]:
    """The processes that a process has started."""
    threads = Path(f"/proc/{process}/task").glob("*/children")
    return [int(child) for thread in threads for child in thread.read_text().split()]


@pytest.mark.requirement("RET-12")
def test_a_job_that_kills_its_process_while_the_worker_stops_has_used_its_attempt(made: Made) -> None:
    fleet = made("celery-valkey", visibility=5)
    fleet.start(1).await_ready()
    key = f"go:{fleet.queue}"
    job = fleet.send("act", waits_for(key, dies()), policy=ONCE)
    await_runs(fleet, job)
    fleet.worker.ask_to_stop()
    client(fleet.settings.backend).set(key, 1)
    assert end(fleet, job).type == "job.discarded"
    assert fleet.bridge.dead_letters.get(job).errors[-1]["type"] == "worker_death"


@pytest.mark.requirement("RET-12")
def test_a_process_that_alone_is_told_to_end_has_used_its_attempt(made: Made) -> None:
    """As after `kill` by hand, or by a job; the worker goes on."""
    fleet = made("celery-rabbitmq")
    fleet.start(1).await_ready()
    job = fleet.send("act", waits_for("never"), "ok", policy={"max_attempts": 2})
    await_runs(fleet, job)
    os.kill(fleet.runs(job)[0].pid, TERM)
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1, 2]


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("kind", [kind for kind in SERVED if kind.startswith("dramatiq")])
def test_a_worker_whose_patience_is_over_gives_back_what_still_runs(made: Made, kind: str) -> None:
    fleet = made(kind, visibility=5)
    fleet.start(1, "--worker-shutdown-timeout", "500").await_ready()
    job = fleet.send("act", waits_for("never"), "ok", policy=ONCE)
    await_runs(fleet, job)
    assert fleet.worker.stop() == 0
    fleet.start(1).await_ready()
    assert end(fleet, job).type == "job.completed"
    assert attempts(fleet, job) == [1, 1]
