"""An attempt is reserved: a lost one counts, a live one is left alone, a late copy is dropped."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge, ConfigurationError, StorageRetry, StoreError
from ojs_bridge.engine import heartbeat, reservations
from ojs_bridge.engine.reservations import ASK_AGAIN, UNTOLD, TakenOver
from ojs_bridge.engine.runs import Admission, Drop, Lost, Onward, Postpone, Run
from ojs_bridge.rules.decision import Complete, DeadLettered, Discarded, RetryAt, SnoozeUntil
from ojs_bridge.rules.failures import VISIBILITY_TIMEOUT, WORKER_DEATH, Failure
from ojs_bridge.rules.job import Job, decode
from ojs_bridge.store import Reservation, Settle, Store, open_store
from tests.lives import FRAMEWORK, Outbox
from tests.servers import Valkey
from tests.servers.process import eventually

JOB = Job("j-1", "billing.charge", "default")
POLICY = {"max_attempts": 3, "initial_interval": "PT0.2S", "backoff_strategy": "none", "jitter": False}
#: A stall of a loaded machine does not let the one run out; for the other a test waits.
LONG, SHORT = timedelta(minutes=1), timedelta(seconds=0.6)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[timedelta]:
    """Return how far the clock of every new bridge is ahead, to be set by a test."""
    ahead = [timedelta()]
    monkeypatch.setattr(Bridge, "_now", lambda _: datetime.now(timezone.utc) + ahead[0])
    return ahead


@pytest.fixture
def bridges(url: str) -> Iterator[list[Bridge]]:
    """Make bridges of one fleet; one worker finds the reservations that another leaves behind."""
    yield from fleet(url, LONG)


@pytest.fixture
def hasty(url: str) -> Iterator[list[Bridge]]:
    """Make bridges of one fleet, whose reservations run out soon."""
    yield from fleet(url, SHORT)


def fleet(url: str, reservation: timedelta) -> Iterator[list[Bridge]]:
    """Two bridges that live as long as the test."""
    made = [Bridge(url, POLICY, reservation=reservation) for _ in range(2)]
    for bridge in made:
        bridge.engine.context.publishers[FRAMEWORK] = Outbox()
    yield made
    for bridge in made:
        bridge.stop()


def begin(bridge: Bridge, job: Job, publication: str = "", *, redelivered: bool = False) -> Admission:
    """Deliver a job."""
    task = bridge.engine.task()
    return bridge.engine.begin(job, job, task, publication=publication, redelivered=redelivered)


def run(bridge: Bridge, job: Job, publication: str = "") -> Run:
    """Deliver a job that is to run."""
    begun = begin(bridge, job, publication)
    assert isinstance(begun, Run), begun
    return begun


def fail(bridge: Bridge, begun: Run) -> Job:
    """End a run with a retry, and return the job as its next message has it."""
    decision = bridge.engine.judge(begun, ConnectionError("down"))
    assert isinstance(decision, RetryAt)
    job = bridge.engine.carrying.after(begun.job, decision)
    bridge.engine.settling.settle(begun, decision)
    bare = Job(job.id, job.type, job.queue, job.attempt, fence=job.attempt - 1)
    return decode(bridge.engine.storing.header(job).state, bare)._replace(next_retry_at=None)


def abandon(url: str, job: Job = JOB, reservation: timedelta = SHORT) -> None:
    """Reserve a job's attempt in a process of its own, and be killed."""
    die_holding(lambda: Bridge(url, POLICY, reservation=reservation), job)


def die_holding(bridge: Callable[[], Bridge], job: Job = JOB) -> None:
    """Fork a process that reserves a job's attempt, and is killed."""
    process = multiprocessing.get_context("fork").Process(target=_take_and_die, args=(bridge, job))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _take_and_die(bridge: Callable[[], Bridge], job: Job) -> None:
    run(bridge(), job)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.requirement("RET-12")
