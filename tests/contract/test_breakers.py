"""A breaker holds the jobs of a dependency that fails, asks with a few of them, and lets the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.answers import Service, answering
from tests.contract.conftest import SERVED
from tests.contract.fleet import Fleet, attempts, end
from tests.contract.steps import asks, raises
from tests.contract.test_holds import held
from tests.servers import eventually

Made = Callable[..., Fleet]
#: Quick, so that a test can wait for it.
QUICK = {"least": 4, "window": "PT30S", "cool_down": "PT4S", "probes": 2, "ramp": "10/s"}
PATIENT = {"max_attempts": 4, "initial_interval": "PT0.1S", "on_exhaustion": "dead_letter"}


def bank_with(breaker: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the setting for the bank, which the jobs of `act` need."""
    return ({"name": "bank", "errors": ("external.*",), "jobs": ("act",), "breaker": breaker},)


@pytest.fixture
def bank() -> Iterator[Service]:
    """A service that fails."""
    with answering() as service:
        service.says = "503"
        yield service


@pytest.mark.parametrize("kind", SERVED)
def test_a_dependency_that_fails_is_left_alone_until_it_works(made: Made, bank: Service, kind: str) -> None:
    """Its jobs are held uncounted, some probe, and each ends with a success; another job runs on."""
    fleet = made(kind, dependencies=bank_with(QUICK))
    fleet.start().await_ready()
    jobs = [fleet.send("act", asks(bank.url), policy=PATIENT) for _ in range(20)]
    eventually(lambda: len(held(fleet)) >= 16, seconds=60, what="held jobs")
    (shown,) = fleet.bridge.holds.list()
    assert (shown.hold.id, shown.hold.dependency) == ("breaker:bank", "bank")
    assert shown.held >= 16
    assert shown.hold.reason.startswith("the breaker of bank since ")
    assert " calls failed; " in shown.hold.reason
    waiting = fleet.bridge.waiting.get(held(fleet)[-1])
    assert waiting.reason.startswith("held by the breaker of bank since ")
    other = fleet.send("act_kept", "ok")
    assert end(fleet, other).type == "job.completed"
    opened = len(bank.calls["/503"])
    eventually(lambda: len(bank.calls["/503"]) >= opened + 2, seconds=60, what="probes that fail")
    assert len(bank.calls["/503"]) <= opened + 4, "two probes at a time"
    bank.says, bank.headers = "200", ""
    for job in jobs:
        assert end(fleet, job, seconds=120).type == "job.completed"
    assert (fleet.bridge.holds.list(), held(fleet)) == ([], [])
    for job in jobs:
        runs = attempts(fleet, job)
        assert runs == list(range(1, len(runs) + 1)), "a held job uses no attempt"
    assert len(bank.calls["/200"]) == 20
    told = [event.type for event in fleet.events("bank")]
    assert (told[0], told[-1]) == ("breaker.opened", "breaker.closed")
    assert "breaker.half_open" in told


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_probe_never_ends_its_job(made: Made, bank: Service, kind: str) -> None:
    """One job alone is the probe again and again; it keeps its last attempt until the bank works."""
    fleet = made(kind, dependencies=bank_with({**QUICK, "least": 2, "cool_down": "PT2S"}))
    fleet.start().await_ready()
    job = fleet.send("act", asks(bank.url), policy={**PATIENT, "max_attempts": 3})
    eventually(lambda: len(bank.calls.get("/503", ())) >= 6, seconds=90, what="probes that fail")
    bank.says, bank.headers = "200", ""
    other = fleet.send("act", asks(bank.url))
    assert end(fleet, job).type == "job.completed"
    assert end(fleet, other).type == "job.completed"
    assert attempts(fleet, job)[-1] == 3


@pytest.mark.parametrize("kind", ["celery-rabbitmq", "dramatiq-valkey"])
def test_a_budget_of_retries_keeps_no_breaker_open(made: Made, bank: Service, kind: str) -> None:
    """Probes need no budget, though all are retries; what is held by one of both goes on by both."""
    (needed,) = bank_with(QUICK)
    fleet = made(kind, dependencies=({**needed, "budget": 0.01},))

    def told() -> list[str]:
        return [event.type for event in fleet.events("bank")]

    fleet.start().await_ready()
    spending = [fleet.send("act", raises(ValueError, "a bug"), "ok", policy=PATIENT) for _ in range(12)]
    for job in spending:
        assert end(fleet, job).type == "job.completed"
    jobs = [fleet.send("act", asks(bank.url), policy=PATIENT) for _ in range(16)]
    eventually(lambda: "breaker.half_open" in told(), seconds=90, what="probes")
    bank.says, bank.headers = "200", ""
    for job in jobs:
        assert end(fleet, job, seconds=120).type == "job.completed"
    assert (held(fleet), told()[-1]) == ([], "breaker.closed")


@pytest.mark.parametrize("kind", SERVED)
def test_an_answer_that_asks_to_wait_holds_the_other_jobs(made: Made, bank: Service, kind: str) -> None:
    """The breaker stays closed: the bank works, and has said when to come again."""
    fleet = made(kind, dependencies=bank_with(QUICK))
    fleet.start().await_ready()
    bank.says, bank.headers = "429", "Retry-After=6"
    first = fleet.send("act", asks(bank.url), policy=PATIENT)
    eventually(lambda: [s.hold.id for s in fleet.bridge.holds.list()] == ["rate_limited:bank"], what="a hold")
    bank.says, bank.headers = "200", ""
    jobs = [fleet.send("act", asks(bank.url)) for _ in range(5)]
    (shown,) = fleet.bridge.holds.list()
    until = shown.hold.until
    assert until is not None
    assert "asked at" in shown.hold.reason
    for job in [first, *jobs]:
        assert end(fleet, job).type == "job.completed"
    for job in jobs:
        (run,) = fleet.runs(job)
        # A worker reads the holds once a second.
        assert run.at >= until.timestamp() or run.at <= shown.hold.since.timestamp() + 2
    assert sum(fleet.runs(job)[0].at >= until.timestamp() for job in jobs) >= 1


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey", "dramatiq-rabbitmq"])
def test_without_a_store_each_process_has_a_breaker(made: Made, bank: Service, kind: str) -> None:
    fleet = made(kind, dependencies=bank_with(QUICK), store=None)
    worker = fleet.start(threads=1)
    worker.await_ready()
    jobs = [fleet.send("act", asks(bank.url), policy=PATIENT) for _ in range(8)]
    eventually(lambda: sum("job.held" in fleet.types(job) for job in jobs) >= 3, seconds=60, what="held jobs")
    bank.says, bank.headers = "200", ""
    for job in jobs:
        assert end(fleet, job, seconds=120).type == "job.completed"
    assert "no store: each process has breakers and budgets of its own" in worker.log


def test_errors_of_the_code_do_not_open_it(made: Made) -> None:
    fleet = made("dramatiq-valkey", dependencies=bank_with(QUICK))
    fleet.start().await_ready()
    jobs = [fleet.send("act", raises(ValueError, "a bug")) for _ in range(8)]
    for job in jobs:
        assert end(fleet, job).type == "job.discarded"
    assert fleet.bridge.holds.list() == []
