"""A worker that dies has used an attempt (RET-12): real processes, killed by their own jobs."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.results import ResultFailure, Results
from dramatiq.results.backends.stub import StubBackend

from ojs_bridge.store import Reservation
from tests.on_dramatiq.application import Application
from tests.on_dramatiq.conftest import url_of
from tests.on_dramatiq.fleet import QUICK, Fleet
from tests.servers import eventually

RESERVED_SECONDS = 2.0


@pytest.fixture
def application(request: pytest.FixtureRequest, unique: str, tmp_path: Path) -> Application:
    """Mortal workers, soon missed, on the kind of broker that the test names."""
    return Application(
        url_of(request, request.param),
        unique,
        tmp_path,
        "tests.on_dramatiq.mortal",
        reservation=f"PT{RESERVED_SECONDS:g}S",
        heartbeat="1000",
    )


BOTH = pytest.mark.parametrize("application", ["redis", "rabbitmq"], indirect=True)


@pytest.mark.requirement("RET-12")
@BOTH
def test_a_job_that_kills_its_worker_runs_as_often_as_its_policy_allows(application: Application) -> None:
    application.produce('kills.send("poison", 99)')
    with application.supervised(fault="delivered"):
        eventually(application.letters, seconds=60)
        application.produce('kills.send("after", 0)')
        eventually(lambda: application.times("after"), seconds=30)
    (letter,) = application.letters()
    assert [e["type"] for e in letter.errors] == ["visibility_timeout"] * 3
    assert [e["attempt"] for e in letter.errors] == [1, 2, 3]
    starts = application.times("poison")
    assert len(starts) == 3
    # The dead worker's time passes, which began when it got the job, and then the policy's delay.
    delivered = application.times("delivered-poison")
    taken = [max(at for at in delivered if at <= start) for start in starts]
    assert all(
        later - earlier >= RESERVED_SECONDS + 1 for earlier, later in zip(taken, starts[1:], strict=False)
    )


@pytest.mark.requirement("RET-12")
@BOTH
def test_a_worker_killed_between_settling_and_acknowledging_repeats_nothing(
    application: Application,
) -> None:
    application.produce('hopeless_there.send("hopeless")')
    with application.supervised(fault="unacknowledged"):
        eventually(application.letters, seconds=69)
    with application.working():
        application.produce('kills.send("after", 0)')
        eventually(lambda: application.times("after"), seconds=30)
    (letter,) = application.letters()
    assert [e["type"] for e in letter.errors] == ["builtins.OSError"] * 4
    assert len(application.times("hopeless")) == 4


# --- what the rest of the application sees of a lost attempt ---


def lose(fleet: Fleet, message_id: str, *, fence: int = 0, seconds: float = 0.2) -> float:
    """Reserve a job's turn for a worker that is dead already, and return when its time ends."""
    assert fleet.bridge.store is not None
    now = fleet.bridge.engine.now()
    until = now + timedelta(seconds=seconds)
    fleet.bridge.store.reserve(
        Reservation(message_id, fence), publication="", holder="dead", mark="dead", now=now, until=until
    )
    return until.timestamp()


@pytest.mark.requirement("RET-12")
@pytest.mark.parametrize("on_exhaustion", ["discard", "dead_letter"])
def test_an_only_attempt_that_is_lost_ends_as_results_and_callbacks_know_it(
    broker: dramatiq.Broker, unique: str, tmp_path: Path, on_exhaustion: str
) -> None:
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db")
    backend = StubBackend()
    broker.add_middleware(Results(backend=backend))
    told: list[Any] = []
    fleet.declare(lambda message, counts: told.append(counts), "exhausted")
    fleet.declare(lambda message, error: told.append(error["type"]), "failed")
    actor = fleet.actor(
        lambda n: None,
        store_results=True,
        on_failure="failed",
        on_retry_exhausted="exhausted",
        ojs_retry={"max_attempts": 1, "on_exhaustion": on_exhaustion},
    )
    message = actor.message("key")
    lose(fleet, message.message_id)
    broker.enqueue(message)
    with fleet.working():
        with pytest.raises(ResultFailure):
            message.get_result(backend=backend, block=True, timeout=20_000)
        eventually(lambda: len(told) == 2 and fleet.heard.ends(message.message_id))
    assert fleet.runs["key"] == []
    assert {"retries": 0, "max_retries": 0} in told
    assert "LostAttempt" in told
    (event,) = fleet.heard.ends(message.message_id)
    assert event.data["last_error"]["type"] == "visibility_timeout"
    assert event.data["dead_lettered"] is (on_exhaustion == "dead_letter")


def test_a_lost_attempt_is_retried_after_its_reservation_and_the_policy_s_delay(
    broker: dramatiq.Broker, unique: str, tmp_path: Path
) -> None:
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db")
    message = fleet.actor(lambda n: None, ojs_retry={**QUICK, "initial_interval": "PT1S"}).message("key")
    until = lose(fleet, message.message_id, seconds=1)
    broker.enqueue(message)
    with fleet.working():
        eventually(lambda: fleet.heard.ends(message.message_id))
    (run,) = fleet.runs["key"]
    assert run.at >= until + 1
    assert [e["type"] for e in run.ojs["errors"]] == ["visibility_timeout"]
    assert run.ojs["attempt"] == 2


@pytest.mark.requirement("RET-12")
@BOTH
def test_a_pipeline_goes_on_though_its_worker_died_before_it_was_sent_on(application: Application) -> None:
    application.produce('(first.message("one") | second.message()).run()')
    with application.supervised(fault="next"):
        eventually(lambda: application.times("one-next"), seconds=60)
    assert (len(application.times("one")), len(application.times("one-next"))) == (2, 1)
