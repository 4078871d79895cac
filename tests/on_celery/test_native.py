"""Celery's own options keep their meaning under `install`, which leaves the task code untouched."""

from __future__ import annotations

import time
from typing import Any

import pytest
from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from celery.exceptions import Retry as CelerysRetry

from ojs_bridge import Discard, Fail, Retry, RetryPolicy
from ojs_bridge.celery.native import options_as_policy
from ojs_bridge.engine.layers import in_ojs
from ojs_bridge.rules.policy import LARGEST
from tests.contract.notes import Busy
from tests.contract.steps import OPAQUE, Step, an, raises, retries
from tests.on_celery.fleet import LATE, Fleet
from tests.servers import eventually

AUTO: dict[str, Any] = {"autoretry_for": (OSError,)}
STEADY: dict[str, Any] = {**AUTO, "retry_backoff": True, "retry_jitter": False}


def steady(seconds: str) -> dict[str, Any]:
    """The backoff that always waits the same."""
    return {
        "backoff_strategy": "none",
        "backoff_coefficient": 2.0,
        "initial_interval": seconds,
        "max_interval": seconds,
        "jitter": False,
    }


def growing(first: str, longest: str, *, jitter: bool = False) -> dict[str, Any]:
    """The backoff that doubles."""
    return {
        "backoff_strategy": "exponential",
        "backoff_coefficient": 2.0,
        "initial_interval": first,
        "max_interval": longest,
        "jitter": jitter,
    }


#: options -> the partial policy
PARTIALS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_retries": 5}, {"max_attempts": 6}),
    ({"max_retries": 0}, {"max_attempts": 1}),
    ({"max_retries": -3}, {"max_attempts": 1}),
    ({"max_retries": 2.5}, {"max_attempts": 3}),
    ({"max_retries": None}, {"max_attempts": LARGEST}),
    ({"max_retries": float("inf")}, {"max_attempts": LARGEST}),
    ({"retry_kwargs": {"max_retries": 7, "countdown": 5}}, {}),
    ({"default_retry_delay": 0.4}, steady("PT0.4S")),
    ({"default_retry_delay": 0}, steady("PT0.001S")),
    ({"default_retry_delay": None}, steady("PT0.001S")),
    (AUTO, steady("PT3M")),
    ({**AUTO, "retry_kwargs": {"max_retries": 7, "countdown": 5}}, {"max_attempts": 8, **steady("PT5S")}),
    ({**AUTO, "retry_kwargs": {"max_retries": 7}, "max_retries": 2}, {"max_attempts": 8, **steady("PT3M")}),
    ({**AUTO, "retry_kwargs": {"max_retries": None}, "max_retries": 2},
     {"max_attempts": 3, **steady("PT3M")}),
    ({**AUTO, "retry_kwargs": {"countdown": 0}, "default_retry_delay": 9}, steady("PT0.001S")),
    (STEADY, growing("PT1S", "PT10M")),
    ({**STEADY, "retry_kwargs": {"countdown": 5}}, growing("PT1S", "PT10M")),
    ({**STEADY, "retry_backoff": 0.5}, growing("PT1S", "PT10M")),
    ({**STEADY, "retry_backoff": 2.9}, growing("PT2S", "PT10M")),
    ({**STEADY, "retry_backoff": 60, "retry_backoff_max": 10}, growing("PT10S", "PT10S")),
    ({**STEADY, "retry_backoff_max": 0}, growing("PT0.001S", "PT0.001S")),
    ({**STEADY, "retry_backoff_max": 10**18}, growing("PT1S", "PT876000H")),
    ({**STEADY, "retry_jitter": True}, growing("PT0.5S", "PT10M", jitter=True)),
]  # fmt: skip


def native_task(**options: Any) -> Task:
    """A task that nobody has moved."""
    app = Celery("native", broker="memory://", set_as_current=False)
    app.task(shared=False, name="job", **options)(body)
    return app.tasks["job"]


