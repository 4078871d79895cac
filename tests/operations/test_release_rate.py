"""Parked jobs leave the store no faster than `release_rate`, all workers together."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from ojs_bridge import Bridge, open_store
from ojs_bridge.engine import holds
from ojs_bridge.engine.holds import Releaser, read, write
from ojs_bridge.engine.turns import Turns
from ojs_bridge.rules.dependencies import Dependencies
from ojs_bridge.rules.holds import ASK_AGAIN, Hold
from ojs_bridge.store import Filter
from tests.lives import FRAMEWORK
from tests.operations.test_parked_retries import QUICK, Worker
from tests.servers.process import eventually
from tests.store.processes import in_processes

RATE = 25
JOBS = 50


def take(url: str, now: datetime) -> list[Sequence[datetime]]:
    """Take turns of the same name as other processes."""
    turns = Turns(open_store(url).documents, "stripe", 500)
    took = [turns.take(5, now=now, within=timedelta(seconds=10)) for _ in range(20)]
    return [times for times in took if times]


def test_processes_share_the_turns_of_a_name(url: str) -> None:
    """No two turns are closer than the rate allows."""
    Bridge(url)
    began = datetime.now(timezone.utc)
    found = [times for process in in_processes(3, take, url, began) for times in process]
    times = sorted(itertools.chain.from_iterable(found))
    assert len(times) > 20
    assert times[0] >= began
    # The store keeps whole milliseconds.
    assert all(later - at >= timedelta(seconds=0.002) for at, later in itertools.pairwise(times))


def test_a_turn_that_is_too_far_ahead_is_not_taken(url: str) -> None:
    turns, now = Turns(open_store(url).documents, "stripe", 1 / 60), datetime.now(timezone.utc)
    assert turns.take(1, now=now, within=timedelta()) == [now]
    assert turns.take(1, now=now, within=timedelta(seconds=50)) is None
    soon = turns.take(1, now=now, within=timedelta(seconds=61))
    assert soon
    assert timedelta() <= soon[0] - now - timedelta(minutes=1) < timedelta(milliseconds=2)


def test_many_that_are_due_leave_no_faster_than_the_rate(url: str) -> None:
    """Two workers share the rate, and lose none."""
    workers = [Worker(url) for _ in range(2)]
    template, store = workers[0].park("j"), workers[0].bridge.store
    assert store is not None
    for n in range(JOBS):
        store.parked.park(replace(template, id=f"j-{n}", key=f"j-{n}", next_retry_at=template.parked_at))
    began = time.monotonic()
    for worker in workers:
        worker.bridge = Bridge(url, release_rate=f"{RATE}/s", polling_retry=QUICK)
        worker.bridge.engine.context.publishers[FRAMEWORK] = worker.outbox
        worker.bridge.start()

    def published() -> list[str]:
        return [job for worker in workers for job in worker.published]

    eventually(lambda: len(published()) == JOBS, seconds=30, what="all were published")
    assert time.monotonic() - began >= (JOBS - 1) / RATE - 0.01
    for worker in workers:
        worker.bridge.stop()
    assert sorted(published()) == sorted(f"j-{n}" for n in range(JOBS))


def test_held_jobs_keep_their_turns_whoever_looks(url: str) -> None:
    """Another worker, and one that looks again, leave a job the turn that it has."""
    template, store = (worker := Worker(url)).park("j"), open_store(url)
    now = worker.bridge.engine.now()
    for n in range(JOBS):
        far = now + timedelta(minutes=10)
        store.parked.park(replace(template, id=f"j-{n}", key=f"j-{n}", kind="held", next_retry_at=far))
    write(store.documents, Hold("pause:type=billing.*", "x", now, type="billing.*", ended_at=now, rate=RATE))
    over = read(store.documents)

    def look() -> tuple[int, list[datetime]]:
        """Look as a worker of its own; return how many jobs it moved, and when all of them are due."""
        moved = sum(Releaser(store, worker.bridge.engine.now, Dependencies()).look(over, now))
        parked = store.parked.list(Filter(kind="held"), limit=100, cursor=None)
        return moved, [job.next_retry_at for job in parked.jobs]

    moved, due = look()
    assert moved == JOBS
    assert due[-1] - due[0] >= timedelta(seconds=(JOBS - 1) / RATE)
    assert look() == (0, due)
    worker.bridge.stop()


def test_held_jobs_have_turns_beyond_the_time_when_they_would_ask_again(url: str) -> None:
    """Else all that have no turn by then come together."""
    template, store = (worker := Worker(url)).park("j"), open_store(url)
    now = worker.bridge.engine.now()
    for n in range(30):
        again = {"next_retry_at": now + ASK_AGAIN, "parked_at": now}
        store.parked.park(replace(template, id=f"j-{n}", key=f"j-{n}", kind="held", **again))
    write(store.documents, Hold("pause:type=billing.*", "x", now, type="billing.*", ended_at=now, rate=0.025))
    over = read(store.documents)
    assert sum(Releaser(store, worker.bridge.engine.now, Dependencies()).look(over, now)) >= 30
    due = [job.next_retry_at for job in store.parked.list(Filter(kind="held"), limit=100, cursor=None).jobs]
    assert min(later - earlier for earlier, later in itertools.pairwise(due)) > timedelta(seconds=39)
    worker.bridge.stop()


@pytest.mark.parametrize(("is_closed", "takes"), [(True, 4.0), (False, 1.0)], ids=["closed", "asked to wait"])
def test_only_what_a_breaker_held_begins_slowly(url: str, is_closed: bool, takes: float) -> None:
    """After a Retry-After the service works, and all of the rate is there at once."""
    template, store = (worker := Worker(url)).park("j"), open_store(url)
    now, end = worker.bridge.engine.now(), "ended_at" if is_closed else "until"
    for n in range(RATE):
        again = {"next_retry_at": now + ASK_AGAIN, "parked_at": now}
        store.parked.park(replace(template, id=f"j-{n}", key=f"j-{n}", kind="held", **again))
    over = Hold("breaker:it", "", now, dependency="it", jobs=("*",), rate=RATE, **{end: now})
    assert sum(Releaser(store, worker.bridge.engine.now, Dependencies()).look([over], now)) >= RATE
    due = [job.next_retry_at for job in store.parked.list(Filter(kind="held"), limit=100, cursor=None).jobs]
    assert takes - 1 < (due[-1] - due[0]).total_seconds() < takes
    worker.bridge.stop()


def test_held_jobs_get_no_more_turns_when_a_hold_begins(url: str) -> None:
    """A worker that gives turns to many looks after each page."""
    template, store = (worker := Worker(url)).park("j"), open_store(url)
    now = worker.bridge.engine.now()
    for n in range(60):
        again = {"next_retry_at": now + ASK_AGAIN, "parked_at": now}
        store.parked.park(replace(template, id=f"j-{n}", key=f"j-{n}", kind="held", **again))
    write(store.documents, Hold("pause:type=*", "x", now, type="*", ended_at=now, rate=RATE))
    releaser, known = Releaser(store, worker.bridge.engine.now, Dependencies()), read(store.documents)
    write(store.documents, Hold("pause:queue=other", "x", now, queue="other"))
    assert [*releaser.look(known, now)] == [25]
    assert [*releaser.look(read(store.documents), now)] == [0, 25, 10]
    assert sum(releaser.look(read(store.documents), now)) == 0
    worker.bridge.stop()


def test_a_worker_publishes_between_two_pages_of_held_jobs(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it has more to look at, and goes on there; another worker begins at the first page."""
    monkeypatch.setattr(holds, "GO_SECONDS", 0.0)
    template, store = (worker := Worker(url)).park("j"), open_store(url)
    now = worker.bridge.engine.now()
    for n in range(60):
        again = {"next_retry_at": now + ASK_AGAIN, "parked_at": now}
        store.parked.park(replace(template, id=f"j-{n}", key=f"j-{n}", kind="held", **again))
    ended = now - timedelta(minutes=1)
    write(store.documents, Hold("pause:type=*", "x", ended, type="*", ended_at=ended, rate=RATE))
    one, other = (Releaser(store, worker.bridge.engine.now, Dependencies()) for _ in range(2))

    def far() -> int:
        """Return how many have no turn."""
        parked = store.parked.list(Filter(kind="held"), limit=100, cursor=None).jobs
        return sum(job.next_retry_at > now + ASK_AGAIN / 2 for job in parked)

    found = [(releaser.release(), far()) for releaser in (one, other, one, other)]
    assert found == [(True, 35), (True, 35), (True, 10), (True, 10)]
    while one.release():
        pass
    assert far() == 0
    worker.bridge.stop()


@pytest.mark.parametrize(
    ("rate", "a_second"),
    [("6/m", 0.1), ("36/h", 0.01), ("2.5/s", 2.5), ("7", 7), (3, 3)],
)
def test_a_rate_is_written_as_celery_writes_it(rate: str | float, a_second: float) -> None:
    assert Bridge("sqlite:///unused.db", release_rate=rate).settings.release_rate == a_second
