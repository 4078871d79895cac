"""The interleavings that the model of one job has found, played on each store."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from multiprocessing import get_context
from typing import Any

import pytest

from ojs_bridge import Bridge, JobNotFound, StorageRetry, StoreError
from ojs_bridge.engine import heartbeat
from ojs_bridge.engine.reservations import ASK_AGAIN
from ojs_bridge.engine.runs import Drop, Lost, Onward, Postpone, Run
from ojs_bridge.rules.decision import Complete, DeadLettered, Discarded, RetryAt
from ojs_bridge.rules.failures import VISIBILITY_TIMEOUT, Failure
from ojs_bridge.rules.job import Job
from ojs_bridge.store import EVERYTHING, Letter, Reservation, Settle, Store
from tests.conftest import store_url
from tests.engine.test_reservations import JOB, SHORT, abandon, begin, run
from tests.lives import FRAMEWORK, Outbox
from tests.servers import eventually

#: The least time for which a worker is suspected here.
SUSPECTED = timedelta(seconds=0.5)
#: The job with no attempt left.
LAST = JOB._replace(id="j-last", attempt=3, fence=2)
MESSAGE = {"args": [7]}


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def bridges(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Bridge]]:
    """Two bridges of one fleet on each store, which suspect a worker for half a second."""
    monkeypatch.setattr(heartbeat, "CLEAR_SECONDS", 0.1)
    url, policy = store_url(request.param, request), {"max_attempts": 3, "on_exhaustion": "dead_letter"}
    made = [Bridge(url, policy, storage_retry=StorageRetry.disabled()) for _ in range(2)]
    for bridge in made:
        bridge.engine.context.publishers[FRAMEWORK] = Outbox()
        assert bridge.engine.reservations.heart
        bridge.engine.reservations.heart.out_of_reach = SUSPECTED
    yield made
    for bridge in made:
        bridge.stop()


def url_of(bridge: Bridge, request: pytest.FixtureRequest) -> str:
    kind = request.node.callspec.params["bridges"]
    return store_url(kind, request)


def bury(bridge: Bridge, begun: Run, failure: Failure) -> None:
    """Bury the job of a run."""
    decision = DeadLettered("exhausted", failure, "no attempt is left")
    job = bridge.engine.carrying.after(begun.job, decision)
    bridge.engine.storing.bury(begun, job, decision, FRAMEWORK, MESSAGE)


def letters(bridge: Bridge) -> list[str]:
    return [letter.id for letter in bridge.dead_letters.list().letters]


# Where no attempt is left, a suspicion is not enough.


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("ends", ["exhausted", "expired"])
def test_a_suspicion_ends_no_job(
    bridges: list[Bridge], request: pytest.FixtureRequest, ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job of the same worker is lost meanwhile; the last attempt is, when its reservation ran out."""
    bridge, _ = bridges
    # The worker was on another machine.
    monkeypatch.setattr(heartbeat, "lives_here", lambda holder: None)
    last = LAST if ends == "exhausted" else LAST._replace(attempt=1, expires=datetime.now(timezone.utc))
    url = url_of(bridge, request)
    for job in (JOB, last):
        abandon(url, job, timedelta(minutes=1))
    eventually(
        lambda: isinstance(begin(bridge, JOB, redelivered=True), Lost), what="the suspicion has lasted"
    )
    eventually(lambda: bridge.store.reservations.suspect(family_of(bridge, last), gone=True) > 2 * SUSPECTED)
    waits = begin(bridge, last, redelivered=True)
    assert isinstance(waits, Postpone)
    assert waits.at - bridge.engine.now() > ASK_AGAIN
    short = last._replace(id="j-short")
    abandon(url, short, SHORT)
    eventually(lambda: isinstance(begin(bridge, short, redelivered=True), Lost), what="it ran out")


def family_of(bridge: Bridge, job: Job) -> str:
    """The family of the worker that has reserved a job."""
    now = bridge.engine.now()
    answer = bridge.store.reservations.reserve(
        Reservation(job.key, job.fence), publication="", holder="test", mark="test", now=now, until=now
    )
    return heartbeat._family_of(answer.holder)


# A question that the store does not answer waits.


class Away:
    """A store that goes away, and comes back."""

    def __init__(self, store: Any, whole: Away | None = None) -> None:
        self.store, self.whole, self.is_away = store, whole or self, False

    def __getattr__(self, name: str) -> Any:
        known = getattr(self.store, name)
        if name in {"letters", "parked", "reservations", "documents"}:
            return Away(known, self)

        def ask(*words: Any, **options: Any) -> Any:
            if self.whole.is_away:
                raise StoreError("away")
            return known(*words, **options)

        return ask if callable(known) else known


