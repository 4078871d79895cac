"""A job that still runs is not started again, however long it takes; one that has ended is not run again."""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import pytest

from ojs_bridge import DeadLetter, Retry, Snooze
from tests.contract.conftest import FLEETS, SERVED
from tests.contract.fleet import Fleet, attempts, await_runs, end
from tests.contract.notes import UNACKNOWLEDGED
from tests.contract.steps import Step, raises, sends_again, sleeps
from tests.servers import eventually

#: Seconds of the broker's visibility timeout and of the reservation, and of a job that takes far longer.
SHORT, LONG = 6, 13


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("kind", ["celery-valkey", "dramatiq-valkey"])
def test_a_copy_of_a_running_job_waits_and_is_dropped(made: Callable[..., Fleet], kind: str) -> None:
    fleet = made(kind, reservation=f"PT{SHORT}S", visibility=SHORT)
    fleet.start(2).await_ready()
    job = fleet.send("act", sleeps(LONG, "ran"))
    await_runs(fleet, job)
    fleet.give_out_again()
    assert end(fleet, job).type == "job.completed"
    eventually(lambda: fleet.left() == 0, seconds=40, what="the end of the copy")
    assert len(fleet.runs(job)) == 1
    assert fleet.types(job) == ["job.started", "job.completed"]


#: What a first run does, the event after which its worker is killed, and the attempts there are in the end.
OUTCOMES: dict[str, tuple[Step, str, list[int]]] = {
    "succeeds": ("ran", "job.completed", [1]),
    "is buried": (raises(DeadLetter, "a", "b"), "dead_letter.added", [1]),
    "fails": (raises(OSError), "job.retrying", [1, 2, 3]),
}


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("kind", SERVED)
def test_what_was_settled_but_not_acknowledged_does_not_run_again(
    made: Callable[..., Fleet], kind: str
) -> None:
    fleet = made(kind, reservation=f"PT{SHORT}S", visibility=SHORT)
    fleet.start(4, **{UNACKNOWLEDGED: "1"}).await_ready()
    policy = {"initial_interval": "PT5S", "max_attempts": 3}
    jobs = {
        name: fleet.send("act_kept", step, raises(OSError), policy=policy)
        for name, (step, *_) in OUTCOMES.items()
    }
    for name, (_, event, _) in OUTCOMES.items():
        eventually(lambda job=jobs[name], event=event: event in fleet.types(job), what=event)
    time.sleep(0.5)  # a retry is told of when it is published, and settled then
    fleet.replace(4)
    assert end(fleet, jobs["fails"]).type == "job.discarded"
    eventually(lambda: fleet.left() == 0, seconds=40, what="the end of the copies")
    time.sleep(SHORT)  # for what must not happen: a further run
    for name, (*_, expected) in OUTCOMES.items():
        assert attempts(fleet, jobs[name]) == expected, name
    assert len(fleet.bridge.dead_letters.get(jobs["fails"]).errors) == 3


#: How a job comes to the run that sends it again, and the attempts that there are in the end.
SENT_AGAIN: dict[str, tuple[tuple[Step, ...], list[int]]] = {
    "at once": ((sends_again("sent"), "ok"), [1, 1]),
    "retried": ((raises(OSError), sends_again("sent"), "ok"), [1, 2, 2]),
    "retried, and fails": ((raises(OSError), sends_again(raises(OSError)), "ok"), [1, 2, 2, 3]),
    "retried twice": ((raises(OSError), raises(OSError), sends_again("sent"), "ok"), [1, 2, 3, 3]),
    "snoozed": ((raises(Snooze, "PT0.1S"), sends_again("sent"), "ok"), [1, 1, 1]),
    "parked": ((raises(Retry, "a", "b", after="PT2S"), sends_again("sent"), "ok"), [1, 2, 2]),
    "sent twice": ((raises(OSError), sends_again(sends_again("sent")), "ok"), [1, 2, 2, 2]),
    "sent by what was sent": ((raises(OSError), sends_again("a"), sends_again("b"), "ok"), [1, 2, 2, 2]),
    "replayed": ((raises(DeadLetter, "a", "b"), sends_again("sent"), "ok"), [1, 1, 1]),
}


@pytest.mark.requirement("RET-13")
@pytest.mark.parametrize("kind", FLEETS)
def test_a_job_that_its_own_code_sends_again_is_a_job_of_its_own(
    made: Callable[..., Fleet], kind: str
) -> None:
    fleet = made(kind, park_after="PT1S")
    fleet.start(4).await_ready()
    jobs = {way: fleet.send("act", *steps) for way, (steps, _) in SENT_AGAIN.items()}
    end(fleet, jobs["replayed"])
    fleet.bridge.dead_letters.replay(jobs["replayed"])
    for way, (steps, expected) in SENT_AGAIN.items():
        job = jobs[way]
        ends = 1 + json.dumps(steps).count("sends_again")
        eventually(lambda job=job, ends=ends: fleet.types(job).count("job.completed") == ends, what=way)
        assert sorted(attempts(fleet, job)) == expected, way
    eventually(lambda: fleet.left() == 0, what="an empty queue")


@pytest.mark.requirement("DLQ-001")
@pytest.mark.parametrize("kind", FLEETS)
def test_two_jobs_under_one_id_have_two_letters(made: Callable[..., Fleet], kind: str) -> None:
    """Each is found, deleted and replayed by itself, and comes back as the job that it is."""
    fleet = made(kind)
    fleet.start(4).await_ready()
    dies = (
        sends_again(raises(DeadLetter, "a", "first")),
        raises(DeadLetter, "a", "second"),
        raises(DeadLetter, "a", "third"),
    )
    job = fleet.send("act", *dies, "ok")
    letters = fleet.bridge.dead_letters
    eventually(lambda: fleet.types(job).count("dead_letter.added") == 2, what="two deaths")
    first, second = sorted(letters.list().letters, key=lambda letter: letter.id)
    assert (first.id, second.job_id, second.id[: len(job) + 1]) == (job, job, f"{job}~")
    assert {letter.errors[-1]["message"] for letter in (first, second)} == {"first", "second"}
    assert letters.replay(second.id).id == job
    eventually(lambda: fleet.types(job).count("dead_letter.added") == 3, what="its next death")
    again = letters.get(second.id)
    assert ([entry["message"] for entry in again.errors], letters.get(job)) == (["second", "third"], first)
    letters.delete(first.id)
    assert letters.get(job).id == second.id, "the only letter of a job is found by the job's id"
    letters.replay(job)
    eventually(lambda: fleet.types(job).count("job.completed") == 1, what="its success")
    assert (len(fleet.runs(job)), letters.list().letters) == (4, ())