def body() -> None:
    """A task's body."""


@pytest.mark.parametrize(("options", "partial"), PARTIALS)
def test_native_options_in_the_words_of_a_policy(options: dict[str, Any], partial: dict[str, Any]) -> None:
    """Options that are not set are left to the app and the spec; every partial policy is valid."""
    task = native_task(**options)
    assert in_ojs(options_as_policy(task)) == partial
    assert RetryPolicy.merge(options_as_policy(task))


#: task, steps -> runs, state, what the job's result is or the type of its error
MEANINGS: dict[str, tuple[str, list[Step], int, str, object]] = {
    "a failure is retried": ("plain", [raises(OSError)], 3, "FAILURE", "OSError"),
    "a later pattern wins": ("two", [raises(OSError)], 2, "FAILURE", "OSError"),
    "max_retries counts retries": ("five", [raises(OSError)], 5, "FAILURE", "OSError"),
    "a class-based task": ("by_class", [], 2, "FAILURE", "OSError"),
    "autoretry_for names what is retried": ("auto", [raises(OSError), "ok"], 2, "SUCCESS", "ok"),
    "and what is not": ("auto", [raises(KeyError)], 1, "FAILURE", "KeyError"),
    "dont_autoretry_for": ("auto", [raises(FileNotFoundError)], 1, "FAILURE", "FileNotFoundError"),
    "a response is not bound by autoretry_for": (
        "auto", [raises(Retry, "a.b", after="PT0.1S"), "ok"], 2, "SUCCESS", "ok",
    ),
    "throws only lowers a log level": ("throws", [raises(KeyError)], 3, "FAILURE", "KeyError"),
    "self.retry": ("plain", [retries(countdown=0.1), "ok"], 2, "SUCCESS", "ok"),
    "self.retry without an attempt left": (
        "plain", [retries(countdown=0.05)], 3, "FAILURE", "MaxRetriesExceededError",
    ),
    "self.retry(exc=)": (
        "plain", [retries(exc=an(KeyError, "k"), countdown=0.05)], 3, "FAILURE", "KeyError",
    ),
    "self.retry(exc=) of a snooze by the error map uses no attempt": (
        "plain", [retries(exc=an(Busy, "b"), countdown=0.05)] * 4 + ["ok"], 5, "SUCCESS", "ok",
    ),
    "self.retry(exc=) of a class": (
        "plain", [retries(exc=KeyError, countdown=0.05)], 3, "FAILURE", "KeyError",
    ),
    "self.retry(headers=) that no message can carry": (
        "plain", [retries(exc=KeyError, headers={"a": OPAQUE})], 1, "FAILURE", "KeyError",
    ),
    "self.retry(max_retries=) is the policy's to say": (
        "plain", [retries(max_retries=9, countdown=0.05)], 3, "FAILURE", "MaxRetriesExceededError",
    ),
    "self.retry(throw=False)": (
        "plain", [retries(throw=False, countdown=0.1, then=1), 1], 2, "SUCCESS", 1,
    ),
    "a response after self.retry(throw=False)": (
        "plain", [retries(throw=False, then=raises(Discard, "a.b"))], 1, "FAILURE", "Discard",
    ),
    "Celery's Retry asks, too": (
        "auto", [raises(CelerysRetry, exc=an(KeyError, "k"), when=0.1), "ok"], 2, "SUCCESS", "ok",
    ),
    "Celery's Retry without an attempt left": (
        "two", [raises(CelerysRetry, exc=an(KeyError, "k"), when=0.05)], 2, "FAILURE", "KeyError",
    ),
    "Celery's Retry without a reason": (
        "two", [raises(CelerysRetry, when="soon")], 2, "FAILURE", "HandlerFailed",
    ),
    "MaxRetriesExceededError can be caught": ("falls_back", [], 3, "SUCCESS", "fell back"),
    "a swallowed self.retry still retries": ("swallows", [], 3, "SUCCESS", "swallowed 1"),
    "other arguments": ("plain", [retries(args=["other"], countdown=0.1)], 2, "SUCCESS", "other"),
    "responses": ("plain", [raises(Fail, "a.b")], 1, "FAILURE", "Fail"),
}  # fmt: skip


