"""The plan of a Celery app: what Celery does today in numbers, and the policies that keep it."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import pytest
from celery import Celery, Task
from celery.utils.time import get_exponential_backoff_interval

from ojs_bridge import Bridge, Event, RetryPolicy
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.celery.installation import task_policy
from ojs_bridge.celery.native import options_as_policy
from ojs_bridge.migration.plan import ENDLESS, NOT_KNOWN, NativeRetries, Runs, WaitRange, alike, policy_wait
from ojs_bridge.migration.plan.celery import plans as of_celery
from ojs_bridge.rules.backoff import Intervals
from ojs_bridge.rules.failures import VISIBILITY_TIMEOUT, WORKER_DEATH
from ojs_bridge.rules.policy import LARGEST
from ojs_bridge.testing import explain
from tests.migration.planning import app_with, native, only

AUTO: dict[str, Any] = {"autoretry_for": (OSError,)}
BACKOFF = {**AUTO, "retry_backoff": True}
STEADY = {**BACKOFF, "retry_jitter": False}


def fails() -> None:
    """A task's body."""
    raise OSError("down")


def asks(self: Task) -> None:
    """A task's body that retries by itself, and says when."""
    raise self.retry(exc=OSError("down"), countdown=10)


def asks_shortly(self: Task) -> None:
    """A task's body that has no countdown of its own."""
    raise self.retry(exc=OSError("down"))


def app_of(**options: Any) -> Celery:
    """An app with one task that always fails, under these options."""
    return app_with(fails, **options)


#: options -> runs, the first waits
TODAY: list[tuple[dict[str, Any], Runs, list[float | tuple[float, float, float]]]] = [
    ({}, 1, []),
    ({"max_retries": 5}, 1, []),
    ({"default_retry_delay": 5, "retry_backoff": True}, 1, []),
    (AUTO, 4, [180, 180, 180]),
    ({**AUTO, "max_retries": 0}, 1, []),
    ({**AUTO, "max_retries": -1}, 1, []),
    ({**AUTO, "max_retries": 1.5}, 2, [180]),
    ({**AUTO, "max_retries": None}, ENDLESS, [180] * 20),
    ({**AUTO, "max_retries": 50, "default_retry_delay": 0}, 51, [0] * 20),
    ({**AUTO, "max_retries": 2, "default_retry_delay": 0.5}, 3, [0.5, 0.5]),
    ({**AUTO, "retry_kwargs": {"max_retries": 2, "countdown": 7}}, 3, [7, 7]),
    ({**AUTO, "retry_kwargs": {"max_retries": None}, "max_retries": 1}, 2, [180]),
    ({**AUTO, "retry_kwargs": {"countdown": 0}}, 4, [0, 0, 0]),
    ({**STEADY, "retry_kwargs": {"countdown": 7}}, 4, [1, 2, 4]),
    (STEADY, 4, [1, 2, 4]),
    ({**STEADY, "retry_backoff": 0.5}, 4, [1, 2, 4]),
    ({**STEADY, "retry_backoff": 2.9}, 4, [2, 4, 8]),
    ({**STEADY, "retry_backoff": 100, "retry_backoff_max": 150}, 4, [100, 150, 150]),
    ({**STEADY, "retry_backoff": 100, "retry_backoff_max": 30}, 4, [30, 30, 30]),
    ({**STEADY, "retry_backoff": 0}, 4, [180, 180, 180]),
    (BACKOFF, 4, [(0, 0.5, 1), (0, 1, 2), (0, 2, 4)]),
    ({**BACKOFF, "retry_backoff": 50, "retry_backoff_max": 60}, 4, [(0, 25, 50), (0, 30, 60), (0, 30, 60)]),
]


@pytest.mark.parametrize(("options", "runs", "waits"), TODAY)
def test_what_celery_does(options: dict[str, Any], runs: Runs, waits: list[Any]) -> None:
    """Runs in total, and the waits of the first twenty retries."""
    found = native(app_of(**options))
    assert found.runs == runs
    assert found.waits == tuple(WaitRange(*w) if isinstance(w, tuple) else WaitRange.of(w) for w in waits)


@pytest.mark.parametrize(("factor", "longest"), [(1, 600), (7, 600), (60, 100), (900, 30)])
def test_the_backoff_is_that_of_celery(factor: int, longest: int) -> None:
    """Two thousand draws of its own function for each retry."""
    found = native(
        app_of(**{**BACKOFF, "retry_backoff": factor, "retry_backoff_max": longest}, max_retries=5)
    )
    for retries, wait in enumerate(found.waits):
        drawn = [get_exponential_backoff_interval(factor, retries, longest, True) for _ in range(2000)]
        assert wait.least <= min(drawn)
        assert max(drawn) <= wait.most <= max(drawn) * 1.1 + 1
        assert fmean(drawn) == pytest.approx(wait.mean, rel=0.1)
        assert wait.most == get_exponential_backoff_interval(factor, retries, longest)


