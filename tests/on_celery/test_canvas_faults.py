"""Chords, chains and groups whose jobs fail, wait, die and are replayed: what should follow follows, once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult
from celery.worker.request import Request

from tests.contract.notes import client
from tests.contract.steps import Step, dies, halts, raises, sleeps
from tests.on_celery.fleet import Fleet
from tests.servers import RabbitMQ, Valkey, eventually

ONCE = {"max_attempts": 1, "on_exhaustion": "dead_letter"}
#: A fault -> the job's steps, its policy, the place where its worker is killed, the number of runs.
FAULTS: dict[str, tuple[list[Step], dict[str, Any], str, int]] = {
    "retried": ([raises(OSError), "ok"], {}, "", 2),
    "parked": ([raises(OSError), "ok"], {"initial_interval": "PT2S"}, "", 2),
    # The job waits first: its process may have ended another job, and the worker may not know it yet.
    "kills its child": ([sleeps(4, dies()), "ok"], {}, "", 2),
    "killed at work": ([halts(), "ok"], {}, "", 2),
    "killed before its result": (["ok"], {}, "before the result", 2),
    "killed after its result": (["ok"], ONCE, "after the result", 1),
    "killed after the count": (["ok"], ONCE, "after the count", 1),
    "killed before its acknowledgement": (["ok"], ONCE, "before the acknowledgement", 1),
    "its child dies after its result": (["ok"], {}, "after the result", 1),
    "replayed": ([raises(OSError), "ok"], ONCE, "", 2),
}
#: The job's place: in a chord's header, in its body, or first in a chain. Only a chord counts.
CASES = [
    (role, fault)
    for role in ("header", "body", "first")
    for fault in FAULTS
    if role == "header" or fault not in ("killed after the count", "its child dies after its result")
]


@dataclass
class Case:
    """One canvas with a fault in one of its jobs."""

    role: str
    fault: str
    struck: AsyncResult
    end: AsyncResult

    @property
    def is_killed(self) -> bool:
        """Whether the job stops so that its worker can be killed."""
        return self.fault.startswith("killed")


def sent(fleet: Fleet, role: str, fault: str) -> Case:
    """Send a canvas."""
    steps, policy, place, _ = FAULTS[fault]
    act, follow, errback = (fleet.task(name) for name in ("act", "follow", "errback"))
    struck = act.si(*steps) if role in ("header", "first") else follow.s(*steps)
    struck.set(ojs_retry={"max_attempts": 6, **policy})
    if place:
        dies = {"dies": True} if "child" in fault else {}
        struck.set(headers={**struck.options["headers"], "halt": place, **dies})
    plain, rest = act.si("ok"), follow.s("followed")
    match role:
        case "header":
            end = chord([struck, plain], rest.on_error(errback.s())).delay()
            return Case(role, fault, end.parent.children[0], end)
        case "body":
            end = chord([plain.clone(), plain.clone()], struck.on_error(errback.s())).delay()
            return Case(role, fault, end, end)
        case _:
            end = chain(struck.on_error(errback.s()), rest).delay()
            return Case(role, fault, end.parent, end)


def expected(case: Case, results: str) -> tuple[str, int, int, int]:
    """Return the last job's state, how often the struck job and the one after it ran, and errors told."""
    runs, replayed = FAULTS[case.fault][3], case.fault == "replayed"
    if "dies" in case.fault and not hasattr(Request, "_success_was_stored"):
        runs += 1  # before Celery 5.7
    if case.role == "body":
        return "SUCCESS", runs, runs, int(replayed)
    if case.role == "header" and replayed and results == "database":
        # Celery's job that joins the chord has ended, and nothing knows the chord's other members.
        return "FAILURE", runs, 0, 1
    # Celery sends the rest of a chain before it stores the result.
    twice = case.role == "first" and case.fault == "killed before its result"
    return "SUCCESS", runs, 2 if twice else 1, int(replayed)


# Each broker and each kind of results once; all four pairs have been tried.
@pytest.fixture(params=["valkey-redis", "rabbitmq-database"])
def fleet(
    separate: Callable[..., Fleet], request: pytest.FixtureRequest, valkey: Valkey, tmp_path: Path
) -> Iterator[Fleet]:
    """A fleet on each broker, with results of each kind."""
    broker, results = request.param.split("-")
    server: Valkey | RabbitMQ = request.getfixturevalue(broker)
    client(valkey.url).delete("halts")
    places = {
        "redis": f"OnRedis+{valkey.url}",
        "database": f"InDatabase+sqlite:///{tmp_path}/results.db",
    }
    yield separate(
        broker=server.url,
        reservation="PT2S",
        visibility=3,
        park_after="PT1S",
        results=f"tests.on_celery.halting:{places[results]}",
    )


def test_what_should_follow_follows_once(fleet: Fleet, valkey: Valkey) -> None:
    pool = ("-c", "18")
    results = "database" if "InDatabase" in fleet.settings.results else "redis"
    fleet.start(*pool)
    cases = [sent(fleet, role, fault) for role, fault in CASES]
    grouped = group(fleet.task("act").si(*FAULTS[name][0]) for name in ("retried", "kills its child")).delay()
    halted = sum(case.is_killed for case in cases)
    eventually(lambda: client(valkey.url).llen("halts") == halted, seconds=90, what="all to be killed")
    for case in cases:
        if not case.is_killed:
            fleet.end(case.struck)
            fleet.end(case.end)
    assert [fleet.end(job) for job in grouped] == ["SUCCESS", "SUCCESS"]
    replayed = [case for case in cases if case.fault == "replayed"]
    for case in replayed:
        # A kill in the midst of an errback has it called once more.
        eventually(lambda case=case: errors(fleet, case), what=f"the error of {case.role}")
    fleet.replace(*pool)
    for case in replayed:
        fleet.bridge.dead_letters.replay(case.struck.id)
    wanted = {(case.role, case.fault): expected(case, results) for case in cases}
    with suppress(TimeoutError):
        eventually(lambda: seen(fleet, cases) == wanted, seconds=60)
    found = seen(fleet, cases)
    joined_again = [key for key in wanted if key[0] == "header" and found[key] == once_more(wanted[key])]
    assert len(joined_again) <= joins_again(fleet)
    assert {**found, **{key: wanted[key] for key in joined_again}} == wanted


def once_more(told: tuple[str, int, int, int]) -> tuple[str, int, int, int]:
    """The same with one more run of the job that follows."""
    state, runs, after, errors_told = told
    return state, runs, after + 1, errors_told


def joins_again(fleet: Fleet) -> int:
    """How often Celery has joined a chord that was joined already.

    Its job that joins a chord sends its next look, and is then acknowledged: a worker that is killed between
    the two leaves both.
    """
    joins = re.findall(r"celery\.chord_unlock\[(\S+)\] succeeded", fleet.worker.log)
    return len(joins) - len(set(joins))


def seen(fleet: Fleet, cases: list[Case]) -> dict[tuple[str, str], tuple[str, int, int, int]]:
    """The last job's state, the runs and the told errors of every canvas."""
    return {
        (case.role, case.fault): (
            fleet.app.AsyncResult(case.end.id).state,
            len(fleet.runs(case.struck)),
            len(fleet.runs(case.end)),
            errors(fleet, case),
        )
        for case in cases
    }


def errors(fleet: Fleet, case: Case) -> int:
    """The number of times that a canvas's errback was called."""
    return sum(len(fleet.calls(job, "errback")) for job in {case.struck, case.end})