def test_a_lost_attempt_is_a_failed_one(url: str, clock: list[timedelta], bridges: list[Bridge]) -> None:
    """The attempt is judged once, when its reservation has run out, and its backoff is kept."""
    abandon(url, reservation=LONG)
    first, second = bridges
    waiting = begin(first, JOB)
    assert isinstance(waiting, Postpone)
    assert waiting.at - first.engine.now() <= LONG
    clock[0] = LONG
    eventually(lambda: first.engine.now() > waiting.at, what="the reservation ran out")
    lost = begin(first, JOB)
    assert isinstance(lost, Lost)
    assert lost.failure.type == VISIBILITY_TIMEOUT
    decision = first.engine.judge(lost.run, lost.failure)
    assert isinstance(decision, RetryAt)
    assert decision.delay == pytest.approx(0.2)
    next_job = first.engine.carrying.after(lost.run.job, decision)
    assert (next_job.attempt, next_job.errors[-1]["type"]) == (2, VISIBILITY_TIMEOUT)
    assert isinstance(begin(second, JOB), Postpone), "whoever judges it holds it"
    first.engine.settling.settle(lost.run, decision)
    assert isinstance(begin(second, JOB), Drop)


class SoftLimit(BaseException):
    """Strikes a thread, as a soft time limit does."""


