"""In every pool, with early and late acknowledgement, jobs end alike and leave nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ojs_bridge import DeadLetter, Discard, Snooze
from tests.contract.steps import Step, an, raises, retries
from tests.on_celery.fleet import Fleet, in_seconds
from tests.on_celery.project import Odd
from tests.servers import eventually

KINDS = [
    ("on_valkey", "prefork", True),
    ("on_valkey", "prefork", False),
    ("on_valkey", "threads", True),
    ("on_valkey", "threads", False),
    ("on_valkey", "solo", True),
    ("on_valkey", "gevent", True),
    ("on_rabbitmq", "prefork", True),
    ("on_rabbitmq", "threads", True),
    ("on_rabbitmq", "gevent", False),
]


@pytest.fixture(
    scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}-{'late' if kind[2] else 'early'}"
)
def fleet(request: pytest.FixtureRequest) -> Fleet:
    broker, pool, acks_late = request.param
    return request.getfixturevalue(broker)(pool, acks_late)


#: task and steps -> runs, state, the type of the last error
CASES: dict[str, tuple[str, list[Step], int, str, str | None]] = {
    "succeeds": ("act", ["ok"], 1, "SUCCESS", None),
    "recovers": ("act", [raises(OSError), raises(OSError), "ok"], 3, "SUCCESS", None),
    "fails": ("act", [raises(OSError)], 3, "FAILURE", "builtins.OSError"),
    "snoozes": ("act", [raises(Snooze, "PT0.1S"), raises(Snooze, "PT0.1S"), "ok"], 3, "SUCCESS", None),
    "discards": ("act", [raises(Discard, "a.b")], 1, "FAILURE", "a.b"),
    "dead": ("act", [raises(DeadLetter, "a.b")], 1, "FAILURE", "a.b"),
    "MemoryError": ("act", [raises(MemoryError, "mm")], 3, "FAILURE", "builtins.MemoryError"),
    "KeyboardInterrupt": ("act", [raises(KeyboardInterrupt)], 3, "FAILURE", "builtins.KeyboardInterrupt"),
    "GeneratorExit": ("act", [raises(GeneratorExit)], 3, "FAILURE", "builtins.GeneratorExit"),
    "a BaseException": ("act", [raises(Odd, "odd")], 3, "FAILURE", "tests.on_celery.project.Odd"),
    "self.retry": (
        "act",
        [retries(countdown=0.1), retries(exc=an(OSError)), "ok"],
        3,
        "SUCCESS",
        None,
    ),
    "handlers": ("handled", [raises(OSError), raises(OSError), "ok"], 3, "SUCCESS", None),
    "its own __call__": ("in_context", [raises(OSError), "ok"], 2, "SUCCESS", None),
    "native": ("native.plain", [raises(OSError)], 3, "FAILURE", "builtins.OSError"),
}


@pytest.mark.requirement("RET-01", "RET-08", "RET-11")
def test_every_pool_ends_jobs_alike(fleet: Fleet) -> None:
    sent = {name: fleet.send(task, *steps) for name, (task, steps, *_) in CASES.items()}
    for name, (_, _, runs, state, error_type) in CASES.items():
        job = sent[name]
        assert fleet.end(job) == state, name
        ending = fleet.ending(job)
        assert len(fleet.runs(job)) == runs, name
        assert ending.get("last_error", {}).get("type") == error_type, name
        for run in fleet.runs(job)[1:]:
            # A task with its own `__call__` does not see its state: Celery would take it for a header.
            due = fleet.due(run) if run.ojs else fleet.retry_due(job)
            assert run.at >= due, name
    assert [call[0] for call in fleet.calls(sent["its own __call__"])] == ["enter", "leave"] * 2
    assert fleet.bridge.dead_letters.get(sent["dead"].id).attempt == 1
    try:
        eventually(lambda: held_by(fleet) == [], seconds=60, what="a worker that holds nothing")
    except TimeoutError as error:
        raise AssertionError(
            f"{error}: it holds {held_by(fleet)}\n{fleet.worker.say_where_it_stands()}"
        ) from None


def held_by(fleet: Fleet) -> list[Any]:
    """The jobs that the worker still counts as active, reserved or scheduled."""
    inspect = fleet.app.control.inspect([fleet.node], timeout=5.0)
    answers = [inspect.active(), inspect.reserved(), inspect.scheduled()]
    return [
        job for answer in answers for held in (answer or {"nobody": ["no answer"]}).values() for job in held
    ]


@pytest.mark.requirement("RET-01")
def test_sys_exit_is_a_failure(fleet: Fleet) -> None:
    job = fleet.send("act", raises(SystemExit, 3))
    assert fleet.end(job) == "FAILURE"
    assert len(fleet.runs(job)) == 3
    assert fleet.ending(job)["total_attempts"] == 3


@pytest.mark.requirement("RET-11")
def test_an_early_delivery_waits(fleet: Fleet) -> None:
    state = {"v": 1, "attempt": 1, "next_retry_at": in_seconds(1)}
    job = fleet.send("act", "ok", headers={"ojs": json.dumps(state)})
    assert fleet.end(job) == "SUCCESS"
    (run,) = fleet.runs(job)
    assert run.at >= fleet.due(run)
