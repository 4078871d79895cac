"""Dramatiq's own rate limits: with the standard errors a job without a slot snoozes, and uses no attempt."""

from __future__ import annotations

import threading
import time
from typing import Any

import dramatiq
import pytest
from dramatiq.errors import RateLimitExceeded
from dramatiq.rate_limits import ConcurrentRateLimiter
from dramatiq.rate_limits.backends import StubBackend

from ojs_bridge import standard_errors
from tests.on_dramatiq.fleet import QUICK, Fleet

ONCE = {**QUICK, "max_attempts": 1}


@pytest.fixture
def fleet(broker: dramatiq.Broker, unique: str) -> Fleet:
    return Fleet(broker, unique, retry=ONCE, errors=standard_errors())


def test_all_jobs_have_their_slot_in_the_end(fleet: Fleet) -> None:
    slots, most = ConcurrentRateLimiter(StubBackend(), "bank", limit=2), threading.Semaphore(2)

    def charge(n: int) -> None:
        with slots.acquire():
            assert most.acquire(blocking=False)
            time.sleep(0.1)
            most.release()

    actor = fleet.actor(charge)
    with fleet.working():
        sent = [fleet.send(actor) for _ in range(8)]
        ends = [fleet.end(job) for job in sent]
    assert [end.type for end in ends] == ["job.completed"] * len(sent)
    snoozed = [event for job in sent for event in fleet.heard.events[job.id] if event.type == "job.snoozed"]
    assert snoozed
    assert {run.ojs.get("attempt", 1) for job in sent for run in job.runs} == {1}
    assert all(gap >= 0.05 for job in sent for gap in job.gaps)


def exceeds(n: int) -> None:
    raise RateLimitExceeded("rate limit exceeded for key 'bank'")


# an actor that never has a slot -> why it is not run again
FORBIDDEN: dict[str, dict[str, Any]] = {
    "which the actor's throws option rules out": {"throws": RateLimitExceeded},
    "and the actor's retry_when said no": {"retry_when": lambda n, error: False},
}


@pytest.mark.parametrize("why", FORBIDDEN)
def test_what_the_actor_forbids_is_a_failure(fleet: Fleet, why: str) -> None:
    actor = fleet.actor(exceeds, **FORBIDDEN[why])
    with fleet.working():
        event = fleet.end(sent := fleet.send(actor))
    assert (event.type, event.data["cause"], len(sent.runs)) == ("job.discarded", "non_retryable", 1)
    assert event.data["last_error"]["type"] == "local.rate_limited"
    assert event.data["reason"].endswith(why)


def test_retry_when_may_allow_it(fleet: Fleet) -> None:
    actor = fleet.actor(lambda n: exceeds(n) if n < 4 else None, retry_when=lambda n, error: True)
    with fleet.working():
        event = fleet.end(sent := fleet.send(actor))
    assert (event.type, len(sent.runs)) == ("job.completed", 4)


def test_without_the_standard_errors_it_uses_attempts(broker: dramatiq.Broker, unique: str) -> None:
    fleet = Fleet(broker, unique)
    actor = fleet.actor(exceeds)
    with fleet.working():
        event = fleet.end(sent := fleet.send(actor))
    assert (event.data["cause"], len(sent.runs)) == ("exhausted", QUICK["max_attempts"])
    assert event.data["last_error"]["type"] == "dramatiq.errors.RateLimitExceeded"