@pytest.fixture
def away(bridges: list[Bridge]) -> Iterator[Callable[..., tuple[Bridge, Away]]]:
    """Makes a bridge on a store that can go away."""
    made: list[Bridge] = []

    def make(**options: Any) -> tuple[Bridge, Away]:
        store = Away(bridges[0].store)
        policy = {"max_attempts": 3, "on_exhaustion": "dead_letter"}
        made.append(Bridge(store, policy, storage_retry=StorageRetry.disabled(), **options))  # type: ignore[arg-type]
        return made[-1], store

    yield make
    for bridge in made:
        bridge.store.is_away = False  # type: ignore[union-attr]
        bridge.stop()


def outlast(begun: Run) -> None:
    """Wait until a run may have been taken over by its own clock."""
    eventually(
        lambda: time.monotonic() - begun.since > 2 * SHORT.total_seconds(), what="the reservation's end"
    )


@pytest.mark.requirement("RET-12")
def test_an_unanswered_question_never_counts(away: Callable[..., tuple[Bridge, Away]]) -> None:
    bridge, store = away(reservation=SHORT)
    begun = run(bridge, JOB)
    store.is_away = True
    bridge.engine.settling.check(begun)  # it began just now, and asks nobody
    outlast(begun)
    with pytest.raises(StoreError):
        bridge.engine.settling.check(begun)
    bridge.engine.settling.check(begun, can_wait=False)
    store.is_away = False
    bridge.engine.settling.check(begun)
    bridge.engine.settling.settle(begun, Complete())
    assert isinstance(begin(bridge, JOB), Drop)


def test_with_fail_open_an_unanswered_question_counts(away: Callable[..., tuple[Bridge, Away]]) -> None:
    bridge, store = away(reservation=SHORT, fail_open=True)
    begun = run(bridge, JOB)
    store.is_away = True
    outlast(begun)
    bridge.engine.settling.check(begun)


@pytest.mark.requirement("RET-12")
def test_the_end_of_another_processes_run_waits_for_the_store(
    away: Callable[..., tuple[Bridge, Away]],
) -> None:
    bridge, store = away()
    run(bridge, JOB)
    store.is_away = True
    with pytest.raises(StoreError):
        bridge.engine.resume(JOB, JOB, bridge.engine.task(), process=os.getpid())
    store.is_away = False
    resumed = bridge.engine.resume(JOB, JOB, bridge.engine.task(), process=os.getpid())
    assert isinstance(resumed, Run)
    assert resumed.reservation


# A run with a reservation is not buried in the broker's dead queue.


class Kept:
    """A message that a store keeps."""

    def __init__(self, kept: Any = MESSAGE) -> None:
        self._kept = kept

    def kept(self) -> Any:
        return self._kept


@pytest.mark.requirement("DLQ-001")
def test_a_burial_waits_for_the_store(away: Callable[..., tuple[Bridge, Away]]) -> None:
    """So does no burial that the store can never take, and none of a run that is not reserved there."""
    bridge, store = away()
    begun, failure = run(bridge, JOB), Failure("a", "b")
    decision = DeadLettered("handler", failure, "it said so")
    job, storing = bridge.engine.carrying.after(begun.job, decision), bridge.engine.storing
    store.is_away = True
    with pytest.raises(StoreError):
        storing.is_buried(begun, job, decision, FRAMEWORK, Kept(), can_wait=True)
    assert not storing.is_buried(begun, job, decision, FRAMEWORK, Kept(), can_wait=False)
    unreserved = begun._replace(reservation=None)
    assert not storing.is_buried(unreserved, job, decision, FRAMEWORK, Kept(), can_wait=True)
    store.is_away = False
    assert not storing.is_buried(begun, job, decision, FRAMEWORK, Kept({"args": {1, 2}}), can_wait=True)
    assert storing.is_buried(begun, job, decision, FRAMEWORK, Kept(), can_wait=True)
    assert letters(bridge) == [job.id]


# A success of a later message takes away what earlier ones have left.


def succeed(bridge: Bridge, begun: Run, way: str) -> None:
    """Settle a success in one of the ways."""
    if way == "alone":
        bridge.engine.settling.settle(begun, Complete())
    elif way == "discarded":
        bridge.engine.settling.settle(begun, Discarded("handler", Failure("a", "b"), "it said so"))
    elif way == "in a lot":
        other = run(bridge, JOB._replace(id="j-other"))
        bridge.engine.settling.settle_successes([other, begun])
    else:
        heart = bridge.engine.reservations.heart
        assert heart
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(heart.reserved, "settle", fails_to_settle)
            bridge.engine.settling.settle(begun, Complete())
        eventually(lambda: not heart._unsettled, what="it was settled later")


def fails_to_settle(_: Settle) -> bool:
    raise StoreError("away")


WAYS = ["alone", "in a lot", "later", "discarded"]


