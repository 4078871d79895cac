"""A breaker that workers share: each counts for itself, and together they open it, probe and close it."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest

from ojs_bridge import Breaker, Bridge, Dependency, Event
from ojs_bridge.engine.breakers import Breakers
from ojs_bridge.engine.runs import Run
from ojs_bridge.rules.decision import Complete, DeadLettered, Decision, RetryAt, SnoozeUntil
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job
from tests.servers import eventually
from tests.servers.valkey import Valkey

BREAKER = Breaker(share=0.5, least=10, window="PT1M", cool_down="PT6S", probes=3, ramp="5/s")
WORKERS = 6


@pytest.fixture(params=["sqlite", "valkey"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ojs.db"
    valkey: Valkey = request.getfixturevalue("valkey")
    return valkey.url


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def workers(url: str, heard: list[Event], request: pytest.FixtureRequest) -> Iterator[list[Bridge]]:
    """Bridges of as many workers."""
    needed = [Dependency("bank", ["bank.*"], ["pay"], BREAKER)]
    yield [
        Bridge(url, namespace=request.node.name, dependencies=needed, listeners=[heard.append])
        for _ in range(WORKERS)
    ]


def breakers_of(bridge: Bridge) -> Breakers:
    assert bridge.engine.breakers
    return bridge.engine.breakers


def a_run(bridge: Bridge, number: int, attempt: int = 1) -> Run:
    """Return the run of a job, as an adapter would have it."""
    task = bridge.engine.task()
    run = bridge.engine.admit(Job(f"j-{number}", "pay", "default", attempt), Job("", "", ""), task)
    assert isinstance(run, Run)
    return run


def failed(bridge: Bridge, type_: str = "bank.down") -> Decision:
    return RetryAt(bridge.engine.now(), 1.0, Failure(type_), "")


def open_it(workers: list[Bridge]) -> None:
    """Have each worker hear of failures until the breaker is open."""
    for number in range(100):
        bridge = workers[number % WORKERS]
        breakers_of(bridge).heard(a_run(bridge, number), failed(bridge))
        if any(hold.hold.id == "breaker:bank" for hold in bridge.holds.list()):
            return
    raise AssertionError("it has not opened")


def probes(workers: list[Bridge], count: int = 8) -> list[tuple[Bridge, Run]]:
    """Return the runs that go through as probes when all workers ask at once."""

    def ask(number: int) -> tuple[Bridge, Run] | None:
        bridge = workers[number % len(workers)]
        run = a_run(bridge, number)
        return None if breakers_of(bridge).known.of(run.job) else (bridge, run)

    with ThreadPoolExecutor(WORKERS) as pool:
        return [went for went in pool.map(ask, range(count)) if went]


def test_the_life_of_a_breaker(workers: list[Bridge], heard: list[Event]) -> None:
    """No one worker has heard of so many failures as open it."""
    open_it(workers)
    (shown,) = workers[0].holds.list()
    assert shown.hold.jobs == ("pay",)
    for bridge in workers:
        breakers_of(bridge).known.forget()
    assert probes(workers) == [], "the dependency is left alone"
    probe_at = shown.hold.probe_at
    assert probe_at
    eventually(lambda: workers[0].engine.now() > probe_at, what="the end of the cool-down")
    went = probes(workers)
    assert len(went) == 3, "of all workers together"
    bridge, run = went[0]
    breakers_of(bridge).heard(run, failed(bridge))
    (again,) = workers[1].holds.list()
    assert again.hold.since == shown.hold.since
    assert again.hold.probe_at
    assert again.hold.probe_at > probe_at
    for bridge, run in went[1:]:
        breakers_of(bridge).heard(run, Complete())
    later = again.hold.probe_at
    eventually(lambda: workers[0].engine.now() > later, what="the end of the cool-down")
    for bridge in workers:
        breakers_of(bridge).known.forget()
    went = probes(workers)
    assert len(went) == 3
    assert probes(workers) == []
    for bridge, run in went:
        breakers_of(bridge).heard(run, Complete())
    assert workers[0].holds.list() == []
    for bridge in workers:
        bridge.flush()
    assert [event.type for event in sorted(heard, key=lambda event: event.time)] == [
        *("breaker.opened", "breaker.half_open", "breaker.opened", "breaker.half_open", "breaker.closed"),
    ]
    assert heard[0].data["runs"] >= 10
    assert heard[-1].data["rate"] == 5.0


def keep_failing(workers: list[Bridge], working: Sequence[Bridge] = (), seconds: float = 4.0) -> int:
    """Have runs end at each worker in turn, and fail at those that do not work, until the breaker opens.

    Return how many have failed.
    """
    ends, failures = time.monotonic() + seconds, 0
    for number in itertools.count():
        bridge = workers[number % len(workers)]
        run = a_run(bridge, number)
        if time.monotonic() > ends or breakers_of(bridge).known.of(run.job):
            return failures
        failures += bridge not in working
        decision = Complete() if bridge in working else failed(bridge)
        breakers_of(bridge).heard(run, decision)
        time.sleep(0.04)  # so fast runs end
    raise AssertionError


def test_it_opens_when_all_fail_after_many_that_worked(workers: list[Bridge]) -> None:
    """The share of the window would be reached after as many failures."""
    for number in range(600):
        bridge = workers[number % WORKERS]
        breakers_of(bridge).heard(a_run(bridge, number), Complete())
    assert 10 <= keep_failing(workers) < 100
    (shown,) = workers[0].holds.list()
    assert "all of the last " in shown.hold.reason


def test_it_stays_closed_while_one_process_works(workers: list[Bridge]) -> None:
    """It writes its successes every five seconds, and sooner when others fail."""
    working = workers[:1]
    number = itertools.count()

    def has_written() -> bool:
        """Return whether it has, when some more runs of it have worked."""
        for _ in range(20):
            breakers_of(working[0]).heard(a_run(working[0], next(number)), Complete())
        known = workers[1].store.documents.get("hold", "breaker:bank")
        return known is not None and sum(runs for _, runs, _ in known.body["state"]["buckets"]) > 100

    eventually(has_written, what="its successes")
    failures = keep_failing(workers, working)
    assert workers[0].holds.list() == []
    assert failures > 30


def test_a_probe_that_fails_keeps_its_last_attempt(workers: list[Bridge]) -> None:
    """With another error it ends as ever."""
    open_it(workers)
    bridge = workers[0]
    probe_at = bridge.holds.list()[0].hold.probe_at
    assert probe_at
    breakers_of(bridge).known.forget()
    eventually(lambda: bridge.engine.now() > probe_at, what="the end of the cool-down")
    run, bug = a_run(bridge, 200, attempt=3), a_run(bridge, 201, attempt=3)
    for each in (run, bug):
        assert breakers_of(bridge).known.of(each.job) is None
    spared = bridge.engine.judge(run, Failure("bank.down"))
    assert getattr(spared, "hold", None) == "breaker:bank"
    assert "a probe failed with bank.down, and the job keeps its last attempt" in spared.reason
    assert not isinstance(bridge.engine.judge(bug, Failure("builtins.ValueError")), type(spared))
    ended = bridge.engine.judge(a_run(bridge, 202, attempt=3), Failure("bank.down"))
    assert not isinstance(ended, type(spared)), "it was no probe"


def test_probes_that_do_not_come_back_count_as_lost(workers: list[Bridge]) -> None:
    """Their workers have died: after a cool-down others run."""
    open_it(workers)
    for _ in range(2):
        (shown,) = workers[0].holds.list()
        at = shown.hold.probe_at
        assert at
        for bridge in workers:
            breakers_of(bridge).known.forget()
        eventually(lambda at=at: workers[0].engine.now() > at, what="the end of the cool-down")
        # In one go: on a slow machine a probe is lost before a second one.
        assert len(probes(workers, 16)) == 3


def test_a_probe_that_a_limit_holds_gives_way_to_another(workers: list[Bridge]) -> None:
    open_it(workers)
    (shown,) = workers[0].holds.list()
    eventually(lambda: workers[0].engine.now() > shown.hold.probe_at, what="the end of the cool-down")
    for bridge in workers:
        breakers_of(bridge).known.forget()
    bridge, run = probes(workers)[0]
    breakers_of(bridge).heard(run, SnoozeUntil(bridge.engine.now(), 1.0, "", "slots:bank", is_turn=True))
    for bridge in workers:
        breakers_of(bridge).known.forget()
    assert len(probes(workers)) == 1


def test_an_operator_closes_it(workers: list[Bridge]) -> None:
    open_it(workers)
    workers[0].resume(id="breaker:bank")
    assert workers[1].holds.list() == []
    for bridge in workers:
        breakers_of(bridge).known.forget()
    assert len(probes(workers)) == 8
    open_it(workers)


def test_an_operator_pauses_a_dependency(workers: list[Bridge]) -> None:
    """Its jobs are held, by whatever worker, and others are not."""
    hold = workers[0].pause(dependency="bank", reason="a deploy")
    assert (hold.id, hold.jobs, hold.of) == (
        *("pause:dependency=bank", ("pay",)),
        "jobs of the dependency bank",
    )
    other = breakers_of(workers[1]).known
    held = other.of(a_run(workers[1], 1).job)
    assert held
    assert held.id == hold.id
    assert other.of(Job("j", "ship", "default")) is None
    with pytest.raises(ValueError, match="dependency: 'bnk' is not the name of one; there are: bank"):
        workers[0].pause(dependency="bnk")
    workers[1].resume(dependency="bank")
    assert workers[0].holds.list() == []


def test_who_asks_for_fewer_calls_holds_the_other_jobs(workers: list[Bridge]) -> None:
    """For no longer than the longest wait of a policy; a shorter wait does not take its place."""
    bridge, other = workers[0], workers[1]
    for seconds in (100, 50, 10_000):
        failure = Failure("bank.rate_limited", retry_after=timedelta(seconds=seconds))
        decision = DeadLettered("exhausted", failure, "")
        breakers_of(bridge).heard(a_run(bridge, seconds), decision)
    (shown,) = other.holds.list()
    assert shown.hold.until
    assert 290 < (shown.hold.until - bridge.engine.now()).total_seconds() <= 300
    held = breakers_of(other).known.of(a_run(other, 1).job)
    assert held
    assert held.id == "rate_limited:bank"


def test_a_clock_that_was_wrong(workers: list[Bridge]) -> None:
    """One worker took the year for the next one as it opened the breaker: the others probe, and close it."""
    wrong, right = workers[0], workers[1]
    later = partial(lambda now: now() + timedelta(days=365), right.engine.now)
    object.__setattr__(wrong.engine.context, "clock", later)
    for number in range(100):
        breakers_of(wrong).heard(a_run(wrong, number), failed(wrong))
    (shown,) = right.holds.list()
    assert shown.hold.id == "breaker:bank"
    went = probes([right])
    assert len(went) == BREAKER.probes
    for bridge, run in went:
        breakers_of(bridge).heard(run, Complete())
    assert right.holds.list() == []