@pytest.mark.requirement("RET-01", "RET-07", "RET-08")
def test_native_words_keep_their_meaning(fleet: Fleet) -> None:
    sent = {name: fleet.send(f"native.{task}", *steps) for name, (task, steps, *_) in MEANINGS.items()}
    for name, (_, _, runs, state, outcome) in MEANINGS.items():
        job = sent[name]
        assert fleet.end(job) == state, name
        # A retry may follow a success that Celery has shown.
        eventually(lambda job=job, runs=runs: len(fleet.runs(job)) == runs, what=name)
        result = job.get(propagate=False)
        assert (result if state == "SUCCESS" else type(result).__name__) == outcome, name
        assert fleet.ending(job)["job_type"].startswith("native."), name


@pytest.mark.requirement("RET-04", "RET-11")
def test_native_delays(fleet: Fleet) -> None:
    backoff = fleet.send("native.auto", raises(OSError), "ok")
    fixed = fleet.send("native.delay", raises(OSError), "ok")
    hint = fleet.send("native.plain", retries(countdown=0.7), "ok")
    eta = fleet.send("native.plain", retries(due_in=1), "ok")
    snooze = fleet.send("native.plain", retries(exc=an(Busy, "b"), countdown=0.8), "ok")
    capped = fleet.send("native.plain", retries(countdown=3600), "ok", ojs_retry={"max_interval": "PT0.5S"})
    asked = fleet.send("native.plain", raises(CelerysRetry, when=0.6), "ok")
    delays = (
        (backoff, 1.0),
        (fixed, 0.4),
        (hint, 0.7),
        (eta, 0.98),
        (snooze, 0.8),
        (capped, 0.5),
        (asked, 0.6),
    )
    for job, delay in delays:
        assert fleet.end(job) == "SUCCESS"
        assert delay <= fleet.gaps(job)[0] < delay + LATE


def test_ignore_and_reject_are_celerys(fleet: Fleet) -> None:
    ignored = fleet.send("native.plain", raises(Ignore))
    rejected = fleet.send("native.plain", raises(Reject, "no", requeue=False))
    requeued = fleet.send("native.plain", raises(Reject, "later", requeue=True), "ok")
    assert fleet.end(requeued) == "SUCCESS"
    assert [run.attempt for run in fleet.runs(requeued)] == [1, 1]
    for job in (ignored, rejected):
        eventually(lambda job=job: fleet.runs(job), what="a run")
    time.sleep(0.3)
    assert [len(fleet.runs(job)) for job in (ignored, rejected)] == [1, 1]
    assert ignored.state == "PENDING"


def test_a_task_that_no_pattern_names_stays_celerys(fleet: Fleet) -> None:
    failed = fleet.send("untouched", raises(OSError))
    retried = fleet.send("untouched", retries(countdown=4))  # Celery stores RETRY after publishing
    assert [fleet.end(failed), fleet.end(retried)] == ["FAILURE", "FAILURE"]
    assert (len(fleet.runs(failed)), len(fleet.runs(retried))) == (1, 2)
    assert fleet.events(failed) == []


@pytest.mark.requirement("RET-01")
def test_direct_calls_are_plain_calls(fleet: Fleet) -> None:
    itself = fleet.send("calls_itself", 2)
    another = fleet.send("calls_another")
    assert [fleet.end(itself), fleet.end(another)] == ["FAILURE", "FAILURE"]
    assert isinstance(itself.get(propagate=False), OSError)
    assert fleet.ending(itself)["total_attempts"] == 3
    # Celery's Retry without a published message is a failure, too: nothing else would run the job again.
    assert fleet.ending(another)["total_attempts"] == 3
