"""`explain` says what would happen, and that is what happens."""

from __future__ import annotations

import json
from typing import Any

import dramatiq
import pytest
from celery import Celery

import ojs_bridge.celery
from ojs_bridge import Bridge, Discard, InvalidRetryPolicy, Jitter, Retry, RetryPolicy, Snooze
from ojs_bridge.testing import VirtualTime, explain, virtual_time
from tests.cli.running import run
from tests.testing.conftest import CRM, Shop


@pytest.mark.parametrize(
    ("error", "retry"),
    [
        (ConnectionError("down"), {}),
        (ConnectionError("down"), {"on_exhaustion": "discard", "max_attempts": 2}),
        (ValueError("bad"), {"non_retryable_errors": ["ValueError"]}),
        (Retry("a.b", after="PT7S"), {}),
        (Discard("a.b"), {}),
        (OSError(), {"max_attempts": 1}),
    ],
)
def test_it_says_what_happens(shop: Shop, ojs: VirtualTime, error: Exception, retry: Any) -> None:
    def fails() -> None:
        raise error

    task = shop.task(fails, **{**CRM, **retry})
    explained = explain(task, error)
    shop.send(task)
    job = ojs.run()
    assert (explained.outcome, explained.waits) == (job.outcome, job.waits)
    assert (explained.steps[-1].attempt, explained.steps[-1].reason) == (job.attempts, job.reason)


@pytest.mark.parametrize(
    ("asks_for", "error_type", "raised"),
    [
        ((), "external.timeout", OSError),
        ((OSError,), "external.timeout", KeyError),
        ((OSError,), "builtins.ConnectionError", ConnectionError),
        ((Exception,), "external.timeout", KeyError),
    ],
)
def test_under_install_alone_a_task_keeps_its_rule(asks_for: Any, error_type: str, raised: Any) -> None:
    def fails() -> None:
        raise raised

    app = Celery("shop", broker="memory://", set_as_current=False)
    task = app.task(fails, name="fails", shared=False, autoretry_for=asks_for)
    ojs_bridge.celery.install(app, Bridge())
    with virtual_time(app) as ojs:
        task.delay()
        assert explain(task, error_type).waits == ojs.run().waits
    assert explain(task, "visibility_timeout").waits


def test_a_class_whose_exceptions_need_arguments() -> None:
    explained = explain({"max_attempts": 1}, UnicodeDecodeError)
    assert explained.steps[0].reason.startswith("attempt 1 of 1 failed with builtins.UnicodeDecodeError")


def test_as_text() -> None:
    """The text of the documentation."""
    assert str(explain(CRM, "crm.down")).splitlines() == [
        "attempt 1 of 5 failed with crm.down; retry 1 in 15.000 s, 7.5 s to 22.5 s with jitter",
        "attempt 2 of 5 failed with crm.down; retry 2 in 60.000 s, 30 s to 1 min 30 s with jitter",
        "attempt 3 of 5 failed with crm.down; retry 3 in 240.000 s, 2 min to 6 min with jitter",
        "attempt 4 of 5 failed with crm.down; retry 4 in 960.000 s, 8 min to 24 min with jitter",
        "attempt 5 of 5 failed with crm.down, and no attempt is left: dead_letter",
        "From the first attempt to the last: 21 min 15 s, without jitter.",
    ]


def test_as_data() -> None:
    explained = explain(RetryPolicy(max_attempts=2, jitter=Jitter(1, 2)), "a.b")
    assert explained.to_json() == {
        "outcome": "discarded",
        "steps": [
            {
                "attempt": 1,
                "then": "retry",
                "reason": "attempt 1 of 2 failed with a.b; retry 1 in 1.000 s",
                "wait": {
                    "retry": 1,
                    "planned": 1.0,
                    "shortest": 1.0,
                    "longest": pytest.approx(2),
                    "since_first": 1.0,
                },
            },
            {
                "attempt": 2,
                "then": "discarded",
                "reason": "attempt 2 of 2 failed with a.b, and no attempt is left",
                "wait": None,
            },
        ],
    }


def test_a_snooze_goes_on_for_ever() -> None:
    explained = explain({}, Snooze("PT1H"))
    assert (explained.outcome, str(explained)) == ("snooze", "the handler asked for a pause of 3600.000 s")


def test_many_attempts_are_not_all_told() -> None:
    lines = str(explain({"max_attempts": 10**6}, "a.b")).splitlines()
    assert lines[-2:] == [
        "... and 999,949 more attempts",
        "attempt 1000000 of 1000000 failed with a.b, and no attempt is left: discarded",
    ]


def test_what_cannot_be_explained() -> None:
    with pytest.raises(InvalidRetryPolicy):
        explain({"max_attempts": -1})

    @Celery("plain", set_as_current=False).task(shared=False)
    def plain() -> None: ...

    @dramatiq.actor(broker=dramatiq.brokers.stub.StubBroker())
    def bare() -> None: ...

    with pytest.raises(TypeError, match="Celery itself retries it"):
        explain(plain)
    with pytest.raises(TypeError, match="Dramatiq itself retries it"):
        explain(bare)


def test_the_command(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    told = run("policy", "explain", "--policy", json.dumps(CRM), "--error", "a.b")
    assert (told.code, told.out) == (0, "policy:\n" + str(explain(CRM, "a.b")) + "\n")
    told = run("policy", "explain", "--policy", json.dumps(CRM), "--error", "a.b", "--json")
    assert json.loads(told.out) == {"name": "policy", "error": "a.b", **explain(CRM, "a.b").to_json()}
    (tmp_path / "explained_shop.py").write_text(
        "import celery, ojs_bridge.celery\n"
        "app = celery.Celery('shop', set_as_current=False)\n"
        "@ojs_bridge.celery.ojs_task(app, name='crm', retry={'max_attempts': 1}, shared=False)\n"
        "def crm(): ...\n"
        "@app.task(name='plain', shared=False)\n"
        "def plain(): ...\n"
        "ojs_bridge.celery.install(app)\n"
        "native = celery.Celery('native', set_as_current=False)\n"
        "@native.task(name='alone', shared=False)\n"
        "def alone(): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    told = run("policy", "explain", "--app", "explained_shop:app", "--task", "crm", "--error", "a.b")
    assert (told.code, told.out) == (
        0,
        "crm:\nattempt 1 of 1 failed with a.b, and no attempt is left: discarded\n",
    )
    told = run("policy", "explain", "--task", "plain", OJS_BRIDGE_APP="explained_shop:app")
    assert "which this task does not ask to retry" in told.out
    told = run("policy", "explain", "--app", "explained_shop:native", "--task", "alone")
    assert told.code == 2
    assert "task: task alone is not under the bridge: Celery itself retries it" in told.err
    told = run("policy", "explain", "--app", "explained_shop:app", "--task", "other")
    assert told.code == 2
    assert "task: explained_shop:app has no 'other'; it has" in told.err
    assert (
        "--app MODULE:APP and --task NAME name a task together" in run("policy", "explain", "--task", "x").err
    )
