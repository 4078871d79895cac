"""The limits of dependencies, where jobs have several, and where processes, clocks and stores fail."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import datetime, timedelta, timezone
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Breaker, Bridge, Dependency
from ojs_bridge.engine.budgets import BUDGET
from ojs_bridge.engine.holds import FRESH
from ojs_bridge.engine.holds import KIND as HOLD
from ojs_bridge.engine.limits import GIVEN, RATE, SLOTS, Limits
from ojs_bridge.engine.runs import Admission, Held, Run
from ojs_bridge.engine.storing import job_of_parked
from ojs_bridge.errors import ConfigurationError, DependencyNotFound, StoreError
from ojs_bridge.rules.decision import Complete
from ojs_bridge.rules.job import Job
from ojs_bridge.store import Parked, next_of
from tests.engine.test_carrying import Written
from tests.engine.test_outbox import Broker
from tests.servers import eventually

MINUTE = timedelta(minutes=1)


class Fleet:
    """The workers of one store, which are bridges of this process; nothing is published but by hand."""

    def __init__(self, folder: Path) -> None:
        self.url = f"sqlite:///{folder}/ojs.db"
        self.bridges: list[Bridge] = []

    def worker(self, *dependencies: Dependency, framework: str = "outbox", **settings: Any) -> Bridge:
        """Start a worker with a broker of its own."""
        bridge = Bridge(self.url, dependencies=dependencies, settle_behind=False, **settings)
        assert bridge.store is not None
        bridge.store.prepare()
        bridge.engine.register(framework, Broker())  # type: ignore[arg-type]
        self.bridges.append(bridge)
        return bridge


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """A fleet without a worker."""
    fleet = Fleet(tmp_path)
    yield fleet
    for bridge in fleet.bridges:
        bridge.engine.close()


def begin(bridge: Bridge, job: Job | str, *, framework: str = "outbox", account: object = None) -> Admission:
    """Have a worker begin a job; one that is held waits in the store."""
    if isinstance(job, str):
        job = Job(job, "act", "default")
    engine = bridge.engine
    admission = engine.begin(job, job, engine.task(), argument=lambda _name: account)
    if isinstance(admission, Held):
        settlement = engine.carrying.carry(admission.run, admission.decision, Written(framework=framework))
        engine.settling.settle(admission.run, settlement.decision)
    return admission


def begun(bridge: Bridge, job: Job | str, **options: Any) -> Run:
    """Have a worker begin a job that nothing holds."""
    admission = begin(bridge, job, **options)
    assert isinstance(admission, Run), admission
    return admission


def end(bridge: Bridge, run: Run) -> None:
    """End a run."""
    bridge.engine.settling.settle(run, Complete())


def limits_of(bridge: Bridge) -> Limits:
    """Return the limits of a worker."""
    assert bridge.engine.limits
    return bridge.engine.limits


def waiting(bridge: Bridge, job: str) -> Parked:
    """Return a job that waits in the store."""
    return bridge.waiting.get(job)


def published(bridge: Bridge, framework: str = "outbox") -> list[str]:
    """Return what a worker has published."""
    return bridge.engine.context.publishers[framework].published  # type: ignore[attr-defined, no-any-return]


def eventually_planned(bridge: Bridge, within: timedelta) -> None:
    """Have a worker look after the turns of the bank until the last one begins within a time."""

    def is_planned() -> bool:
        limits_of(bridge).wake()
        assert bridge.store
        known = bridge.store.documents.get(RATE, "bank")
        return known is not None and known.at < bridge.engine.now() + within

    eventually(is_planned, what="turns that were brought forward")


def again(bridge: Bridge, job: str) -> Job:
    """Return a job that waits, as its next delivery has it."""

    return job_of_parked(waiting(bridge, job))._replace(next_retry_at=None)


def test_free_slots_of_one_dependency_are_not_given_out_by_the_limit_of_another(fleet: Fleet) -> None:
    """Jobs that need both wait for the one; a chore gives no more of its slots than there are."""
    both = Dependency("wide", jobs=["act"], concurrency=9), Dependency("narrow", jobs=["act"], concurrency=1)
    worker = fleet.worker(*both)
    begun(worker, "j-0")
    for n in range(1, 5):
        assert isinstance(begin(worker, f"j-{n}"), Held)
    limits_of(worker).wake()
    assert worker.store
    known = worker.store.documents.get(SLOTS, "narrow")
    assert known
    assert len(known.body["taken"]) == 1


def test_a_slot_is_not_given_to_a_job_that_waits_for_a_dependency_of_a_longer_name(fleet: Fleet) -> None:
    """It would come, be held again, and be given the same slot again, without end."""
    both = Dependency("bank", jobs=["act"], concurrency=9), Dependency("bank-eu", jobs=["act"], concurrency=1)
    worker = fleet.worker(*both)
    begun(worker, "j-0")
    assert isinstance(begin(worker, "j-1"), Held)
    worker.engine.outbox.close()
    assert waiting(worker, "j-1").next_retry_at > worker.engine.now() + MINUTE
    assert published(worker) == []


def test_a_slot_goes_to_a_job_of_the_other_framework(fleet: Fleet) -> None:
    """The process that frees it has no publisher for the job: a worker of its framework publishes it now."""
    one = Dependency("bank", jobs=["act"], concurrency=1)
    first, second = fleet.worker(one, framework="first"), fleet.worker(one, framework="second")
    run = begun(first, "j-0", framework="first")
    assert isinstance(begin(second, "j-1", framework="second"), Held)
    end(first, run)
    first.engine.outbox.close()
    due = second.waiting._parked.claim_due(
        "second", now=second.engine.now(), until=second.engine.now() + MINUTE, limit=1
    )
    assert [parked.id for parked in due.retries] == ["j-1"]


def test_a_job_finds_the_slot_that_it_was_given_taken_if_it_comes_too_late(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker has read the slots before the late job had reserved its attempt, and writes after."""
    one = Dependency("bank", jobs=["act"], concurrency=1)
    first, second = fleet.worker(one), fleet.worker(one)
    run = begun(first, "j-0")
    assert isinstance(begin(first, "j-1"), Held)
    late = again(first, "j-1")
    end(first, run)
    now = first.engine.now() + GIVEN
    for worker in (first, second):
        monkeypatch.setattr(limits_of(worker), "_clock", lambda: now)
    wrote, came = limits_of(second)._wrote_slots, list[Admission]()

    def write(*args: Any) -> bool:
        if not came:
            came.append(begin(first, late))
        return wrote(*args)

    monkeypatch.setattr(limits_of(second), "_wrote_slots", write)
    other = begin(second, "j-2")
    assert sorted(type(each).__name__ for each in (*came, other)) == ["Held", "Run"]


