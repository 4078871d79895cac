"""A worker that dies has used an attempt: exactly `max_attempts` starts, at the policy's pace."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from celery.result import AsyncResult

from tests.contract.steps import dies, raises, sleeps
from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, Valkey

#: A pause that no redelivery has by chance.
POLICY = {"initial_interval": "PT1.5S", "backoff_strategy": "none", "max_attempts": 3}
AT_ONCE = "SIGKILL at once"
#: task and step -> the type of the error
DEATHS = {
    "SIGKILL": ("act", dies(), "worker_death"),
    AT_ONCE: ("act", dies(at_once=True), None),
    "MemoryError": ("act", raises(MemoryError), "builtins.MemoryError"),
    "hard time limit": ("hard", sleeps(60), "timeout"),
}
Made = Callable[..., Fleet]


@pytest.fixture(params=["valkey", "rabbitmq"])
def made(separate: Made, request: pytest.FixtureRequest) -> Made:
    """Makes fleets with short reservations on each broker."""
    server: Valkey | RabbitMQ = request.getfixturevalue(request.param)

    def make(**options: object) -> Fleet:
        return separate(**{"broker": server.url, "reservation": "PT2S", "visibility": 3, **options})

    return make


#: No reservation runs out while its job is judged late, which would then be called a lost attempt.
ROOM = {"reservation": "PT6S", "visibility": 9}


def assert_three_starts(fleet: Fleet, job: AsyncResult, types: set[str], *, kept: bool) -> None:
    assert fleet.end(job, seconds=90) == "FAILURE"
    assert fleet.ending(job)["dead_lettered"] is kept
    runs = fleet.runs(job)
    assert [run.attempt for run in runs] == [1, 2, 3]
    assert min(fleet.gaps(job)) >= 1.5
    failed = [event["data"] for event in fleet.events(job) if event["type"] == "job.failed"]
    # The next job may have killed the process that judged an earlier attempt before the event was sent.
    assert [data["attempt"] for data in failed] in ([1, 2, 3], [2, 3], [1, 3], [3])
    assert {data["error"]["type"] for data in failed} <= types
    if kept:
        errors = fleet.bridge.dead_letters.get(job.id).errors
        assert [entry["attempt"] for entry in errors] == [1, 2, 3]
        assert {entry["type"] for entry in errors} <= types


@pytest.mark.requirement("RET-12")
def test_a_job_that_kills_its_process_runs_as_often_as_its_policy_says(made: Made) -> None:
    fleet = made(**ROOM)
    fleet.start("-c", "4")
    both = ("dead_letter", "discard")
    judged = [(name, end) for name in DEATHS if name != AT_ONCE for end in both]
    jobs = start_and_end(fleet, judged)
    # One by one: a job could kill the process that judged another job before the event was sent.
    for end in both:
        jobs += start_and_end(fleet, [(AT_ONCE, end)])
    time.sleep(6.5)  # for what must not happen: a run after the reservation has run out
    assert {len(fleet.runs(job)) for job in jobs} == {3}


def start_and_end(fleet: Fleet, deaths: list[tuple[str, str]]) -> list[AsyncResult]:
    """Have jobs die side by side, each as often as its policy says."""
    sent = {}
    for name, end in deaths:
        task, step, _ = DEATHS[name]
        sent[name, end] = fleet.send(task, step, ojs_retry={**POLICY, "on_exhaustion": end})
    for (name, end), job in sent.items():
        expected = DEATHS[name][2]
        types = {expected} if expected else {"worker_death", "visibility_timeout"}
        assert_three_starts(fleet, job, types, kept=end == "dead_letter")
    return list(sent.values())


@pytest.mark.requirement("RET-12")
def test_a_job_that_dies_before_celery_knows_of_its_start_is_not_run_again_unseen(made: Made) -> None:
    """Celery gives such a job to another process of its pool, with no mark on it."""
    fleet = made(**ROOM)
    fleet.start("-c", "4")
    steps = dies(at_once=True)
    jobs = [fleet.send("act", steps, ojs_retry={**POLICY, "max_attempts": 1}) for _ in range(20)]
    assert {fleet.end(job, seconds=90) for job in jobs} == {"FAILURE"}
    time.sleep(6.5)  # for what must not happen: a run after the reservation has run out
    assert {len(fleet.runs(job)) for job in jobs} == {1}
