"""A lost attempt as results and callbacks see it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.results import ResultFailure, Results
from dramatiq.results.backends.stub import StubBackend

from tests.lives import reserve_and_die
from tests.on_dramatiq.fleet import Fleet
from tests.servers import eventually


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
    reserve_and_die(fleet.bridge, message.message_id, seconds=0.2)
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


def test_the_log_has_one_line_on_an_attempt_that_is_not_run_and_no_traceback(
    broker: dramatiq.Broker, unique: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is another worker's death, or a header, and no fault of this one's code."""
    fleet = Fleet(broker, unique, store=f"sqlite:///{tmp_path}/ojs.db")
    actor = fleet.actor(lambda n: None, ojs_retry={"max_attempts": 1})
    lost, refused = actor.message("lost"), actor.message("refused").copy(options={"ojs": {"v": 99}})
    reserve_and_die(fleet.bridge, lost.message_id, seconds=0.2)
    for message in (lost, refused):
        broker.enqueue(message)
    with fleet.working():
        eventually(lambda: all(fleet.heard.ends(message.message_id) for message in (lost, refused)))
    assert not any(fleet.runs.values())
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []
    for message in (lost, refused):
        errors = [
            r for r in caplog.records if r.levelname == "ERROR" and message.message_id in r.getMessage()
        ]
        assert len(errors) == 1, errors
