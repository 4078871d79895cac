"""A canary on Celery: a job outside it runs as without the bridge, and one inside it under the bridge."""

from __future__ import annotations

from typing import Any

import pytest
from celery import chain, chord, group

from tests.on_celery.by_hand import ByHand, by_hand, natively, outside

#: task, steps, options
SCENARIOS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    "success": ("plain", ["'ok'"], {}),
    "failure": ("plain", ["OSError('down')"], {}),
    "self.retry": ("plain", ["self.retry(countdown=5)", "self.retry()", "'ok'"], {}),
    "self.retry, exhausted": ("plain", ["self.retry(max_retries=2)"], {}),
    "self.retry(exc=), exhausted": ("plain", ["self.retry(exc=KeyError('k'))"], {}),
    "self.retry(throw=False)": ("plain", ["(self.retry(throw=False), 1)[1]", "2"], {}),
    "self.retry with other arguments": ("plain", ["self.retry(args=(\"'a'\", \"'b'\"))"], {}),
    "a result that cannot be encoded": ("plain", ["object()"], {}),
    "autoretry": ("auto", ["OSError()", "'ok'"], {}),
    "autoretry, exhausted": ("auto", ["OSError()"], {}),
    "autoretry does not name it": ("auto", ["KeyError()"], {}),
    "dont_autoretry_for": ("auto", ["FileNotFoundError()"], {}),
    "autoretry and self.retry": ("auto", ["self.retry(countdown=9)", "OSError()", "'ok'"], {}),
    "autoretry backs off": ("backoff", ["OSError()"], {}),
    "retry_kwargs": ("kwargs", ["KeyError()"], {}),
    "autoretry takes Reject for an error": ("kwargs", ["Reject('no', requeue=False)"], {}),
    "throws": ("throws", ["KeyError()"], {}),
    "Ignore": ("plain", ["Ignore()"], {}),
    "Reject": ("plain", ["Reject('no', requeue=False)"], {}),
    "Reject, requeued": ("plain", ["Reject('later', requeue=True)", "'ok'"], {}),
    "acknowledged early": ("early", ["OSError()"], {}),
    "calls itself, and retries": ("plain", ["self('self.retry(countdown=1)')", "'ok'"], {}),
    "called": ("called", ["self.retry()", "self(\"'nested'\")"], {}),
    "handled": ("handled", ["self.retry(countdown=1)", "OSError()"], {}),
    "a killed child": ("plain", ["'ok'"], {"headers": {"dies": "killed"}}),
    "a time limit": ("plain", ["'ok'"], {"headers": {"dies": "time limit"}}),
    "acks_on_failure_or_timeout": ("dropped", ["OSError()"], {}),
    "retry_on_worker_lost": ("retried", ["'ok'"], {"headers": {"dies": "killed"}}),
    "a priority and an expiry": ("auto", ["OSError()", "'ok'"], {"priority": 3, "expires": 900}),
    "headers": ("auto", ["OSError()", "self.retry(headers={'new': 1})", "3"], {"headers": {"own": "h"}}),
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
        hand.send(task, "'ok'", headers={"dies": dies})
        delivered.append([hand.deliver() for _ in range(3)])
    assert delivered[1] == delivered[0]
    assert seen(canary) == seen(native)
    assert seen(native)


def canvases(hand: ByHand) -> list[Any]:
    """Each kind of canvas, of jobs that are retried."""
    plain, auto = hand.app.tasks["plain"], hand.app.tasks["auto"]
    flaky, failing = auto.si("OSError()", "'ok'"), auto.si("OSError()")
    body = hand.app.tasks["collect"].s()
    replacing = plain.si("self.replace(self.app.tasks['auto'].si('OSError()', \"'replaced'\"))")
    return [
        chain(flaky, plain.si("self.retry(countdown=2)", "'end'"), app=hand.app),
        chain(failing, plain.si("'never'"), app=hand.app),
        chord([flaky, plain.si("'b'"), plain.si("self.retry()", "'c'")], body, app=hand.app),
        chord([failing, plain.si("'b'")], body, app=hand.app),
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
