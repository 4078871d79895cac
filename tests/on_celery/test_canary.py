"""A canary on Celery: a job outside it runs as without the bridge, and one inside it under the bridge."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import Ignore, Reject

from tests.contract.steps import OPAQUE, Step, an, calls_itself, is_replaced_by, raises, retries, returns
from tests.on_celery.by_hand import ByHand, by_hand, natively, outside

#: task, steps, options
SCENARIOS: dict[str, tuple[str, list[Step], dict[str, Any]]] = {
    "success": ("plain", ["ok"], {}),
    "failure": ("plain", [raises(OSError, "down")], {}),
    "self.retry": ("plain", [retries(countdown=5), retries(), "ok"], {}),
    "self.retry, exhausted": ("plain", [retries(max_retries=2)], {}),
    "self.retry(exc=), exhausted": ("plain", [retries(exc=an(KeyError, "k"))], {}),
    "self.retry(throw=False)": ("plain", [retries(throw=False, then=1), 2], {}),
    "self.retry with other arguments": ("plain", [retries(args=["a", "b"])], {}),
    "a result that cannot be encoded": ("plain", [returns(OPAQUE)], {}),
    "autoretry": ("auto", [raises(OSError), "ok"], {}),
    "autoretry, exhausted": ("auto", [raises(OSError)], {}),
    "autoretry does not name it": ("auto", [raises(KeyError)], {}),
    "dont_autoretry_for": ("auto", [raises(FileNotFoundError)], {}),
    "autoretry and self.retry": ("auto", [retries(countdown=9), raises(OSError), "ok"], {}),
    "autoretry backs off": ("backoff", [raises(OSError)], {}),
    "retry_kwargs": ("kwargs", [raises(KeyError)], {}),
    "autoretry takes Reject for an error": ("kwargs", [raises(Reject, "no", requeue=False)], {}),
    "throws": ("throws", [raises(KeyError)], {}),
    "Ignore": ("plain", [raises(Ignore)], {}),
    "Reject": ("plain", [raises(Reject, "no", requeue=False)], {}),
    "Reject, requeued": ("plain", [raises(Reject, "later", requeue=True), "ok"], {}),
    "acknowledged early": ("early", [raises(OSError)], {}),
    "acknowledged early, and a killed child": ("early", ["ok"], {"headers": {"dies": "killed"}}),
    "calls itself, and retries": ("plain", [calls_itself(retries(countdown=1)), "ok"], {}),
    "called": ("called", [retries(), calls_itself("nested")], {}),
    "handled": ("handled", [retries(countdown=1), raises(OSError)], {}),
    "a killed child": ("plain", ["ok"], {"headers": {"dies": "killed"}}),
    "a time limit": ("plain", ["ok"], {"headers": {"dies": "time limit"}}),
    "acks_on_failure_or_timeout": ("dropped", [raises(OSError)], {}),
    "retry_on_worker_lost": ("retried", ["ok"], {"headers": {"dies": "killed"}}),
    "a priority and an expiry": ("auto", [raises(OSError), "ok"], {"priority": 3, "expires": 900}),
    "headers": ("auto", [raises(OSError), retries(headers={"new": 1}), 3], {"headers": {"own": "h"}}),
}  # fmt: skip


def seen(hand: ByHand) -> list[tuple[Any, ...]]:
    """The notes of all jobs, with a number in place of each job's id."""
    ids: dict[str, int] = {}
    return [(kind, ids.setdefault(job, len(ids)), *rest) for kind, job, *rest in hand.notes]


def both(unique: str) -> tuple[ByHand, ByHand]:
    return by_hand(natively, unique), by_hand(outside, unique)


@pytest.mark.parametrize("name", SCENARIOS)
def test_outside_the_canary_a_job_runs_as_without_the_bridge(unique: str, name: str) -> None:
    """The same runs, counters, headers, delays, handlers, acknowledgements, state and result."""
    task, steps, options = SCENARIOS[name]
    native, canary = both(unique)
    jobs = []
    for hand in (native, canary):
        jobs.append(hand.send(task, *steps, **options))
        hand.deliver_all()
    assert seen(canary) == seen(native)
    assert len(seen(native)) > 1
    assert canary.state(jobs[1]) == native.state(jobs[0])


@pytest.mark.parametrize(("task", "dies"), [("requeued", "killed"), ("kept", "time limit")])
def test_outside_the_canary_a_dead_childs_job_is_requeued_as_ever(unique: str, task: str, dies: str) -> None:
    """The task's own options and Celery requeue the job without end; the bridge would not allow that."""
    native, canary = both(unique)
    delivered = []
    for hand in (native, canary):
        hand.send(task, "ok", headers={"dies": dies})
        delivered.append([hand.deliver() for _ in range(3)])
    assert delivered[1] == delivered[0]
    assert seen(canary) == seen(native)
    assert seen(native)


def canvases(hand: ByHand) -> list[Any]:
    """Each kind of canvas, of jobs that are retried."""
    plain, auto = hand.app.tasks["plain"], hand.app.tasks["auto"]
    flaky, failing = auto.si(raises(OSError), "ok"), auto.si(raises(OSError))
    body = hand.app.tasks["collect"].s()
    replacing = plain.si(is_replaced_by("auto", raises(OSError), "replaced"))
    return [
        chain(flaky, plain.si(retries(countdown=2), "end"), app=hand.app),
        chain(failing, plain.si("never"), app=hand.app),
        chord([flaky, plain.si("b"), plain.si(retries(), "c")], body, app=hand.app),
        chord([failing, plain.si("b")], body, app=hand.app),
        group([flaky, failing], app=hand.app),
        chain(replacing, body, app=hand.app),
        flaky.on_error(hand.app.tasks["collect"].si("errback")),
        failing.on_error(hand.app.tasks["collect"].si("errback")),
    ]


@pytest.mark.parametrize("number", range(8))
def test_outside_the_canary_a_canvas_runs_as_without_the_bridge(unique: str, number: int) -> None:
    """Chains, chords, groups, replacements and errbacks."""
    native, canary = both(unique)
    ended = []
    for hand in (native, canary):
        sent = canvases(hand)[number].apply_async()
        hand.deliver_all()
        results = sent.results if hasattr(sent, "results") else [sent]
        ended.append([(result.state, repr(result.result).replace(result.id, "")) for result in results])
    assert seen(canary) == seen(native)
    assert len(seen(native)) > 3
    assert ended[1] == ended[0]


@pytest.mark.parametrize("way", ["apply", "always", "propagates"])
@pytest.mark.parametrize(
    "name", ["self.retry", "self.retry, exhausted", "autoretry", "autoretry, exhausted", "Ignore"]
)
def test_outside_the_canary_an_eager_task_is_celerys(unique: str, way: str, name: str) -> None:
    """The outcome is the same where Celery raises its Retry to the caller."""
    task, steps, _ = SCENARIOS[name]
    outcomes = []
    for hand in both(unique):
        hand.app.conf.task_always_eager = way == "always"
        hand.app.conf.task_eager_propagates = way == "propagates"
        run = hand.app.tasks[task].apply_async if way == "always" else hand.app.tasks[task].apply
        try:
            result = run(steps)
            outcomes.append((result.state, type(result.result), seen(hand)))
        except Exception as error:
            outcomes.append(("raised", type(error), seen(hand)))
    assert outcomes[1] == outcomes[0]
    assert outcomes[0][2]
