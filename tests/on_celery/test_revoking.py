"""Celery's `revoke` ends a job that waits in the store, also where no worker is alive to hear it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from celery import Celery, chord

from tests.contract.steps import raises
from tests.on_celery.fleet import Fleet
from tests.servers import eventually

HOURS = 7200


@pytest.fixture(params=["valkey", "rabbitmq"])
def fleet(separate: Callable[..., Fleet], request: pytest.FixtureRequest) -> Fleet:
    """A fleet that parks delays, on each broker; it has no worker yet."""
    return separate(broker=request.getfixturevalue(request.param).url, park_delays=True, park_after="PT1S")


def test_a_delay_that_its_producer_revokes_never_runs(fleet: Fleet) -> None:
    jobs = [fleet.send("act", "ok", countdown=HOURS) for _ in range(3)]
    fleet.app.control.revoke([job.id for job in jobs[1:]])
    jobs[0].revoke()
    assert [job.state for job in jobs] == ["REVOKED"] * 3
    fleet.start("-c", "1").await_ready()
    assert fleet.end(fleet.send("act", "another one")) == "SUCCESS"
    assert [fleet.runs(job) for job in jobs] == [[], [], []]
    assert fleet.bridge.scheduled.count() == 0


def test_a_worker_hears_what_a_program_without_the_bridge_revokes(fleet: Fleet) -> None:
    """A parked retry is ended, too."""
    fleet.start("-c", "1").await_ready()
    far = {"initial_interval": "PT2H", "max_interval": "PT2H"}
    delayed, failed = (
        fleet.send("act", "ok", countdown=HOURS),
        fleet.send("act", raises(OSError), ojs_retry=far),
    )
    eventually(lambda: fleet.bridge.retries.count() == 1, what="a parked retry")
    with Celery(broker=fleet.settings.broker) as other:
        other.conf.broker_transport_options = fleet.app.conf.broker_transport_options
        other.control.revoke([delayed.id, failed.id])
    eventually(lambda: [delayed.state, failed.state] == ["REVOKED"] * 2, what="the end of both jobs")
    counts = fleet.bridge.counts
    eventually(lambda: not any(counts().values()), what="an empty store")


def test_the_chord_of_a_delay_that_is_revoked_fails(fleet: Fleet) -> None:
    fleet.start("-c", "1").await_ready()
    soon, late = fleet.task("act").s("ok"), fleet.task("act").s("ok").set(countdown=HOURS)
    body = chord([soon, late])(fleet.task("act").si("ok"))
    eventually(lambda: body.parent[0].state == "SUCCESS", what="the end of the first job")
    assert fleet.bridge.scheduled.count() == 1
    body.parent[1].revoke()
    eventually(lambda: body.state == "FAILURE", what="the end of the chord")