@pytest.mark.requirement("RET-12", "DLQ-003")
@pytest.mark.parametrize("way", WAYS)
def test_a_snooze_that_was_published_before_a_kill_ends_once(
    bridges: list[Bridge], request: pytest.FixtureRequest, way: str
) -> None:
    """The attempt is lost, and no attempt is left: a letter. The snoozed message runs, and succeeds."""
    first, second = bridges
    abandon(url_of(first, request), LAST)
    lost: list[Any] = []
    eventually(lambda: lost.append(begin(first, LAST)) or isinstance(lost[-1], Lost), what="it ran out")
    snoozed = LAST.snoozed(first.engine.now())._replace(next_retry_at=None)
    bury(first, lost[-1].run, lost[-1].failure)
    assert letters(first) == [LAST.id]
    succeed(second, run(second, snoozed), way)
    assert letters(first) == []
    assert first.store.parked.count() == 0
    assert isinstance(begin(first, LAST), Drop)


@pytest.mark.requirement("RET-12", "DLQ-003")
@pytest.mark.parametrize("way", WAYS)
def test_a_replay_that_was_killed_before_it_deleted_its_letter_ends_once(
    bridges: list[Bridge], way: str
) -> None:
    first, second = bridges
    bury(first, run(first, LAST), Failure("a", "b"))
    letter = first.dead_letters.get(LAST.id)
    claimed = first.store.letters.claim([LAST.id], now=first.engine.now(), seconds=60)
    assert [each.id for each in claimed.letters] == [LAST.id]
    again = LAST._replace(errors=tuple(letter.errors), fence=letter.fence).replayed()
    succeed(second, run(second, again), way)
    assert letters(first) == []
    assert first.store.letters.delete([LAST.id], claimed.claim) == 0


def retry_of(job: Job, at: datetime) -> Job:
    """The job at its next attempt."""
    return job.failed(Failure("a", "b"), at=at, next_at=at)._replace(next_retry_at=None)


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("way", WAYS)
def test_a_parked_copy_of_what_has_succeeded_is_gone(bridges: list[Bridge], way: str) -> None:
    """It was parked without an answer, and so published, too; a scheduler has claimed it."""
    first, second = bridges
    begun, retry = run(first, JOB), retry_of(JOB, first.engine.now())
    park(first, begun, retry)
    due = first.store.parked.claim_due(
        FRAMEWORK,
        now=first.engine.now() + timedelta(hours=1),
        until=first.engine.now() + timedelta(hours=2),
        limit=9,
    )
    assert len(due.retries) == 1
    succeed(second, run(second, retry), way)
    assert first.store.parked.count() == 0
    assert first.store.parked.unpark(due.retries, due.claim) == 0


def park(bridge: Bridge, begun: Run, job: Job) -> None:
    """Park a job that goes on, due in five minutes."""
    at = bridge.engine.now() + timedelta(minutes=5)
    decision = RetryAt(at, 300.0, Failure("a", "b"), "why")
    bridge.engine.storing.park(
        begun, Onward(job, bridge.engine.storing.header(job), at, decision), FRAMEWORK, MESSAGE
    )


def left(store: Store) -> list[str]:
    return [letter.id for letter in store.letters.list(EVERYTHING, limit=9, cursor=None).letters]


def test_what_is_not_left_by_the_job_stays(bridges: list[Bridge]) -> None:
    """The letter of another job under its id, of a later death, and a later retry."""
    bridge, _ = bridges
    bury(bridge, run(bridge, LAST), Failure("a", "b"))
    letter = bridge.dead_letters.get(LAST.id)
    others: dict[str, Letter] = {
        "another job's": replace(letter, errors=({"timestamp": "2020-01-01T00:00:00.000Z"},) * 2),
        "long ago": replace(letter, discarded_at=letter.discarded_at - timedelta(days=2)),
        "a later one": replace(letter, fence=letter.fence + 5),
        "of another chain": replace(letter, key=f"{LAST.id}#other"),
    }
    for n, (what, other) in enumerate(others.items()):
        bridge.store.letters.bury(other)
        again = LAST._replace(fence=LAST.fence + n + 1)
        bridge.engine.settling.settle(run(bridge, again), Complete())
        assert left(bridge.store) == [LAST.id], what
    begun, retry = run(bridge, JOB), retry_of(JOB, bridge.engine.now())
    park(bridge, begun, retry._replace(fence=7))
    bridge.engine.settling.settle(run(bridge, retry), Complete())
    assert bridge.store.parked.count() == 1