def test_the_span_of_many_retries() -> None:
    """The span counts all retries, also those that the plan does not list."""
    found = native(app_of(**STEADY, max_retries=3000))
    assert found.span == WaitRange.of(1023 + 600 * (3000 - 10))
    assert native(app_of(**AUTO, max_retries=None)).span == ENDLESS
    assert native(app_of()).span == WaitRange.of(0)


#: options -> the policy, and whether it is what Celery does
POLICIES: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
    ({}, {"max_attempts": 1}, True),
    ({"max_retries": 5, "default_retry_delay": 5}, {"max_attempts": 1}, True),
    (AUTO, {"max_attempts": 4, "initial_interval": "PT3M", "max_interval": "PT3M", "jitter": False,
            "backoff_strategy": "none"}, True),
    ({**STEADY, "max_retries": 9}, {"max_attempts": 10, "max_interval": "PT10M", "jitter": False}, True),
    ({**STEADY, "retry_backoff": 100, "retry_backoff_max": 30},
     {"max_attempts": 4, "initial_interval": "PT30S", "max_interval": "PT30S", "jitter": False}, True),
    ({**STEADY, "retry_backoff_max": 300}, {"max_attempts": 4, "jitter": False}, True),
    ({**AUTO, "retry_kwargs": {"max_retries": 6, "countdown": 1}},
     {"max_attempts": 7, "max_interval": "PT1S", "jitter": False, "backoff_strategy": "none"}, True),
    (BACKOFF, {"max_attempts": 4, "initial_interval": "PT0.5S", "max_interval": "PT10M"}, False),
    ({**STEADY, "max_retries": None}, {"max_interval": "PT10M", "jitter": False}, True),
]  # fmt: skip


@pytest.mark.parametrize(("options", "policy", "exact"), POLICIES)
def test_the_policy(options: dict[str, Any], policy: dict[str, Any], exact: bool) -> None:
    """No field more than is needed; exact where twenty waits and the runs are the same."""
    found = only(app_of(**options))
    assert found.policy == policy
    assert found.differences == () if exact else found.differences
    merged = RetryPolicy.merge(options_as_policy(app_of(**options).tasks["job"]), policy)
    assert found.native is not None and found.native.waits != NOT_KNOWN
    theirs = [policy_wait(merged, n) for n in range(1, len(found.native.waits) + 1)]
    runs = ENDLESS if merged.runs == LARGEST else merged.runs
    assert (runs == found.native.runs and all(map(alike, found.native.waits, theirs))) is exact


@pytest.mark.parametrize("option", ["acks_late", "retry_on_worker_lost"])
def test_a_job_that_comes_back_when_its_worker_dies_does_so_under_the_bridge(option: str) -> None:
    """A failure is final, as it is today; with `max_attempts: 1` a killed worker would end the job, too."""
    app = app_of(**{option: True})
    found = only(app)
    assert found.entry == {"retry_on": "asked"}
    install(app, Bridge(), policies={"job": found.entry})
    task = app.tasks["job"]
    assert not explain(task, OSError).waits
    assert all(explain(task, lost).waits for lost in (VISIBILITY_TIMEOUT, WORKER_DEATH))


def test_the_differences_have_numbers() -> None:
    """Celery's jitter starts at nothing, and that of the Open Job Spec at half of the delay."""
    told = "\n".join(only(app_of(**BACKOFF)).differences)
    assert "retry 1 waits 0.25 s to 0.75 s, not 0 s to 1 s" in told
    assert "retry 3 waits 1 s to 3 s, not 0 s to 4 s" in told
    assert "together are on average the same" in told
    assert "half of Celery's, for the same mean" in told
    given = {"retry_kwargs": {"queue": "slow", "countdown": 180, "max_retries": 3}}
    assert only(app_of(**AUTO, **given)).differences == ()
    at_a_date = only(app_of(**AUTO, retry_kwargs={"eta": "2030-01-01T00:00:00Z"}))
    assert (at_a_date.native, at_a_date.policy) == (NativeRetries.unknown(), None)
    assert [str(found).startswith("job: retry_kwargs has an eta") for found in at_a_date.open] == [True]


OFTEN: dict[str, Any] = {"max_retries": 6, "default_retry_delay": 4}
MOVED = [(fails, options) for options, *_ in TODAY] + [
    (body, options) for body in (asks, asks_shortly) for options in ({}, OFTEN, {"max_retries": 0})
]


@pytest.mark.parametrize(("body", "options"), MOVED)
def test_install_makes_of_the_policy_what_was_planned(body: Any, options: dict[str, Any]) -> None:
    """Over what it reads off the task, the planned fields alone give the planned policy."""
    app = app_with(body, **{**options, "bind": body is not fails})
    found = only(app)
    assert found.policy is not None
    install(app, Bridge(), policies={"job": found.entry})
    policy, expected = task_policy(app, app.tasks["job"]).policy, RetryPolicy.merge(found.policy)
    if found.native and found.native.runs == ENDLESS:
        assert policy.runs == LARGEST
        expected = RetryPolicy.merge(expected, {"max_attempts": LARGEST})
    assert policy.runs == expected.runs
    if policy.runs > 1:
        assert policy == expected