def test_the_slot_of_a_process_that_has_ended_here_is_given_on(fleet: Fleet) -> None:
    """Its message has not come back, and its reservation has not run out. A frozen process keeps its slot."""
    worker = fleet.worker(BANK)
    process = get_context("fork").Process(target=_take_and_stop, args=(fleet,))
    process.start()
    assert process.pid
    os.waitpid(process.pid, os.WUNTRACED)
    assert isinstance(begin(worker, "j-2"), Held)
    limits_of(worker).wake()
    assert published(worker) == []
    held = again(worker, "j-2")  # a thread publishes it after the kill
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    limits_of(worker).wake()
    assert isinstance(begin(worker, held), Run)


BANK = Dependency("bank", jobs=["act"], concurrency=1)


def _take_and_stop(fleet: Fleet) -> None:
    begun(fleet.worker(BANK), "j-1")
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_job_that_waits_for_a_slot_does_not_wait_for_the_rate_again(fleet: Fleet) -> None:
    """It has had its turn, by the dependency of the slot or by one before it."""
    both = Dependency("fast", jobs=["act"], rate="1/h"), Dependency("narrow", jobs=["act"], concurrency=1)
    other = fleet.worker(both[1])
    run = begun(other, "j-0")
    worker = fleet.worker(*both)
    held = begin(worker, "j-1")
    assert isinstance(held, Held)
    assert held.decision.hold == "slots:narrow"
    late = again(worker, "j-1")
    end(other, run)
    begun(worker, late)


