"""Patterns of types, `whole.type` and `prefix.*`: another form is refused wherever one is taken."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, RetryPolicy, StorageRetry
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.celery.attach import task_policy
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.operations.replay_rules import ReplayRule
from ojs_bridge.spec.failures import Failure
from tests.cli.running import run

WRONG = ["*Backoff", "*", "a.*.b", "**", "a.**", "a*", ".*"]


def an_app() -> Celery:
    """An app that nobody sends to."""
    return Celery("shop", broker="memory://", set_as_current=False)


def a_bridge() -> Bridge:
    """A bridge whose store is never asked."""
    return Bridge("redis://127.0.0.1:1/0", storage_retry=StorageRetry.disabled())


def job() -> None:
    """A task."""


def named(text: str) -> dict[str, Any]:
    """A policy that names this error."""
    return {"non_retryable_errors": ["fine", "fine.*", text]}


def on_celery(text: str) -> None:
    app = an_app()
    install(app, Bridge(), policies={"*": named(text)})


def by_ojs_task(text: str) -> None:
    app = an_app()
    task = ojs_task(app, name="job", retry=named(text), shared=False)(job)
    task_policy(app, app.tasks[task.name])


def on_dramatiq(text: str) -> None:
    broker = StubBroker()
    broker.add_middleware(middleware := OJSRetries(Bridge()))
    dramatiq.actor(job, broker=broker, actor_name="job", ojs_retry=named(text))
    middleware.after_process_boot(broker)


def by_the_app(text: str) -> None:
    app = an_app()
    install(app, Bridge(retry=named(text)))
    app.task(job, name="job", shared=False)
    app.finalize()
    task_policy(app, app.tasks["job"])


#: where a pattern is taken -> what takes it
DOORS: dict[str, Callable[[str], Any]] = {
    "policies": on_celery,
    "an ojs_task": by_ojs_task,
    "an actor": on_dramatiq,
    "an app's default": by_the_app,
    "a replay rule's type": lambda text: ReplayRule("x", type=text),
    "a replay rule's error type": lambda text: ReplayRule("x", error_type=text),
    "letters by type": lambda text: a_bridge().dead_letters.list(type=text),
    "letters by error type": lambda text: a_bridge().dead_letters.timeline(error_type=text),
    "letters to purge": lambda text: a_bridge().dead_letters.purge(error_type=text, confirm=True),
    "retries by type": lambda text: a_bridge().retries.list(type=text),
    "how many retries": lambda text: a_bridge().retries.count(type=text),
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_pattern_of_another_form_is_refused(door: Callable[[str], Any], text: str) -> None:
    """By an error that names it, rather than matched with nothing."""
    with pytest.raises(ValueError) as raised:
        door(text)
    assert f"{text!r} must be a whole type, or a prefix with .* at its end" in str(raised.value)


@pytest.mark.parametrize("text", ["*Backoff", "a.*.b"])
def test_on_the_command_line(tmp_path: Path, text: str) -> None:
    """Exit code 2 for a filter, 1 for a file that is checked, with the pattern."""
    url = f"sqlite:///{tmp_path}/ojs.db"
    Bridge(url).dead_letters.stats()
    file = tmp_path / "policies.json"
    file.write_text(json.dumps({"policies": {"job": named(text)}}), encoding="utf-8")
    lines = {
        ("dead-letters", "list", "--type", text, "--store", url): 2,
        ("dead-letters", "purge", "--error-type", text, "--yes", "--store", url): 2,
        ("retries", "list", "--type", text, "--store", url): 2,
        ("policy", "check", str(file)): 1,
    }
    for line, code in lines.items():
        ran = run(*line)
        assert (ran.code, repr(text) in ran.err + ran.out) == (code, True), line


def test_a_message_may_name_any_type() -> None:
    """To the specification an entry is any text, so that what a producer elsewhere says stays valid."""
    policy = RetryPolicy(non_retryable_errors=["*Backoff", "a.*"])
    assert policy.non_retryable_pattern(Failure("*Backoff")) == "*Backoff"
    assert policy.non_retryable_pattern(Failure("a.b")) == "a.*"
    assert policy.non_retryable_pattern(Failure("FullBackoff")) is None
