"""Sentry's own integrations report the errors of jobs, nothing twice; the bridge adds facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ojs_bridge import Discard, Retry, Snooze
from tests.contract.fleet import Fleet, end
from tests.contract.notes import Noting
from tests.contract.steps import an, raises, returns


def reported(fleet: Fleet, job: str) -> list[dict[str, Any]]:
    """Return the events of a job that Sentry was sent."""
    return Noting(fleet.settings.backend).read("sentry", job)


def facts(event: dict[str, Any]) -> dict[str, str]:
    """Return the tags of the bridge."""
    return {name[4:]: value for name, value in event["tags"].items() if name.startswith("ojs.")}


@pytest.fixture(params=["celery-valkey", "dramatiq-valkey"])
def fleet(request: pytest.FixtureRequest, made: Callable[..., Fleet]) -> Fleet:
    """A fleet whose workers report to Sentry."""
    fleet = made(request.param, instruments=("sentry",))
    fleet.start().await_ready()
    return fleet


def test_a_retry_reports_as_natively_and_the_end_once(fleet: Fleet) -> None:
    """Celery's integration reports no retry, and Dramatiq's each failure."""
    job = fleet.send("act_kept", raises(TimeoutError, "slow"))
    end(fleet, job)
    asked = fleet.send("act", raises(Retry, "a.b", after="PT0.05S"), raises(Snooze, "PT0.05S"), "ok")
    end(fleet, asked)
    last = fleet.send("act", raises(Discard, "payment.declined", "no"))
    end(fleet, last)
    fleet.worker.stop()
    events = reported(fleet, job)
    retried = [event for event in events if facts(event)["ended"] == "false"]
    assert len(retried) == (1 if fleet.framework == "dramatiq" else 0)
    (died,) = [event for event in events if facts(event)["ended"] == "true"]
    assert facts(died) == {
        "job_id": job, "job_type": "act_kept", "queue": fleet.queue, "attempt": "2",
        "error_type": "external.timeout", "ended": "true",
        "group": fleet.bridge.dead_letters.get(job).group,
    }  # fmt: skip
    assert died["exception"]["values"][-1]["type"] == "TimeoutError"
    assert died["fingerprint"] == [fleet.bridge.dead_letters.get(job).group]
    assert reported(fleet, asked) == []
    assert len(reported(fleet, last)) == 1
    others = [event.get("logentry", {}).get("message", "") for event in reported(fleet, fleet.queue)]
    assert [text for text in others if not text.startswith("listener ")] == []


@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_snooze_is_no_error_for_a_sentry_that_knows_nothing_of_the_bridge(
    made: Callable[..., Fleet], kind: str
) -> None:
    """Nor is it one in the worker's log."""
    fleet = made(kind, instruments=("sentry_alone",))
    fleet.start().await_ready()
    end(fleet, fleet.send("act", raises(Snooze, "PT0.05S"), returns(an(Snooze, "PT0.05S")), "ok"))
    fleet.worker.stop()
    texts = [event.get("logentry", {}).get("message", "raised") for event in reported(fleet, fleet.queue)]
    assert [text for text in texts if not text.startswith("listener ")] == []
    assert "Failed to process message" not in fleet.worker.log