def strike_as_it_begins(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliver a job, and strike the thread when the store has answered."""
    reserve = bridge.engine.reservations.reserve

    def strike(*args: Any, **options: Any) -> None:
        reserve(*args, **options)
        raise SoftLimit

    monkeypatch.setattr(bridge.engine.reservations, "reserve", strike)
    with pytest.raises(SoftLimit):
        begin(bridge, JOB)


@pytest.mark.requirement("RET-12")
def test_a_lost_attempt_is_used_though_the_thread_that_finds_it_is_struck(
    url: str, clock: list[timedelta], bridges: list[Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread gives back what it has reserved for itself, and not the attempt of a dead worker."""
    abandon(url, reservation=LONG)
    clock[0] = 2 * LONG
    struck, second = bridges
    strike_as_it_begins(struck, monkeypatch)
    clock[0] = 4 * LONG
    assert isinstance(begin(second, JOB), Lost)


@pytest.mark.requirement("RET-12")
def test_an_attempt_that_a_strike_keeps_from_its_handler_is_not_used(
    bridges: list[Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    struck, second = bridges
    strike_as_it_begins(struck, monkeypatch)
    assert run(second, JOB).job.attempt == 1


@pytest.mark.requirement("RET-12")
def test_a_worker_that_is_killed_while_it_stops_has_used_no_attempt(
    url: str, clock: list[timedelta], bridges: list[Bridge]
) -> None:
    """Its job begins anew by another message: the worker may have sent a retry before it was killed."""

    def told_to_stop() -> Bridge:
        bridge = Bridge(url, POLICY, reservation=LONG)
        heart = bridge.engine.reservations.heart
        heart.note_stop(lambda: True)
        eventually(lambda: heart.was_stopping(heart.family), what="the store knows of the stop")
        return bridge

    job = JOB._replace(retry={"max_attempts": 1})
    die_holding(told_to_stop, job)
    first, second = bridges
    assert isinstance(begin(first, job), Postpone)
    clock[0] = 2 * LONG
    lost = begin(first, job)
    assert isinstance(lost, Lost)
    decision = first.engine.judge(lost.run, lost.failure)
    assert isinstance(decision, SnoozeUntil)
    again = first.engine.carrying.after(lost.run.job, decision)._replace(next_retry_at=None)
    assert (again.attempt, again.fence, again.errors) == (1, 1, ())
    first.engine.settling.settle(lost.run, decision)
    assert isinstance(begin(second, job), Drop)
    assert run(second, again).job.attempt == 1


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> timedelta:
    """Return for how long a worker is suspected, which runs elsewhere: less than by default."""
    suspicion = timedelta(seconds=0.8)
    monkeypatch.setattr(heartbeat, "lives_here", lambda holder: None)
    monkeypatch.setattr(heartbeat, "SUSPICION", suspicion)
    monkeypatch.setattr(reservations, "SUSPICION", suspicion)
    monkeypatch.setattr(heartbeat, "CLEAR_SECONDS", 0.1)
    return suspicion


@pytest.mark.requirement("RET-12")
def test_a_killed_workers_job_is_lost_in_seconds(url: str, bridges: list[Bridge], quick: timedelta) -> None:
    """Its connection has ended, and it does not end the suspicion: the reservation need not run out."""
    abandon(url, reservation=LONG)
    first, second = bridges
    unsuspected = begin(first, JOB)
    assert isinstance(unsuspected, Postpone)
    assert unsuspected.at - first.engine.now() > quick
    suspected = begin(first, JOB, redelivered=True)
    assert isinstance(suspected, Postpone)
    assert suspected.at - first.engine.now() <= max(quick, ASK_AGAIN)
    lost: list[Admission] = []
    eventually(lambda: lost.append(begin(second, JOB)) or isinstance(lost[-1], Lost))
    assert lost[-1].failure.type == VISIBILITY_TIMEOUT
    assert isinstance(begin(first, JOB, redelivered=True), Postpone), "whoever judges it holds it"


@pytest.mark.requirement("RET-12")
def test_a_worker_that_lives_is_left_alone_though_its_connection_was_lost(
    bridges: list[Bridge], quick: timedelta
) -> None:
    """It ends the suspicion, again and again, while it holds a reservation."""
    first, second = bridges
    held = run(first, JOB)
    family = first.engine.reservations.heart.family
    for _ in range(3):
        assert isinstance(begin(second, JOB, redelivered=True), Postpone)
        eventually(lambda: second.store.reservations.suspect(family, gone=False) is None)
        left_alone = begin(second, JOB)
        assert isinstance(left_alone, Postpone)
        assert left_alone.at - second.engine.now() > quick
    first.engine.settling.settle(held, Complete())
    assert isinstance(begin(second, JOB, redelivered=True), Drop)


@pytest.mark.requirement("RET-12")
def test_a_main_process_that_lost_its_connection_speaks_for_its_children(
    bridges: list[Bridge], quick: timedelta
) -> None:
    """A child that runs C code may hold its interpreter's lock for longer than a suspicion lasts."""
    main, other = bridges
    main.engine.reservations.lost_connection()
    other.store.reservations.suspect(main.engine.reservations.family, gone=True)
    eventually(lambda: other.store.reservations.suspect(main.engine.reservations.family, gone=False) is None)


@pytest.mark.requirement("RET-12")
def test_while_the_store_was_slow_nobody_could_end_a_suspicion(tmp_path: Path, quick: timedelta) -> None:
    """Another process has locked the file; a worker that lives ends the suspicion as soon as it can."""
    file = tmp_path / "ojs.db"
    abandon(f"sqlite:///{file}", reservation=LONG)
    bridge = Bridge(f"sqlite:///{file}", POLICY)
    assert isinstance(begin(bridge, JOB, redelivered=True), Postpone)
    with ThreadPoolExecutor(1) as pool, sqlite3.connect(file) as other:
        other.execute("BEGIN IMMEDIATE")
        asking = pool.submit(begin, bridge, JOB)
        time.sleep(1.5 * quick.total_seconds())
        other.rollback()
        assert isinstance(asking.result(), Postpone)
    eventually(lambda: isinstance(begin(bridge, JOB), Lost), what="the suspicion has lasted")
    bridge.stop()


def test_an_old_suspicion_takes_no_new_reservation(bridges: list[Bridge], quick: timedelta) -> None:
    """A worker without a reservation ends no suspicion; it has the whole time from its reservation on."""
    first, second = bridges
    first.engine.reservations.prove()
    heart = first.engine.reservations.heart
    heart.start()
    second.store.reservations.suspect(heart.family, gone=True)
    eventually(lambda: second.store.reservations.suspect(heart.family, gone=False) > quick)
    held = run(first, JOB)
    assert isinstance(begin(second, JOB, redelivered=True), Postpone)
    first.engine.settling.settle(held, Complete())


@pytest.mark.requirement("RET-12")
def test_the_last_lost_attempt_is_the_end(url: str, bridges: list[Bridge]) -> None:
    """The job ends as after any other failure at max_attempts."""
    bridge = bridges[0]
    last = JOB._replace(attempt=3, fence=2)
    abandon(url, last)
    found: list[Admission] = []

    def lost() -> bool:
        found.append(begin(bridge, last))
        return isinstance(found[-1], Lost)

    eventually(lost, what="the attempt was found lost")
    assert isinstance(found[-1], Lost)
    decision = bridge.engine.judge(found[-1].run, found[-1].failure)
    assert isinstance(decision, Discarded)
    assert decision.cause == "exhausted"


@pytest.mark.requirement("RET-12")
def test_judging_a_lost_attempt_can_be_lost_too(url: str, hasty: list[Bridge]) -> None:
    """The attempt stays one lost attempt until the decision about it is safe."""
    abandon(url)
    eventually(lambda: isinstance(begin(hasty[0], JOB), Lost), what="the attempt was found lost")
    held = next(iter(hasty[0].engine.reservations.heart._live))  # type: ignore[union-attr]
    hasty[0].engine.reservations.heart.expire(held)  # type: ignore[union-attr]
    found: list[Admission] = []

    def found_again() -> bool:
        found.append(begin(hasty[1], JOB))
        return isinstance(found[-1], Lost)

    eventually(found_again, what="the attempt was found lost again")
    assert all(isinstance(begun, (Postpone, Lost)) for begun in found)


def unsettling(url: str) -> Store:
    """A store that never settles one of its runs."""
    store = open_store(url)
    usual = store.reservations.settle

    def settle(order: Settle) -> bool:
        if order.reservation.key == "j-2":
            raise StoreError("j-2 cannot be settled")
        return usual(order)

    store.reservations.settle = settle  # type: ignore[method-assign, assignment]
    return store


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("settles", [True, False])
def test_a_heartbeat_extends_the_reservation(url: str, settles: bool) -> None:
    """A run that is far longer than its reservation stays one run, whatever becomes of the runs beside it."""
    length = timedelta(seconds=8)  # a loaded machine may hold a heartbeat up for five seconds
    first, second = (
        Bridge(store, POLICY, reservation=length) for store in (url if settles else unsettling(url), url)
    )
    begun = run(first, JOB)
    first.engine.settling.settle(run(first, JOB._replace(id="j-2")), Complete())
    ends = time.monotonic() + 1.5 * length.total_seconds()
    while time.monotonic() < ends:
        duplicate = begin(second, JOB)
        assert isinstance(duplicate, Postpone)
        assert duplicate.job.next_retry_at == duplicate.at
        time.sleep(0.05)
    first.engine.settling.settle(begun, Complete())
    late = begin(second, JOB)
    assert isinstance(late, Drop)
    assert "late copy" in late.reason


@pytest.mark.requirement("RET-13")
def test_a_settled_job_does_not_run_again(bridges: list[Bridge]) -> None:
    """No earlier message of the job runs either, whichever worker gets it."""
    first, second = bridges
    retry = fail(first, run(first, JOB))
    assert isinstance(begin(second, JOB), Drop)
    again = fail(second, run(second, retry))
    assert isinstance(begin(first, retry), Drop)
    assert isinstance(begin(first, JOB), Drop)
    assert (again.attempt, again.fence) == (3, 2)
    first.engine.settling.settle(run(first, again), Complete())
    assert [type(begin(second, job)) for job in (JOB, retry, again)] == [Drop] * 3


def test_a_retry_may_begin_before_its_predecessor_is_settled(bridges: list[Bridge]) -> None:
    """The retry is published first, and its run settles too late, which harms no job."""
    first, second = bridges
    begun = run(first, JOB)
    decision = first.engine.judge(begun, ConnectionError("down"))
    retry = first.engine.carrying.after(begun.job, decision)._replace(next_retry_at=None)
    run(second, retry)
    first.engine.settling.settle(begun, decision)
    assert isinstance(begin(first, retry), Postpone)


def test_a_job_that_is_given_back_has_used_nothing(bridges: list[Bridge]) -> None:
    """The next delivery runs the same attempt at once."""
    first, second = bridges
    first.engine.settling.release(run(first, JOB))
    begun = run(second, JOB)
    assert begun.job.attempt == 1
    retry = fail(second, begun)
    second.engine.settling.release(run(second, retry))
    assert run(first, retry).job.attempt == 2
    assert isinstance(begin(second, JOB), Drop)


def test_a_snooze_runs_the_same_attempt_again(bridges: list[Bridge]) -> None:
    """The fence tells the next run from a copy of the snoozed one."""
    first, second = bridges
    begun = run(first, JOB)
    first.engine.settling.settle(begun, Complete())
    snoozed = begun.job.snoozed(first.engine.now())._replace(next_retry_at=None)
    assert run(second, snoozed).job.attempt == 1


def test_a_replay_is_no_late_copy(bridges: list[Bridge]) -> None:
    """The attempts of the replay begin afresh."""
    first, _ = bridges
    begun = run(first, JOB)
    decision = Discarded("handler", Failure("a.b"), "why")
    ended = first.engine.carrying.after(begun.job, decision)
    first.engine.settling.settle(begun, decision)
    assert isinstance(begin(first, JOB), Drop)
    assert run(first, ended.replayed()).job.attempt == 1


def test_a_job_that_a_user_sends_twice_runs_twice(bridges: list[Bridge]) -> None:
    """Both jobs have one id, and the broker tells their messages apart; their retries stay apart."""
    first, second = bridges
    one = run(first, JOB, "message-1")
    two = run(second, JOB, "message-2")
    assert (one.job.key, two.job.key) == ("j-1", "j-1#message-2")
    assert isinstance(begin(first, JOB, "message-1"), Postpone)
    assert isinstance(begin(first, JOB, "message-2"), Postpone)
    retry_one, retry_two = fail(first, one), fail(second, two)
    assert (run(first, retry_one).job.key, run(second, retry_two).job.key) == ("j-1", "j-1#message-2")
    assert isinstance(begin(first, JOB, "message-2"), Drop)


def test_who_buried_a_job_has_settled_it(bridges: list[Bridge]) -> None:
    """Both happen in one step; a process that knows of a death settles the abandoned run."""
    first, second = bridges
    begun = run(first, JOB)
    resumed = second.engine.resume(JOB, JOB, second.engine.task(), process=os.getpid())
    assert isinstance(resumed, Run)
    assert resumed.abandoned
    decision = second.engine.judge(resumed, Failure("worker_death", "killed"))
    second.engine.settling.settle(resumed, decision)
    assert isinstance(begin(first, JOB), Drop)
    assert isinstance(second.engine.resume(JOB, JOB, second.engine.task(), process=os.getpid()), Drop)
    first.engine.settling.settle(begun, Complete())
    assert isinstance(begin(first, JOB), Drop)


@pytest.mark.requirement("RET-12")
def test_a_run_that_was_taken_over_is_not_heard(hasty: list[Bridge]) -> None:
    """The run neither sends its job on, nor writes a letter, nor parks a retry; other runs do."""
    first, second = hasty
    late, heard = run(first, JOB), run(first, JOB._replace(id="j-2"))
    first.engine.reservations.expire(late)
    eventually(lambda: isinstance(begin(second, JOB), Lost), what="the attempt was found lost")
    eventually(lambda: time.monotonic() - heard.since > 1.5 * SHORT.total_seconds())
    decision = DeadLettered("handler", Failure("a.b"), "why")
    for begun in (late, heard):
        job = first.engine.carrying.after(begun.job, decision)
        onward = Onward(job, first.engine.storing.header(job), first.engine.now() + LONG, None)
        steps: list[Callable[[], None]] = [
            partial(first.engine.settling.check, begun),
            partial(first.engine.storing.park, begun, onward, FRAMEWORK, {}),
            partial(first.engine.storing.bury, begun, job, decision, FRAMEWORK, {}),
        ]
        for step in steps:
            with pytest.raises(TakenOver, match="attempt 1") if begun is late else nullcontext():
                step()
    assert [letter.id for letter in first.dead_letters.list().letters] == ["j-2"]
    assert first.retries.count() == 1


def test_a_job_that_ends_as_the_heart_beats_has_not_run_out(
    bridges: list[Bridge], caplog: pytest.LogCaptureFixture
) -> None:
    """The store has settled it, and its worker learns that a moment later; after a whole beat it is lost."""
    heart, store, begun = bridges[0].engine.reservations.heart, bridges[0].store, run(bridges[0], JOB)
    assert heart and store and begun.reservation
    store.reservations.settle(Settle(begun.reservation, heart.holder, bridges[0].engine.now() + LONG))
    heart._extend()
    assert heart.holds(begun.reservation)
    assert "ran out" not in caplog.text
    heart._extend()
    assert not heart.holds(begun.reservation)
    assert "ran out" in caplog.text


def test_a_run_that_ends_within_its_reservation_asks_the_store_nothing(
    bridges: list[Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = run(bridges[0], JOB)
    monkeypatch.setattr(bridges[0].store.reservations, "extend", None)
    bridges[0].engine.settling.check(begun)


@pytest.mark.requirement("RET-12")
def test_a_process_that_died_before_anybody_knew_which_is_found_to_have_ended(url: str) -> None:
    """The engine finds out long before the reservation runs out."""
    abandon(url, reservation=timedelta(minutes=1))
    bridge = Bridge(url, POLICY)
    resumed = bridge.engine.resume(JOB, JOB, bridge.engine.task(), process=None)
    assert isinstance(resumed, Run)
    assert resumed.abandoned


@pytest.mark.requirement("RET-12")
def test_a_sibling_that_died_is_not_waited_for(url: str) -> None:
    """Celery's pool gives a job to another child when the first died before the pool read that it had begun.

    Whoever was not forked from the same process waits: it may not see that process's number.
    """
    bridge, stranger = (Bridge(url, POLICY, reservation=timedelta(minutes=1)) for _ in range(2))
    die_holding(lambda: bridge)
    assert isinstance(begin(stranger, JOB), Postpone)
    lost = begin(bridge, JOB)
    assert isinstance(lost, Lost)
    assert lost.failure.type == WORKER_DEATH
    decision = bridge.engine.judge(lost.run, lost.failure)
    bridge.engine.settling.settle(lost.run, decision)
    assert isinstance(decision, RetryAt)
    assert isinstance(begin(stranger, JOB), Drop)


@pytest.mark.requirement("RET-13")
def test_a_sibling_that_lives_is_waited_for(url: str) -> None:
    bridge = Bridge(url, POLICY, reservation=timedelta(minutes=1))
    fork = multiprocessing.get_context("fork")
    taken = fork.Event()

    def take_and_wait() -> None:
        run(bridge, JOB)
        taken.set()
        signal.pause()

    process = fork.Process(target=take_and_wait)
    process.start()
    try:
        assert taken.wait(90)
        assert isinstance(begin(bridge, JOB), Postpone)
    finally:
        process.kill()
        process.join()


@pytest.mark.requirement("RET-13")
def test_a_process_that_died_with_a_copy_in_its_hands_costs_the_live_run_nothing(
    bridges: list[Bridge],
) -> None:
    """The dead process had only found that another worker runs the job, or that the job came early."""
    first, second = bridges
    begun = run(first, JOB)
    found = second.engine.resume(JOB, JOB, second.engine.task(), process=os.getpid() + 1)
    assert isinstance(found, Postpone)
    first.engine.settling.settle(begun, Complete())
    assert isinstance(second.engine.resume(JOB, JOB, second.engine.task(), process=os.getpid() + 1), Drop)
    other = run(first, JOB._replace(id="j-other"))
    assert isinstance(
        second.engine.resume(other.job, other.job, second.engine.task(), process=None), Postpone
    )
    early = JOB._replace(id="j-early", next_retry_at=first.engine.now() + timedelta(minutes=1))
    found = second.engine.resume(early, early, second.engine.task(), process=os.getpid())
    assert isinstance(found, Postpone)
    assert found.at == early.next_retry_at


@pytest.mark.parametrize(
    ("fail_open", "can_wait", "runs"), [(False, True, False), (True, True, True), (False, False, True)]
)
def test_while_the_store_is_gone_jobs_wait(fail_open: bool, can_wait: bool, runs: bool) -> None:
    """Jobs do not wait with `fail_open`, or where waiting would lose them."""
    bridge = Bridge(
        "sqlite:////nowhere/at/all.db", fail_open=fail_open, storage_retry=StorageRetry.disabled()
    )
    if runs:
        begun = bridge.engine.begin(JOB, JOB, bridge.engine.task(), can_wait=can_wait)
        assert isinstance(begun, Run)
        assert begun.reservation is None
        bridge.engine.settling.settle(begun, Complete())
    else:
        with pytest.raises(StoreError):
            bridge.engine.begin(JOB, JOB, bridge.engine.task(), can_wait=can_wait)


def test_a_job_that_runs_in_its_caller_is_not_reserved(bridges: list[Bridge]) -> None:
    """No other worker can have the job."""
    for bridge in bridges:
        assert isinstance(bridge.engine.begin(JOB, JOB, bridge.engine.task(), reserve=False), Run)


def test_without_a_store_nothing_is_reserved() -> None:
    """A bridge without a store does nothing of it."""
    bridge = Bridge()
    assert run(bridge, JOB).reservation is None
    assert run(bridge, JOB).reservation is None


@pytest.mark.parametrize("name", ["reservation", "park_after"])
@pytest.mark.parametrize("value", ["soon", "PT0S", 60, timedelta(-1), ""])
def test_bad_lengths_name_the_field(name: str, value: Any) -> None:
    """The error comes where the bridge is made."""
    with pytest.raises(ConfigurationError, match=name):
        Bridge(**{name: value})


def test_what_was_acknowledged_is_forgotten_after_a_while(
    hasty: list[Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a store would hold a day's jobs; a retried job's reservation stays, because of copies."""
    monkeypatch.setattr(heartbeat, "_FORGET_AFTER", 0.0)
    first, second = hasty
    retry = fail(first, run(first, JOB._replace(id="j-2")))
    first.engine.settling.settle(run(first, retry), Complete())
    first.engine.settling.settle(run(first, JOB), Complete())
    for job in (JOB, retry):
        first.engine.reservations.acknowledged(Reservation(job.key, job.fence))
    eventually(lambda: isinstance(begin(second, JOB), Run), what="it was forgotten")
    assert isinstance(begin(second, retry), Drop)


def test_what_was_acknowledged_just_now_is_not_forgotten_with_what_was_long_ago(
    hasty: list[Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of it may come on for a while, and for a day where a connection was lost since."""
    first, second = hasty
    old, lost, new = (JOB._replace(id=f"j-{n}") for n in range(3))
    for job in (lost, old, new):
        first.engine.settling.settle(run(first, job), Complete())
    monkeypatch.setattr(heartbeat, "_FORGET_AFTER", 2.0)
    first.engine.reservations.acknowledged(Reservation(lost.key, lost.fence))
    first.engine.reservations.lost_connection()
    first.engine.reservations.acknowledged(Reservation(old.key, old.fence))
    time.sleep(1.0)  # that old is
    first.engine.reservations.acknowledged(Reservation(new.key, new.fence))
    eventually(lambda: isinstance(begin(second, old), Run), what="it was forgotten")
    assert isinstance(begin(second, new), Drop)
    eventually(lambda: isinstance(begin(second, new), Run), what="the new one was forgotten, too")
    assert isinstance(begin(second, lost), Drop)


def test_many_threads_begin_the_first_jobs_of_a_process(url: str) -> None:
    """The process holds all of the reservations, and can settle them as its own."""
    for _ in range(10):
        bridge = Bridge(url, POLICY, reservation=SHORT)
        gate = threading.Barrier(8)
        jobs = [JOB._replace(id=str(uuid.uuid4())) for _ in range(8)]

        def start(job: Job, bridge: Bridge = bridge, gate: threading.Barrier = gate) -> Run:
            gate.wait()
            return run(bridge, job)

        with ThreadPoolExecutor(8) as pool:
            for begun in list(pool.map(start, jobs)):
                bridge.engine.settling.settle(begun, Complete())
        assert all(isinstance(begin(bridge, job), Drop) for job in jobs)


@pytest.mark.parametrize("behind", [True, False])
def test_what_could_not_be_settled_is_settled_later(behind: bool) -> None:
    """The run is settled when the store is back: a lost acknowledgement runs nothing again."""
    with Valkey() as server:
        once = StorageRetry.disabled()
        bridge = Bridge(server.url, POLICY, reservation=SHORT, storage_retry=once, settle_behind=behind)
        begun = run(bridge, JOB)
        server.kill()
        bridge.engine.settling.settle(begun, Complete())
        server.start()
        # A worker that asked for the job meanwhile would be given it as a lost attempt.
        waiting: Any = bridge.engine.reservations._behind if behind else bridge.engine.reservations.heart
        eventually(lambda: not (waiting.waiting if behind else waiting._unsettled), what="it was settled")
        assert isinstance(begin(Bridge(server.url), JOB), Drop)
        bridge.stop()


def test_a_reservation_whose_answer_was_lost_is_ours() -> None:
    """The store goes on with a request that its client gave up; asked again, it gives the first answer."""
    with Valkey() as server:
        patient = StorageRetry(max_attempts=12, initial_interval="PT0.5S")
        bridge = Bridge(f"{server.url}?socket_timeout=0.3", POLICY, storage_retry=patient)
        first = JOB._replace(id="j-0")
        bridge.engine.settling.settle(run(bridge, first), Complete())
        os.kill(server.pid, signal.SIGSTOP)
        threading.Timer(0.8, os.kill, (server.pid, signal.SIGCONT)).start()
        assert run(bridge, JOB).reservation == Reservation(JOB.key, JOB.fence)
        bridge.stop()


@pytest.fixture
def asking(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Valkey, Bridge]]:
    """A store, and a bridge that asks it as often as it can."""
    monkeypatch.setattr(heartbeat, "BEATS", 0.01)  # no heart beats meanwhile
    with Valkey() as server:
        patient = StorageRetry(max_attempts=100, initial_interval="PT0.2S", multiplier=1)
        url, length = f"{server.url}?socket_timeout=0.2", timedelta(seconds=3)
        bridge = Bridge(url, POLICY, reservation=length, storage_retry=patient)
        bridge.engine.settling.settle(run(bridge, JOB._replace(id="j-0")), Complete())
        yield server, bridge
        bridge.stop()


def stall(server: Valkey, seconds: float) -> None:
    """Have a server stand still for so long."""
    os.kill(server.pid, signal.SIGSTOP)
    threading.Timer(seconds, os.kill, (server.pid, signal.SIGCONT)).start()


def test_a_question_that_was_broken_off_is_no_lost_attempt(asking: tuple[Valkey, Bridge]) -> None:
    """The store reserves the attempt when it wakes, until a time that has passed; no worker ran it."""
    server, bridge = asking

    def strike(*_: object) -> None:
        raise SoftLimit

    before = signal.signal(signal.SIGALRM, strike)
    stall(server, 6)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1)
        with pytest.raises(SoftLimit):
            begin(bridge, JOB)
        assert isinstance(begin(bridge, JOB), Postpone)
    finally:
        signal.signal(signal.SIGALRM, before)
    bridge.stop()  # gives back what it never began
    assert run(Bridge(server.url), JOB).job.attempt == 1


def test_a_reservation_that_no_holder_could_extend_is_not_lost_at_once(asking: tuple[Valkey, Bridge]) -> None:
    """The store was away for longer than a reservation lasts, and its holder may live."""
    server, bridge = asking
    holder = Bridge(server.url, POLICY, reservation=timedelta(seconds=1))
    held = run(holder, JOB)
    stall(server, 6)
    assert isinstance(begin(bridge, JOB), Postpone)
    holder.engine.settling.settle(held, Complete())
    assert isinstance(begin(bridge, JOB), Drop)


def test_a_message_that_nothing_tells_apart_is_a_copy_until_its_attempt_is_settled(tmp_path: Path) -> None:
    """Its broker neither names it nor says that it comes again, as SQS and a broker of one's own."""
    one, other = (Bridge(store=f"sqlite:///{tmp_path}/ojs.db") for _ in range(2))

    def begin(bridge: Bridge) -> Admission:
        job = Job("j", "t", "q")
        return bridge.engine.begin(job, job, bridge.engine.task(), publication=UNTOLD)

    for chain in ("", "again0", "again1"):
        run = begin(one)
        assert isinstance(run, Run)
        assert run.job.chain == chain
        assert isinstance(begin(other), Postpone)
        one.engine.settling.settle(run, Complete())


def test_what_a_process_gets_as_it_ends_is_given_back_too(
    bridges: list[Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread is about to get a reservation when the process gives its attempts back."""
    ending, other = bridges
    store, heart = ending.store, ending.engine.reservations.heart
    assert store and heart
    reserve, asked, goes_on = store.reservations.reserve, threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        answer = reserve(*args, **options)
        asked.set()
        assert goes_on.wait(60)
        return answer

    monkeypatch.setattr(store.reservations, "reserve", slow)
    with ThreadPoolExecutor() as pool:
        begun = pool.submit(begin, ending, JOB)
        assert asked.wait(60)
        given_back = pool.submit(ending.engine.reservations.give_back)
        eventually(lambda: heart.ends)
        goes_on.set()
        assert isinstance(begun.result(), Run)
        given_back.result()
    assert isinstance(begin(other, JOB), Run)
    with pytest.raises(StoreError, match="this process ends"):
        begin(ending, JOB._replace(id="another"))