def test_the_turns_of_cancelled_jobs_are_taken_back(fleet: Fleet) -> None:
    """A job that comes after them does not wait for turns that nobody has any more."""
    worker = fleet.worker(Dependency("bank", jobs=["act"], rate="1/m"))
    begun(worker, "j-0")
    for n in range(1, 6):
        assert isinstance(begin(worker, f"j-{n}"), Held)
    limits_of(worker).wake()
    assert isinstance(begin(worker, "j-6"), Held)
    assert waiting(worker, "j-6").next_retry_at > worker.engine.now() + 5 * MINUTE
    for n in range(1, 7):
        worker.waiting.cancel(f"j-{n}")
    eventually_planned(worker, 2 * MINUTE)
    assert isinstance(begin(worker, "j-7"), Held)
    assert waiting(worker, "j-7").next_retry_at < worker.engine.now() + 2 * MINUTE


def test_turns_are_brought_forward_when_the_rate_has_grown(fleet: Fleet) -> None:
    """Their jobs go on in their order; those that come after them wait behind them."""
    slow, fast = Dependency("bank", jobs=["act"], rate="1/h"), Dependency("bank", jobs=["act"], rate="2/m")
    before = fleet.worker(slow)
    begun(before, "j-0")
    for n in range(1, 6):
        assert isinstance(begin(before, f"j-{n}"), Held)
    worker, now = fleet.worker(fast), before.engine.now()
    eventually_planned(worker, 5 * MINUTE)
    assert isinstance(begin(worker, "j-6"), Held)
    turns = [waiting(worker, f"j-{n}").next_retry_at - now for n in range(1, 7)]
    for n, turn in enumerate(turns, 1):
        assert abs(turn - n * MINUTE / 2) < 2 * GIVEN, turns
    assert turns == sorted(turns)


def test_a_slot_that_waits_behind_many_held_jobs_is_given(fleet: Fleet) -> None:
    """Another key's jobs, or those that wait for their turns, may be many, and due sooner."""
    worker = fleet.worker(Dependency("bank", jobs=["act"], concurrency=1, key="account"))
    busy, run = begun(worker, "a-0", account="a"), begun(worker, "b-0", account="b")
    for n in range(1, 130):
        assert isinstance(begin(worker, f"a-{n}", account="a"), Held)
    assert isinstance(begin(worker, "b-1", account="b"), Held)
    end(worker, run)
    limits_of(worker).wake()
    eventually(lambda: published(worker) == ["b-1"], what="the job that was given the slot")
    end(worker, busy)


@pytest.mark.parametrize("is_open", [True, False])
def test_a_job_that_cannot_wait_begins_though_its_limits_cannot_be_read(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, is_open: bool
) -> None:
    """Its message is acknowledged, and no other place has the job; with `fail_open` no job waits."""
    worker = fleet.worker(Dependency("bank", jobs=["act"], rate="1/h", concurrency=1), fail_open=is_open)
    assert worker.store

    def get(*_: Any) -> None:
        raise StoreError("away")

    monkeypatch.setattr(worker.store.documents, "get", get)
    job, engine = Job("j-0", "act", "default"), worker.engine
    assert isinstance(engine.begin(job, job, engine.task(), can_wait=is_open), Run)
    if not is_open:
        with pytest.raises(StoreError):
            engine.begin(job._replace(id="j-1"), job, engine.task())


