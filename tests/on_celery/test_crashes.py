"""A task whose process is gone has failed; a job that was revoked, or whose worker stops, has not."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.celery import install
from ojs_bridge.store import Reservation, Settle
from tests.contract.steps import Step, dies, exits, raises, sleeps
from tests.faults import Faults
from tests.on_celery.by_hand import by_hand, natively
from tests.on_celery.fleet import Fleet
from tests.servers import eventually
from tests.zombies import take_over

#: task and steps -> runs, the type of the last error
CRASHES: dict[str, tuple[str, list[Step], int, str]] = {
    "SIGKILL": ("handled", [dies()], 3, "worker_death"),
    "os._exit": ("handled", [exits()], 3, "worker_death"),
    "hard time limit": ("hard", [sleeps(60)], 2, "timeout"),
    "soft time limit": ("soft", [sleeps(60)], 2, "timeout"),
    "recovers": ("handled", [dies(), "ok"], 2, ""),
}


#: How many seconds an attempt lasts at least, where it is not a tenth of one. The limit of 4 s counts
#: from the moment at which a child has the job, and the attempt from the moment at which it begins.
LASTS = {"hard time limit": 3, "soft time limit": 3}


def durations(fleet: Fleet, job: Any, runs: int) -> list[float]:
    """The seconds that the failed attempts of a job took, as their events say."""

    def told() -> list[float]:
        return [e["data"]["duration_ms"] / 1000 for e in fleet.events(job) if e["type"] == "job.failed"]

    eventually(lambda: len(told()) == runs, seconds=45, what="an event of each attempt")
    return told()


@pytest.fixture(scope="module", params=[("on_valkey", True), ("on_rabbitmq", True), ("on_valkey", False)])
def fleet(request: pytest.FixtureRequest) -> Fleet:
    broker, acks_late = request.param
    return request.getfixturevalue(broker)("prefork", acks_late)


@pytest.mark.requirement("RET-01")
def test_a_crash_is_a_failed_attempt(fleet: Fleet) -> None:
    policy = {"on_exhaustion": "dead_letter"}
    errback = fleet.task("errback").s()
    sent = {
        name: fleet.send(task, *steps, ojs_retry=policy, link_error=errback)
        for name, (task, steps, *_) in CRASHES.items()
    }
    for name, (task, _, runs, error_type) in CRASHES.items():
        job = sent[name]
        assert fleet.end(job) == ("FAILURE" if error_type else "SUCCESS"), name
        assert len(fleet.runs(job)) == runs, name
        if not error_type:
            continue
        letter = fleet.bridge.dead_letters.get(job.id)
        assert (letter.attempt, letter.error_type, len(letter.errors)) == (runs, error_type, runs), name
        if task == "handled":
            # The process that judged the earlier attempt may not have called the retry's handler yet.
            called = functools.partial(fleet.calls, job, "on_retry")
            eventually(lambda called=called, n=runs - 1: len(called()) >= n, what="the handlers")
            assert len(called()) == runs - 1, name
        eventually(lambda job=job: fleet.calls(job, "errback"), what=f"the errback of {name}")
        assert min(durations(fleet, job, runs)) >= LASTS.get(name, 0.1), name
    assert [line for line in fleet.worker.log.splitlines() if "was taken for lost" in line] == []
    fleet.ending(sent["SIGKILL"])
    time.sleep(0.5)  # for what must not happen: a second errback, a further run
    for name, (*_, runs, error_type) in CRASHES.items():
        assert len(fleet.calls(sent[name], "errback")) == (1 if error_type else 0), name
        assert len(fleet.runs(sent[name])) == runs, name
    ends = [event["type"] for event in fleet.events(sent["SIGKILL"])]
    assert ends.count("job.discarded") == 1


def test_a_killed_attempt_has_its_duration_without_a_store_too(separate) -> None:
    fleet = separate(store=None)
    fleet.start("-c", "1")
    job = fleet.send("hard", sleeps(60), ojs_retry={"max_attempts": 1})
    assert min(durations(fleet, job, 1)) >= 3.5


@pytest.mark.parametrize("bridged", [False, True], ids=["celery alone", "the bridge"])
def test_a_job_that_kills_each_of_its_children(unique: str, bridged: bool) -> None:
    """With `reject_on_worker_lost` Celery alone delivers it without end; the bridge counts its attempts."""
    heard: list[str] = []
    bridge = Bridge(listeners=[lambda event: heard.append(event.type)])
    policies = {"requeued": {"max_attempts": 3, "initial_interval": "PT0.001S"}}
    installed = functools.partial(install, bridge=bridge, policies=policies)
    hand = by_hand(installed if bridged else natively, unique)
    job = hand.send("requeued", "ok", headers={"dies": "killed"})
    assert all(hand.deliver() for _ in range(30)) is not bridged
    assert hand.state(job)[0] == ("FAILURE" if bridged else "PENDING")
    assert bridge.flush(30)
    assert heard.count("job.failed") == (3 if bridged else 0)


def test_a_revoked_job_is_no_failure(fleet: Fleet) -> None:
    job = fleet.send("act", sleeps(60))
    eventually(lambda: fleet.runs(job) and fleet.events(job), what="a run, and that somebody was told of it")
    fleet.app.control.revoke(job.id, terminate=True)
    assert fleet.end(job) == "REVOKED"
    time.sleep(0.5)
    assert len(fleet.runs(job)) == 1
    assert [event["type"] for event in fleet.events(job)] == ["job.started"]


def test_a_warm_shutdown_uses_no_attempt(separate) -> None:
    fleet = separate()
    worker = fleet.start("-c", "2")
    worker.await_ready()
    job = fleet.send("act", sleeps(1.5, "done"))
    retried = fleet.send("act", raises(OSError), "done", ojs_retry={"initial_interval": "PT3S"})
    eventually(lambda: fleet.runs(job) and fleet.runs(retried), seconds=30, what="two runs")
    assert worker.stop() == 0
    assert fleet.app.AsyncResult(job.id).state == "SUCCESS"
    fleet.start("-c", "2")
    assert fleet.end(retried) == "SUCCESS"
    assert [len(fleet.runs(one)) for one in (job, retried)] == [1, 2]
    assert fleet.gaps(retried)[0] >= 3


@pytest.mark.parametrize("dies", ["killed", "time limit"])
def test_a_crash_of_a_job_that_another_worker_has_settled_is_not_heard(
    unique: str, tmp_path: Path, dies: str
) -> None:
    """The job's message goes back to the queue, and its next delivery is dropped; no failure is shown."""
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db")

    def settle_elsewhere(*_: Any) -> float:
        take_over(bridge.store, job)
        later = datetime.now(timezone.utc) + timedelta(days=1)
        bridge.store.reservations.settle(Settle(Reservation(job, 0), "a worker that is gone", later))
        return 600.0

    policy = {"max_attempts": 5, "backoff_strategy": settle_elsewhere, "max_interval": "PT1H"}
    hand = by_hand(lambda app: install(app, bridge, policies={"plain": policy}), unique)
    job = hand.send("plain", "ok", headers={"dies": dies})
    hand.deliver()
    assert [note[0] for note in hand.notes] == ["delivered", "requeue"]
    hand.deliver_all()
    assert [note[0] for note in hand.notes] == ["delivered", "requeue", "delivered", "ack"]
    assert (hand.runs(job), bridge.retries.count()) == ([], 0)
    assert hand.state(job)[0] != "FAILURE"


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize("kind", ["RuntimeError", "OddStoreError"])
def test_a_crash_that_cannot_be_judged_is_judged_later(
    separate: Callable[..., Fleet], tmp_path: Path, kind: str
) -> None:
    fleet, faults = separate(visibility=5), Faults(tmp_path)
    fleet.start("-c", "2", env=faults.env).await_ready()
    with faults.at("celery.delivery:Delivery.resume", kind):
        job = fleet.send("act_kept", dies(), "again")
    assert fleet.end(job) == "SUCCESS"
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]
    with faults.at("celery.keeping:RequestKeeping.forget", kind):
        assert fleet.send("act", "ok").get(timeout=90) == "ok"
    assert fleet.send("ping").get(timeout=90) == "pong"


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("broker", ["valkey", "rabbitmq"])
def test_a_child_that_is_terminated_counts_once(
    separate: Callable[..., Fleet], broker: str, request: pytest.FixtureRequest
) -> None:
    fleet = separate(broker=request.getfixturevalue(broker).url, visibility=5)
    fleet.start("-c", "1")
    job = fleet.send("act", sleeps(60), raises(OSError), ojs_retry={"max_attempts": 2})
    eventually(lambda: fleet.runs(job), seconds=40, what="a run")
    os.kill(fleet.runs(job)[0].more["pid"], signal.SIGTERM)
    assert fleet.end(job) == "FAILURE"
    assert [run.attempt for run in fleet.runs(job)] == [1, 2]
