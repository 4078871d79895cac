"""Tasks that run here and now: `apply`, and an app that is always eager."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import Celery, chain
from celery.exceptions import Retry as CelerysRetry

from ojs_bridge import Discard, InvalidRetryPolicy, Snooze
from ojs_bridge.celery import install
from tests.contract.steps import Step, raises, retries
from tests.on_celery.by_hand import by_hand, header
from tests.on_celery.fleet import Fleet, in_seconds
from tests.servers import eventually


@pytest.fixture(params=["apply", "always", "propagates"])
def fleet(request: pytest.FixtureRequest, separate) -> Fleet:
    """A fleet without a worker, in each way of being eager."""
    fleet = separate()
    fleet.app.conf.task_always_eager = request.param == "always"
    fleet.app.conf.task_eager_propagates = request.param == "propagates"
    return fleet


def id_of(fleet: Fleet) -> str:
    return f"job-{fleet.settings.queue}"


def run(fleet: Fleet, name: str, *args: Any, **options: Any) -> Any:
    task = fleet.task(name)
    if fleet.app.conf.task_always_eager:
        return task.apply_async(args, **options)
    return task.apply(args, **options)


def outcome(fleet: Fleet, name: str, *args: Any, **options: Any) -> tuple[str, Any]:
    """The state of an ended task, and its result or its error."""
    try:
        result = run(fleet, name, *args, task_id=id_of(fleet), **options)
    except Exception as error:
        assert fleet.app.conf.task_eager_propagates
        return "FAILURE", error
    return result.state, result.result


@pytest.mark.requirement("RET-01", "RET-08", "RET-10")
@pytest.mark.parametrize(
    ("steps", "policy", "runs", "state", "result"),
    [
        (["ok"], {}, 1, "SUCCESS", "ok"),
        ([raises(OSError, "a"), raises(OSError, "b"), "ok"], {}, 3, "SUCCESS", "ok"),
        ([raises(OSError, "a")], {}, 3, "FAILURE", "OSError"),
        ([raises(OSError, "a")], {"max_attempts": 5}, 5, "FAILURE", "OSError"),
        ([raises(Discard, "a.b")], {}, 1, "FAILURE", "Discard"),
        ([raises(Snooze, "PT1H")] * 2 + [raises(OSError), "ok"], {"max_attempts": 2}, 4, "SUCCESS", "ok"),
        ([retries(countdown=60), "ok"], {}, 2, "SUCCESS", "ok"),
        ([retries(args=["other"]), "ok"], {}, 2, "SUCCESS", "other"),
        ([retries()], {}, 3, "FAILURE", "MaxRetriesExceededError"),
        ([raises(KeyboardInterrupt)], {}, 3, "FAILURE", "HandlerFailed"),
    ],
)  # fmt: skip
def test_retries_run_at_once(
    fleet: Fleet, steps: list[Step], policy: dict[str, Any], runs: int, state: str, result: str
) -> None:
    began = time.monotonic()
    ended, value = outcome(fleet, "act", *steps, ojs_retry={"initial_interval": "PT1M", **policy})
    assert time.monotonic() - began < 30
    assert ended == state
    assert (value if state == "SUCCESS" else type(value).__name__) == result
    assert len(fleet.runs(fleet.app.AsyncResult(id_of(fleet)))) == runs


def test_many_retries_are_run_one_after_the_other(fleet: Fleet) -> None:
    policy = {"max_attempts": 200}
    assert outcome(fleet, "act", raises(OSError, "a"), ojs_retry=policy)[0] == "FAILURE"
    assert len(fleet.runs(fleet.app.AsyncResult(id_of(fleet)))) == 200


def test_a_task_that_only_snoozes_is_an_error(fleet: Fleet) -> None:
    with pytest.raises(RuntimeError, match="task act: more than 100 eager snoozes in a row"):
        run(fleet, "act", raises(Snooze, "PT1S"))


@pytest.mark.requirement("RET-17")
def test_a_dead_letter_is_kept(fleet: Fleet) -> None:
    outcome(fleet, "act_kept", raises(OSError, "down"))
    letter = fleet.bridge.dead_letters.get(id_of(fleet))
    assert (letter.attempt, [error["message"] for error in letter.errors]) == (2, ["down", "down"])


def test_arguments_that_no_message_could_carry(fleet: Fleet) -> None:
    if fleet.app.conf.task_always_eager:
        pytest.skip("Celery itself encodes the arguments of an app that is always eager")
    assert outcome(fleet, "act", "ok", object())[0] == "SUCCESS"
    assert outcome(fleet, "act_kept", *[raises(OSError)] * 3, object())[0] == "FAILURE"
    assert "object object at" in fleet.bridge.dead_letters.get(id_of(fleet)).message["body"]


def test_links_and_chains(fleet: Fleet) -> None:
    if fleet.app.conf.task_always_eager:
        act, collect = fleet.task("act"), fleet.task("collect")
        assert chain(act.si(raises(OSError), "ok"), collect.s("end")).delay().get() == ["ok", "end"]
    outcome(fleet, "act", raises(OSError), "ok", link=fleet.task("act").si("linked").set(task_id="linked"))
    assert outcome(fleet, "act", raises(OSError), link_error=fleet.task("errback").s())[0] == "FAILURE"


def test_an_invalid_policy_raises(fleet: Fleet) -> None:
    with pytest.raises(InvalidRetryPolicy):
        run(fleet, "act", "ok", ojs_retry={"max_attempts": -1})


def test_events_are_told(fleet: Fleet) -> None:
    outcome(fleet, "act", raises(OSError), "ok")
    job = fleet.app.AsyncResult(id_of(fleet))
    eventually(lambda: len(fleet.events(job)) >= 5, what="the events")
    types = [event["type"].removeprefix("job.") for event in fleet.events(job)]
    assert types == ["started", "failed", "retrying", "started", "completed"]


def test_a_direct_call_is_a_call(separate) -> None:
    fleet = separate()
    act = fleet.task("act")
    with pytest.raises(OSError, match="down"):
        act(raises(OSError, "down"))
    with pytest.raises(CelerysRetry):
        act(retries())
    assert fleet.task("in_context")("ok") == "ok"
    assert fleet.task("typed")(2, word="ab") == "abab"


@pytest.mark.parametrize("is_lazy", [True, False], ids=["made later", "made before"])
def test_a_task_from_before_install_runs_under_its_policy_at_once(is_lazy: bool) -> None:
    """Celery makes a task when it is used first, and finalizes its app later still."""
    app = Celery("early", broker="memory://", set_as_current=False)
    ran: list[int] = []

    def charge() -> None:
        ran.append(1)
        raise OSError("down")

    task = app.task(name="charge", shared=False, lazy=is_lazy)(charge)
    install(app, policies={"charge": {"max_attempts": 2}})
    task.apply()
    assert len(ran) == 2
    assert not app.finalized


def test_an_eager_job_that_comes_before_its_time_is_sent_nowhere(unique: str) -> None:
    """It has no message: what it was applied with says when it is due."""
    hand = by_hand(install, unique)
    ojs = header(attempt=2, next_retry_at=in_seconds(600))
    result = hand.app.tasks["plain"].apply((["ok"],), headers={"ojs": ojs}, retries=1)
    assert result.state == "IGNORED"
    assert not hand.deliver()