#: body, options -> runs
RUN: list[tuple[Any, dict[str, Any]]] = [
    (fails, {}),
    (fails, {**STEADY, "max_retries": 2}),
    (fails, {**AUTO, "max_retries": -3}),
    (fails, {**AUTO, "retry_kwargs": {"max_retries": 4}, "max_retries": 1}),
    (fails, {"autoretry_for": (OSError,), "dont_autoretry_for": (TimeoutError,)}),
    (asks, {"bind": True, "max_retries": 6}),
    (asks_shortly, {"bind": True}),
]


@pytest.mark.parametrize("moved", [False, True], ids=["celery", "bridge"])
@pytest.mark.parametrize(("body", "options"), RUN)
def test_it_runs_as_often_as_planned(body: Any, options: dict[str, Any], moved: bool) -> None:
    """Celery itself today, and the bridge under the planned policy."""
    ran: list[int] = []

    class Counting(Task):
        def before_start(self, *_: Any) -> None:
            ran.append(1)

    app = app_with(body, base=Counting, **options)
    found = only(app)
    assert found.native is not None
    if moved:
        install(app, Bridge(), policies={"job": found.entry})
    assert app.tasks["job"].apply().state == "FAILURE"
    assert len(ran) == found.native.runs


@pytest.mark.parametrize(("body", "options"), RUN)
def test_the_bridge_waits_as_planned(body: Any, options: dict[str, Any]) -> None:
    """The delays that it decides on, its own and those that the code asks for, are the planned ones."""
    heard: list[Event] = []
    bridge = Bridge(listeners=[heard.append])
    app = app_with(body, **options)
    found = only(app)
    assert found.native is not None and found.policy is not None
    install(app, bridge, policies={"job": found.entry})
    app.tasks["job"].apply()
    assert bridge.flush(30)
    delays = [event.data["delay_ms"] / 1000 for event in heard if event.type == "job.retrying"]
    assert [WaitRange.of(seconds) for seconds in delays] == [*found.native.waits]


def test_the_words() -> None:
    """The plan says which errors are retried, which are not, and what is left in the end."""
    options = {"autoretry_for": (OSError, pytest.UsageError), "dont_autoretry_for": (TimeoutError,)}
    late = {"acks_late": True, "acks_on_failure_or_timeout": False}
    found = native(app_with(fails, {"result_backend": "cache+memory://"}, **options, **late))
    assert found.retries == ("OSError, UsageError (autoretry_for), but not TimeoutError (dont_autoretry_for)")
    assert found.final == "TimeoutError, every other error"
    assert found.at_the_end == (
        "its result says FAILURE, an errback of its signature is called, its message is rejected, so that "
        "only a queue's own dead letter exchange keeps it"
    )
    assert native(app_of(autoretry_for=(Exception,))).final == "nothing"
    ignored = native(app_of(ignore_result=True))
    assert (ignored.retries, ignored.final) == ("nothing", "every error")
    assert "its result is ignored" in ignored.at_the_end
    assert "no result backend keeps its result" in native(app_of()).at_the_end


def test_a_task_that_cannot_be_read_does_not_hide_the_others() -> None:
    """The plan of the unreadable task has the reason."""
    app = app_of(**BACKOFF)
    app.task(shared=False, name="broken", autoretry_for=(OSError,), max_retries="five")(fails)
    broken, job = of_celery(app)
    assert (broken.name, broken.native, broken.policy) == ("broken", None, None)
    assert broken.unreadable.startswith("TypeError: ")
    assert job.policy


def test_a_task_under_the_bridge() -> None:
    """A task moved by `install` keeps its plan of Celery alone; an `ojs_task` has the plan of the bridge."""
    app = app_of(**STEADY)
    ojs_task(app, name="own", retry={"max_attempts": 6, "on_exhaustion": "dead_letter"}, shared=False)(fails)
    ojs_task(app, name="python", retry={"backoff_strategy": Intervals("PT1M")}, shared=False)(fails)
    before, *_ = of_celery(app)
    install(app, Bridge(), policies={"job": {"max_attempts": 9}})
    job, own, python = of_celery(app)
    assert (job.native, job.policy, job.differences) == (before.native, before.policy, before.differences)
    assert "max_attempts=9" in {hazard.name: hazard.text for hazard in job.hazards}["already-moved"]
    assert own.native and (own.native.runs, own.native.at_the_end) == (6, "it is kept as a dead letter")
    assert own.policy == {"max_attempts": 6, "on_exhaustion": "dead_letter"}
    assert [hazard.name for hazard in own.hazards] == ["already-moved"]
    assert python.native and python.native.waits[0].most == pytest.approx(90, rel=1e-3)
    assert "exists only in Python code" in python.differences[0]


def test_reading_an_app_gives_it_no_bridge() -> None:
    """The user has not decided yet: `install` can still choose the app's bridge."""
    app = app_of()
    ojs_task(app, name="own", shared=False)(fails)
    assert len(of_celery(app)) == 2
    bridge = Bridge()
    assert install(app, bridge) is bridge