def test_what_the_limits_of_each_argument_leave_in_the_store_goes(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the slots of a job that runs on, however long."""
    worker = fleet.worker(Dependency("bank", jobs=["act"], rate="9/s", concurrency=1, key="account"))
    assert worker.store
    runs = [begun(worker, f"j-{n}", account=n) for n in range(4)]
    for run in runs[1:]:
        end(worker, run)
    now = worker.engine.now() + timedelta(days=2)
    monkeypatch.setattr(limits_of(worker), "_clock", lambda: now)
    limits_of(worker).forget()
    assert dict(worker.store.documents.count([RATE, SLOTS])) == {SLOTS: 1}


def test_an_operator_lowers_a_concurrency_and_takes_that_back(fleet: Fleet) -> None:
    """Runs that have a slot keep it; when it is over, the free slots are given out."""
    worker = fleet.worker(Dependency("bank", jobs=["act"], concurrency=3))
    runs = [begun(worker, f"j-{n}") for n in range(2)]
    hold = worker.limit("bank", concurrency=1)
    held = begin(worker, "j-2")
    assert isinstance(held, Held)
    assert held.decision.reason == "held by the slots of bank: all 1 are taken"
    end(worker, runs[0])
    limits_of(worker).wake()
    assert published(worker) == []
    worker.resume(id=hold.id)
    limits_of(worker).wake()
    eventually(lambda: published(worker) == ["j-2"], what="the job that waited")


@pytest.mark.parametrize("limit", [{"concurrency": 1}, {"rate": "1/m"}])
def test_a_limit_that_only_an_operator_has_set_lets_all_go_when_it_is_over(
    fleet: Fleet, limit: dict[str, Any]
) -> None:
    """Whoever waits for a slot, or for a turn that is far off, begins, and is asked for neither."""
    worker = fleet.worker(Dependency("bank", jobs=["act"], errors=["bank.*"]))
    begun(worker, "j-0")
    until = worker.engine.now() + timedelta(seconds=2)
    worker.limit("bank", **limit, until=until, reason="the bank asks for it")
    begun(worker, "j-1")
    for n in range(2, 5):
        assert isinstance(begin(worker, f"j-{n}"), Held)
    later = [f"j-{n}" for n in range(2, 5)]

    def are_due() -> bool:
        limits_of(worker).wake()
        return all(waiting(worker, job).next_retry_at <= worker.engine.now() for job in later)

    eventually(are_due, what="jobs that are due")
    assert worker.engine.now() >= until
    for job in later:
        begun(worker, again(worker, job))


def test_a_limit_of_a_fleet_that_knows_no_dependency_is_none_of_its_jobs(fleet: Fleet) -> None:
    """A process without dependencies may set it for workers that have them."""
    operator, worker = fleet.worker(), fleet.worker(Dependency("bank", jobs=["act"], rate="9/s"))
    operator.limit("bank", concurrency=0)
    begun(operator, "j-0")
    held = begin(worker, "j-1")
    assert isinstance(held, Held)
    assert held.decision.hold == "limit:bank"
    assert [state.key for state in operator.limits.list()] == ["bank"]
    with pytest.raises(DependencyNotFound, match="'x' is not the name of a dependency; there are: bank"):
        worker.limit("x", concurrency=0)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ({}, "concurrency: a limit needs a rate, a concurrency, or both"),
        ({"concurrency": -1}, "concurrency: -1 must be an integer of at least 0"),
        ({"concurrency": True}, "concurrency: True must be an integer of at least 0"),
        ({"rate": "fast"}, "rate: 'fast' must be a rate, such as '10/s', '100/m' or '5/h'"),
        ({"rate": "1/s", "until": datetime(2020, 1, 1, tzinfo=timezone.utc)}, "until: 2020-01-01"),
        ({"rate": "1/s", "until": "soon"}, "until: 'soon' must be a time with a zone"),
        ({"rate": "1/s", "reason": "x" * 1001}, "reason: 1,001 characters; there may be 1,000 at most"),
    ],
)
def test_a_limit_that_is_none_is_refused(fleet: Fleet, limit: dict[str, Any], said: str) -> None:
    worker = fleet.worker(Dependency("bank", jobs=["act"], rate="9/s"))
    with pytest.raises((ValueError, ConfigurationError), match=re.escape(said)):
        worker.limit("bank", **limit)
    assert worker.holds.list() == []


@pytest.mark.parametrize("limit", [{"rate": "1/s"}, {"budget": 0.5}], ids=["rate", "budget"])
def test_a_clock_that_was_wrong_for_a_moment_stops_no_fleet(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, limit: dict[str, Any]
) -> None:
    """One worker took the year for the next one, and began what it could: no job waits for that year."""
    bank = Dependency("bank", jobs=["act"], **limit)
    wrong, worker = fleet.worker(bank, framework="wrong"), fleet.worker(bank)
    of = "budgets" if "budget" in limit else "limits"

    def put_clock(bridge: Bridge, ahead: timedelta) -> Any:
        monkeypatch.setattr(getattr(bridge.engine, of), "_clock", lambda: bridge.engine.now() + ahead)
        return getattr(bridge.engine, of)

    put_clock(wrong, timedelta(days=365))
    jobs = [Job(f"w-{n}", "act", "default", 2) for n in range(15)]
    assert isinstance([begin(wrong, job, framework="wrong") for job in jobs][-1], Held)
    left = [begin(worker, Job(f"j-{n}", "act", "default", 2)) for n in range(3)]
    for minutes in range(5):
        put_clock(worker, minutes * MINUTE).wake()
    for job_id in ["w-14", *(admission.job.id for admission in left if isinstance(admission, Held))]:
        assert waiting(worker, job_id).next_retry_at < worker.engine.now() + 10 * MINUTE


def test_a_heavy_job_waits_until_enough_slots_are_free_and_is_not_overtaken(fleet: Fleet) -> None:
    """Light jobs that come after it wait behind it, though there is a slot for them; then all go in order."""
    worker = fleet.worker(Dependency("bank", jobs=["act", "light"], concurrency=3))
    worker.engine.dependencies.declare("act", {"bank": 3})
    light = [begun(worker, Job(f"l-{n}", "light", "default")) for n in range(2)]
    heavy = begin(worker, "h-0")
    assert isinstance(heavy, Held)
    assert heavy.decision.reason == "held by the slots of bank: it needs 3 of 3"
    comes = again(worker, "h-0")
    for n in range(2, 5):
        assert isinstance(begin(worker, Job(f"l-{n}", "light", "default")), Held)
    assert worker.limits.get("bank").active == 2
    end(worker, light[0])
    limits_of(worker).wake()
    assert published(worker) == []
    end(worker, light[1])
    eventually(lambda: published(worker) == ["h-0"], what="the heavy job")
    run = begun(worker, comes)
    assert worker.limits.get("bank").active == 3
    limits_of(worker).wake()
    assert published(worker) == ["h-0"]
    end(worker, run)
    eventually(lambda: sorted(published(worker)) == ["h-0", "l-2", "l-3", "l-4"], what="the light jobs")


def test_a_job_of_another_framework_keeps_the_weight_that_it_has_there(fleet: Fleet) -> None:
    """The process that gives it slots does not know its type."""
    one = Dependency("bank", jobs=["light"], concurrency=3)
    first, second = fleet.worker(one, framework="first"), fleet.worker(one, framework="second")
    second.engine.dependencies.declare("act", {"bank": 2})
    runs = [begun(first, Job(f"l-{n}", "light", "default"), framework="first") for n in range(3)]
    assert isinstance(begin(second, "h-0", framework="second"), Held)
    end(first, runs[0])
    assert first.limits.get("bank").active == 2
    end(first, runs[1])
    assert first.limits.get("bank").active == 3


def test_a_heavy_job_takes_no_more_slots_than_an_operator_has_left(fleet: Fleet) -> None:
    worker = fleet.worker(Dependency("bank", jobs={"act": 3}, concurrency=3))
    worker.limit("bank", concurrency=2)
    run = begun(worker, "h-0")
    assert worker.limits.get("bank").active == 2
    assert isinstance(begin(worker, "h-1"), Held)
    end(worker, run)
    eventually(lambda: published(worker) == ["h-1"], what="the next job")


def test_a_job_that_is_late_for_its_slots_does_not_lose_its_place(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a worker that is slow to take jobs would turn all of them away."""
    worker = fleet.worker(Dependency("bank", jobs=["act"], concurrency=1))
    run = begun(worker, "j-0")
    for n in (1, 2):
        assert isinstance(begin(worker, f"j-{n}"), Held)
    late = again(worker, "j-1")  # a thread publishes it after the end
    end(worker, run)
    now = worker.engine.now() + GIVEN * 3 / 4
    monkeypatch.setattr(limits_of(worker), "_clock", lambda: now)
    begun(worker, late)


def test_a_rate_counts_a_heavy_job_for_more(fleet: Fleet) -> None:
    worker = fleet.worker(Dependency("bank", jobs={"act": 300}, rate="1/s"))
    begun(worker, "j-0")
    for n in (1, 2):
        assert isinstance(begin(worker, f"j-{n}"), Held)
    turns = [waiting(worker, f"j-{n}").next_retry_at for n in (1, 2)]
    assert turns[1] - turns[0] == timedelta(seconds=300)
    assert turns[0] - worker.engine.now() > timedelta(seconds=250)
    limits_of(worker).wake()
    assert [waiting(worker, f"j-{n}").next_retry_at for n in (1, 2)] == turns


def test_no_job_begins_by_what_was_known_of_holds_two_seconds_ago(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One thread of an idle worker reads the holds, and the others wait for it."""
    worker = fleet.worker(Dependency("bank", jobs=["act"]))
    begun(worker, "j-0")
    known, store = worker.engine.holds, worker.store
    assert known
    assert store
    Bridge(fleet.url).pause("act")
    monkeypatch.setattr(known, "_due", time.monotonic() - FRESH)
    is_reading, goes_on, listed = threading.Event(), threading.Event(), store.documents.list

    def slowly(*args: Any, **options: Any) -> Any:
        is_reading.set()
        goes_on.wait(30)
        return listed(*args, **options)

    monkeypatch.setattr(store.documents, "list", slowly)
    with ThreadPoolExecutor(2) as threads:
        job = Job("j-1", "act", "default")
        first = threads.submit(known.of, job)
        assert is_reading.wait(30)
        second = threads.submit(known.of, job)
        assert not wait([second], 0.2).done
        goes_on.set()
        assert [hold is not None for hold in (first.result(), second.result())] == [True, True]


def test_turns_of_a_rate_that_was_taken_away_are_soon(fleet: Fleet) -> None:
    """The code of the fleet has no rate any more: its jobs do not wait for hours."""
    slow = fleet.worker(Dependency("bank", jobs=["act"], rate="1/h"))
    begun(slow, "j-0")
    assert all(isinstance(begin(slow, f"j-{n}"), Held) for n in range(1, 4))
    worker = fleet.worker(Dependency("bank", ["bank.*"], jobs=["act"], breaker=Breaker()))
    limits_of(worker).wake()
    assert waiting(worker, "j-3").next_retry_at < worker.engine.now() + 2 * GIVEN


@pytest.mark.parametrize(
    ("kind", "name", "body"),
    [
        (RATE, "bank", {"begun": "2026-11-28T09:00:00+00:00", "planned": "2026-11-28T09:00:00+00:00"}),
        (SLOTS, "bank", {"taken": [["j", 0, "2026-11-28T09:00:00+00:00"]], "waits": []}),
        (BUDGET, "bank", {}),
        (HOLD, "pause:x", {"what": "all"}),
    ],
)
def test_what_another_version_has_written_and_nobody_can_read_ends_no_job(
    fleet: Fleet, kind: str, name: str, body: dict[str, Any]
) -> None:
    """The jobs wait as for a store that is away; of holds those are known that were read before."""
    bank = Dependency("bank", ["bank.*"], ["act"], Breaker(), rate="100/s", concurrency=9, budget=0.5)
    worker = fleet.worker(bank)
    job = Job("j-1", "act", "default", 2)
    begun(worker, "j-0")
    assert worker.store
    known = worker.store.documents.get(kind, name)
    assert worker.store.documents.write(next_of(known, kind, name, worker.engine.now(), body))
    assert worker.engine.holds
    worker.engine.holds.forget()
    if kind == HOLD:
        begun(worker, job)
        return
    with pytest.raises(StoreError, match=f"another version has written a {kind} that cannot be read"):
        begin(worker, job)