def test_the_two_deaths_of_one_job_are_one_letter(bridges: list[Bridge]) -> None:
    """The snoozed message fails for good, after its attempt was taken for lost and buried."""
    bridge, _ = bridges
    bury(bridge, run(bridge, LAST), Failure(VISIBILITY_TIMEOUT, "lost"))
    bury(
        bridge, run(bridge, LAST.snoozed(bridge.engine.now())._replace(next_retry_at=None)), Failure("a", "b")
    )
    assert letters(bridge) == [LAST.id]
    assert bridge.dead_letters.get(LAST.id).error_type == "a"


# A suspicion that was ended takes no run.


@pytest.mark.requirement("RET-12")
def test_a_worker_that_has_ended_the_suspicion_keeps_its_runs(
    bridges: list[Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one has seen that the suspicion had lasted, and asks for the attempt a moment later."""
    first, second = bridges
    monkeypatch.setattr(heartbeat, "lives_here", lambda holder: None)
    held, suspect = run(first, JOB), second.store.reservations.suspect
    family = first.engine.reservations.family
    seen: list[timedelta] = []

    def see(suspected: str, *, gone: bool) -> timedelta | None:
        if not gone:
            return suspect(suspected, gone=False)
        suspect(family, gone=True)
        eventually(lambda: suspect(family, gone=False) is None, what="the worker has ended it")
        seen.append(timedelta(hours=1))
        return seen[-1]

    monkeypatch.setattr(second.store.reservations, "suspect", see)
    second.engine.reservations.heart._late = time.monotonic() - 3600  # type: ignore[union-attr]
    # The reservation is an old one.
    monkeypatch.setattr(second.engine.reservations, "_length", timedelta(days=1))
    left_alone = begin(second, JOB, redelivered=True)
    assert (seen, type(left_alone)) == ([timedelta(hours=1)], Postpone)
    first.engine.settling.check(held)
    first.engine.settling.settle(held, Complete())
    assert isinstance(begin(second, JOB), Drop)


@pytest.mark.requirement("RET-12")
def test_a_cancelled_retry_does_not_run_though_it_was_published_too(bridges: list[Bridge]) -> None:
    first, second = bridges
    retry = retry_of(JOB, first.engine.now())
    park(first, run(first, JOB), retry)
    first.retries.cancel(JOB.id)
    assert isinstance(begin(second, retry), Drop)
    assert first.store.parked.count() == 0
    # A job that the user sends under this id later is another job.
    assert begin(second, JOB._replace(id="j-2"), "p-2").job.attempt == 1  # type: ignore[union-attr]


@pytest.mark.requirement("RET-12")
def test_a_retry_that_has_begun_is_not_cancelled(bridges: list[Bridge]) -> None:
    """The operator hears of it, and the job ends as it would."""
    first, second = bridges
    retry = retry_of(JOB, first.engine.now())
    park(first, run(first, JOB), retry)
    begun = run(second, retry)
    with pytest.raises(JobNotFound):
        first.retries.cancel(JOB.id)
    assert first.store.parked.count() == 1
    second.engine.settling.settle(begun, Complete())
    assert first.store.parked.count() == 0


# A process that lives on this machine is never dead.


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("job", [JOB, LAST], ids=["an attempt", "the last one"])
def test_a_process_that_stands_still_on_this_machine_is_not_dead(
    bridges: list[Bridge], request: pytest.FixtureRequest, job: Job
) -> None:
    """Until it is killed: then its attempt is lost at once, if the broker has lost its connection, too."""
    bridge, _ = bridges
    process = get_context("fork").Process(target=_take_and_stop, args=(url_of(bridge, request), job))
    process.start()
    assert process.pid
    try:
        os.waitpid(process.pid, os.WUNTRACED)
        ends = time.monotonic() + 3 * SUSPECTED.total_seconds()
        while time.monotonic() < ends:
            assert isinstance(begin(bridge, job, redelivered=True), Postpone)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert isinstance(begin(bridge, job), Postpone)
    assert isinstance(begin(bridge, job, redelivered=True), Lost)


def _take_and_stop(url: str, job: Job) -> None:
    run(Bridge(url, {"max_attempts": 3}), job)
    os.kill(os.getpid(), signal.SIGSTOP)


def test_a_killed_process_that_nobody_has_reaped_does_not_live() -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    eventually(lambda: not heartbeat._born(child), what="its death")
    os.kill(child, 0)  # its number is still there
    os.waitpid(child, 0)


def test_processes_of_another_machine_boot_or_container_do_not_live_here() -> None:
    """Their numbers, and the names of their machines, may be the same."""
    here = heartbeat._born(os.getpid())
    room, _, started = here.partition(".")
    holder = f"host:{os.getpid()}:w0000000abcdef01"
    assert started.isdecimal()
    assert heartbeat.lives_here(f"{holder}.{here}")
    for other in (f".{'0' * len(room)}.{started}", f".{room}.{int(started) + 1}", ""):
        assert not heartbeat.lives_here(holder + other), other
