"""All places take the same patterns; non-retryable errors have the specification's own."""

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
from ojs_bridge.adapters.terms import Canary
from ojs_bridge.celery import install, ojs_task
from ojs_bridge.celery.installation import task_policy
from ojs_bridge.config.policies import Policies
from ojs_bridge.dramatiq import OJSRetries
from ojs_bridge.migration.plan import Planned, planned
from ojs_bridge.operations.replaying import ReplayRule
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.notations import matches
from tests.cli.running import run
from tests.conftest import store_url
from tests.lives import FRAMEWORK, bridge_with_outbox
from tests.store.test_parked import parked
from tests.store.test_store import letter

TYPES = ["billing", "billing.charge", "billing.charge.late", "Billing.charge", "mail.charge", "mail[1].a?"]
#: a pattern -> the types that it matches
LANGUAGE = {
    "billing.charge": ["billing.charge"],
    "billing.*": ["billing.charge", "billing.charge.late"],
    "billing*": ["billing", "billing.charge", "billing.charge.late"],
    "*.charge": ["billing.charge", "Billing.charge", "mail.charge"],
    "*.charge*": ["billing.charge", "billing.charge.late", "Billing.charge", "mail.charge"],
    "b*.*.l*": ["billing.charge.late"],
    "*": TYPES,
    "mail[1].*": ["mail[1].a?"],
    "mail[1].a?": ["mail[1].a?"],
    "mail?charge": [],
    "[m]ail.*": [],
    ".*": [],
}


@pytest.fixture
def full(url: str) -> Bridge:
    """A bridge whose store has a dead letter and a parked retry of each type."""
    bridge, _ = bridge_with_outbox(url)
    assert bridge.store is not None
    for type_ in TYPES:
        bridge.store.letters.bury(letter(f"dead {type_}", type=type_))
        bridge.store.parked.park(parked(f"waits {type_}", type=type_, framework=FRAMEWORK))
    return bridge


@pytest.fixture(params=["sqlite", "postgres", "valkey"])
def url(request: pytest.FixtureRequest) -> str:
    """The URL of an empty store of each kind."""
    return store_url(request.param, request)


def test_whatever_is_stored(full: Bridge) -> None:
    """A list, a count, a timeline and a drain take the same pattern for the same types."""
    for pattern, types in LANGUAGE.items():
        wanted = sorted(types)
        assert sorted(found.type for found in full.dead_letters.list(type=pattern).letters) == wanted, pattern
        assert sorted(found.type for found in full.retries.list(type=pattern).jobs) == wanted, pattern
        assert sorted(found.type for found in full.retries.drainable([pattern])) == wanted, pattern
        assert full.retries.count(type=pattern) == len(wanted), pattern
    assert full.retries.drain(["*.charge"]).published == 3
    assert full.retries.count() == 3


@pytest.mark.parametrize(("pattern", "types"), LANGUAGE.items(), ids=LANGUAGE)
def test_whatever_names_tasks(pattern: str, types: list[str]) -> None:
    """The places are policies, the canary, and the names of a plan."""
    policies, canary = Policies({pattern: {}}), Canary({pattern: 100})
    assert [name for name in TYPES if matches(name, pattern)] == types
    assert [name for name in TYPES if policies.of(name) is not None] == types
    assert [name for name in TYPES if canary.covers_all(name)] == types
    if types:
        assert [one.name for one in planned(TYPES, [pattern], "task", Planned)] == sorted(types)


def a_bridge() -> Bridge:
    """A bridge whose store is never asked."""
    return Bridge("redis://127.0.0.1:1/0", storage_retry=StorageRetry.disabled())


#: a place that takes a pattern -> a call that gives it one
PLACES: dict[str, Callable[[Any], Any]] = {
    "policies": lambda text: Policies({text: {}}),
    "canary": lambda text: Canary({text: 10}),
    "replay rule 'x': type": lambda text: ReplayRule("x", type=text),
    "replay rule 'x': error_type": lambda text: ReplayRule("x", error_type=text),
    "type": lambda text: a_bridge().dead_letters.list(type=text),
    "error_type": lambda text: a_bridge().dead_letters.purge(error_type=text, confirm=True),
    "tasks": lambda text: a_bridge().retries.drain([text]),
}


@pytest.mark.parametrize("wrong", ["", 7])
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_pattern(place: str, wrong: object) -> None:
    """Every place raises the same error, by its own name."""
    with pytest.raises(ValueError) as raised:
        PLACES[place](wrong)
    assert str(raised.value) == f"{place}: {wrong!r} must be a name, or a pattern such as 'billing.*'"


WRONG = ["*Backoff", "*", "a.*.b", "**", "a.**", "a*", ".*"]


def an_app() -> Celery:
    """An app that gets no messages."""
    return Celery("shop", broker="memory://", set_as_current=False)


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
    middleware.take_over(broker)


def by_the_app(text: str) -> None:
    app = an_app()
    install(app, Bridge(retry=named(text)))
    app.task(job, name="job", shared=False)
    app.finalize()
    task_policy(app, app.tasks["job"])


#: the owner of a policy -> a call that makes it
OWNERS: dict[str, Callable[[str], Any]] = {
    "policies": on_celery,
    "an ojs_task": by_ojs_task,
    "an actor": on_dramatiq,
    "an app's default": by_the_app,
}


@pytest.mark.parametrize("text", WRONG)
@pytest.mark.parametrize("owner", OWNERS.values(), ids=OWNERS)
def test_an_error_of_a_form_that_the_spec_lacks(owner: Callable[[str], Any], text: str) -> None:
    """The error is refused by name; it would match no type."""
    with pytest.raises(ValueError) as raised:
        owner(text)
    assert f"{text!r} must be a whole type, or a prefix with .* at its end" in str(raised.value)


@pytest.mark.parametrize("text", ["*Backoff", "a.*.b"])
def test_a_file_with_such_an_error(tmp_path: Path, text: str) -> None:
    """The check of the file fails, and names the error."""
    file = tmp_path / "policies.json"
    file.write_text(json.dumps({"policies": {"job": named(text)}}), encoding="utf-8")
    ran = run("policy", "check", str(file))
    assert (ran.code, repr(text) in ran.err + ran.out) == (1, True)


def test_a_message_may_name_any_type() -> None:
    """The specification takes any text as an entry, so an entry of a foreign producer stays valid."""
    policy = RetryPolicy(non_retryable_errors=["*Backoff", "a.*"])
    assert policy.non_retryable_pattern(Failure("*Backoff")) == "*Backoff"
    assert policy.non_retryable_pattern(Failure("a.b")) == "a.*"
    assert policy.non_retryable_pattern(Failure("FullBackoff")) is None
