"""The contract's semantics where Celery adds something: expiries, states of results, odd tasks."""

from __future__ import annotations

import json
from importlib.metadata import version

import pytest

from ojs_bridge import Discard, LetterNotFound
from tests.contract.steps import OPAQUE, an, raises, retries
from tests.forking import code, run
from tests.on_celery.fleet import Fleet
from tests.on_celery.project import Unpicklable
from tests.servers import eventually


@pytest.mark.requirement("RET-01")
def test_what_only_a_celery_task_can_be(fleet: Fleet) -> None:
    unpicklable = fleet.send("act", raises(Unpicklable, "x"), ojs_retry={"max_attempts": 2})
    class_based = fleet.send("own")
    for job, error_type in ((unpicklable, "tests.on_celery.project.Unpicklable"), (class_based, "disk.full")):
        assert fleet.end(job) == "FAILURE"
        ending = fleet.ending(job)
        assert (ending["last_error"]["type"], ending["cause"]) == (error_type, "exhausted")
        assert (len(fleet.runs(job)), ending["dead_lettered"]) == (2, False)


REPLAY = """
import sys
from tests.contract.notes import Settings
from tests.on_celery.project import make_app
from ojs_bridge.celery.installation import attach
app = make_app(Settings.from_env())
assert attach(app).dead_letters.replay(sys.argv[1]).replay_count == 1
"""


@pytest.mark.requirement("DLQ-003")
def test_a_replay_from_elsewhere_keeps_an_expiry_that_is_to_come(fleet: Fleet) -> None:
    job = fleet.send("act_kept", raises(OSError, "one"), raises(OSError, "two"), "ok", expires=300)
    assert fleet.end(job) == "FAILURE"
    assert fleet.bridge.dead_letters.get(job.id).message["headers"]["expires"]
    run(code, REPLAY, job.id, env=fleet.settings.to_env())
    fleet.ending(job, nth=2)
    eventually(lambda: fleet.app.AsyncResult(job.id).state == "SUCCESS", seconds=20)
    with pytest.raises(LetterNotFound):
        fleet.bridge.dead_letters.get(job.id)
    runs = fleet.runs(job)
    assert runs[2].more["expires"] == runs[0].more["expires"]


def test_a_retry_is_not_stored_after_its_run_has_ended(fleet: Fleet) -> None:
    job = fleet.send("handled", raises(OSError, "first"), raises(Discard, "a.b"), headers={"linger": 10})
    assert fleet.end(job) == "FAILURE"
    assert fleet.calls(job, "on_retry") == []
    eventually(lambda: fleet.calls(job, "on_retry"), what="the end of the first run")
    assert fleet.app.AsyncResult(job.id).state == "FAILURE"


@pytest.mark.requirement("RET-01")
def test_a_message_that_cannot_be_encoded_becomes_a_dead_letter(fleet: Fleet) -> None:
    job = fleet.send("act_kept", retries(args=[OPAQUE], exc=an(OSError, "odd")))
    assert fleet.ending(job)["dead_lettered"]
    if version("celery") >= "5.7":
        # Celery rejects its message, and an earlier one stores no state then.
        assert fleet.end(job) == "FAILURE"
    letter = fleet.bridge.dead_letters.get(job.id)
    assert (letter.cause, letter.attempt, len(letter.errors)) == ("invalid", 1, 1)
    assert len(fleet.runs(job)) == 1
    assert json.dumps(dict(letter.message))
