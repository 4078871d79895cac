"""The bridge: its configuration, a task's policy, and the history of a job beyond its header."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from ojs_bridge import (
    Bridge,
    ConfigurationError,
    Discard,
    Intervals,
    InvalidRetryPolicy,
    RetryPolicy,
    StoreError,
)
from ojs_bridge.engine.layers import Layers
from ojs_bridge.engine.runs import Postpone, Refuse, Run
from ojs_bridge.errors import InvalidState
from ojs_bridge.rules.decision import Complete, DeadLettered
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import MAX_COUNT, ErrorEntry, Job, decode
from tests.lives import FRAMEWORK, KEEP, attempt, bridge_with_outbox, live_and_die

JOB = Job("j-1", "billing.charge", "default")
STORE, NAMESPACE, RETRY = "OJS_BRIDGE_STORE", "OJS_BRIDGE_NAMESPACE", "OJS_BRIDGE_RETRY"


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STORE, NAMESPACE, RETRY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The URL of an empty store."""
    return f"sqlite:///{tmp_path}/ojs.db"


def test_without_arguments_and_environment() -> None:
    """The bridge has the spec's default policy, no store and no listeners."""
    bridge = Bridge()
    assert (bridge.store, bridge.settings.retry, bridge.settings.listeners) == (None, None, ())
    assert (bridge.engine.task().policy.max_attempts, bridge.engine.task().policy.on_exhaustion) == (
        3,
        "discard",
    )


def test_the_environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """The bridge reads a missing argument from its variable."""
    monkeypatch.setenv(STORE, url)
    monkeypatch.setenv(NAMESPACE, "shop")
    monkeypatch.setenv(RETRY, '{"max_attempts": 7, "on_exhaustion": "dead_letter"}')
    bridge = Bridge()
    assert bridge.engine.task().policy.max_attempts == 7
    live_and_die(bridge, "j-1")
    assert Bridge(url, namespace="shop").dead_letters.get("j-1").attempt == 7
    assert Bridge(url, namespace="another").dead_letters.stats().total == 0


def test_code_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """A policy in code counts as a whole: it is not merged with one from the environment."""
    monkeypatch.setenv(STORE, "nosuch://h")
    monkeypatch.setenv(NAMESPACE, "x" * 99)
    monkeypatch.setenv(RETRY, "not JSON")
    bridge = Bridge(url, {"jitter": False}, namespace="shop")
    assert bridge.store is not None
    assert (bridge.engine.task().policy.max_attempts, bridge.engine.task().policy.jitter) == (3, False)
    assert Bridge(url, {}, namespace="shop").engine.task().policy.jitter is True


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deployments leave variables empty."""
    for name in (STORE, NAMESPACE, RETRY):
        monkeypatch.setenv(name, "")
    assert (Bridge().store, Bridge().settings.retry) == (None, None)


INVALID_VARIABLES = [
    (STORE, "ojs.db", ConfigurationError, "store: 'ojs.db' is not a URL such as sqlite:///ojs.db"),
    (RETRY, "{", ConfigurationError, "OJS_BRIDGE_RETRY: '{' is not JSON: "),
    (RETRY, "[" * 100_000, ConfigurationError, "OJS_BRIDGE_RETRY: '[[["),
    (RETRY, "[1]", InvalidRetryPolicy, "invalid retry policy: OJS_BRIDGE_RETRY: [1]: must be an object"),
    (RETRY, '{"max_attempts": -1}', InvalidRetryPolicy, "invalid retry policy: OJS_BRIDGE_RETRY: max_att"),
]


@pytest.mark.parametrize(("name", "value", "error", "message"), INVALID_VARIABLES, ids=lambda v: str(v)[:20])
def test_an_invalid_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, error: type[Exception], message: str
) -> None:
    """The error names the variable."""
    monkeypatch.setenv(name, value)
    with pytest.raises(error) as raised:
        Bridge()
    assert str(raised.value).startswith(message)


INVALID_ARGUMENTS = [
    ({"store": "ojs.db"}, "store: 'ojs.db' is not a URL"),
    ({"store": ""}, "store: '' is not a URL"),
    ({"store": 5}, "store: 5 is neither a URL such as sqlite:///ojs.db nor a store"),
    ({"store": "sqlite:///x.db", "namespace": "x" * 65}, "namespace: "),
    ({"history": 9}, "history: 9 must be at least 10 (spec section 10.1)"),
    ({"history": "10"}, "history: '10' must be at least 10"),
    ({"history": True}, "history: True must be at least 10"),
    ({"header_budget": 8191}, "header_budget: 8191 must be at least 8192 bytes"),
    ({"header_budget": 10**7}, "header_budget: 10000000 must be at most 1048576 bytes"),
    ({"header_budget": 1e9}, "header_budget: 1000000000.0 must be at least 8192 bytes"),
    ({"listeners": print}, "listeners: <built-in function print> must be a list of callables"),
    ({"listeners": 5}, "listeners: 5 must be a list of callables"),
    ({"listeners": [print, None]}, "listeners: None is not callable"),
    ({"errors": [OSError]}, "errors: [<class 'OSError'>] must map exception classes to error types"),
    ({"errors": {"Timeout": "a.b"}}, "errors: the key 'Timeout' must be an exception class"),
    ({"errors": {OSError: ""}}, "errors[OSError]: '' must be an error type such as"),
    ({"errors": {OSError: ("a.b", "MAYBE")}}, "errors[OSError]: ('a.b', 'MAYBE') must be an error type"),
    ({"retry": {"max_attempts": -1}}, "invalid retry policy: max_attempts: -1 must be >= 0"),
    ({"retry": {"atempts": 1}}, "invalid retry policy: atempts: 1 is not a field of a retry policy"),
    ({"retry": 5}, "invalid retry policy: 5: must be an object of retry policy fields"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "message"), INVALID_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_an_invalid_argument(arguments: dict[str, Any], message: str) -> None:
    """The error names the argument and its value; only a policy's is an InvalidRetryPolicy."""
    with pytest.raises(InvalidRetryPolicy if "retry" in arguments else ConfigurationError) as error:
        Bridge(**arguments)
    assert str(error.value).startswith(message)


def test_listeners_may_be_any_iterable() -> None:
    """The bridge reads the iterable once."""
    bridge = Bridge(listeners=(listener for listener in [print]))  # type: ignore[arg-type]
    assert bridge.engine.context.events.listeners == (print,)


@pytest.mark.requirement("RET-10")
def test_precedence() -> None:
    """A job wins over its task, the task over the app, and the app over the spec, field by field."""
    task = Bridge(retry={"max_attempts": 5, "jitter": False}).engine.task(
        Layers(install=[{"max_attempts": 6, "max_interval": "PT9S"}], task={"max_interval": "PT8S"})
    )
    assert (task.policy.max_attempts, task.policy.jitter) == (6, False)
    assert task.policy.max_interval == timedelta(seconds=8)
    job = task.of_job({"max_attempts": 7}).policy
    assert (job.max_attempts, job.jitter, job.max_interval) == (7, False, timedelta(seconds=8))
    assert task.of_job(None) is task
    assert task.of_job({}) is task


@pytest.mark.requirement("RET-16")
def test_a_policy_is_validated_after_the_merge() -> None:
    """A task's interval is valid or not under the app's cap."""
    with pytest.raises(InvalidRetryPolicy, match="max_interval"):
        Bridge(retry={"max_interval": "PT5S"}).engine.task(Layers(task={"initial_interval": "PT6S"}))
    task = Bridge(retry={"max_interval": "PT5S"}).engine.task()
    with pytest.raises(InvalidRetryPolicy, match="max_interval"):
        task.of_job({"initial_interval": "PT6S"})


@pytest.mark.requirement("RET-16")
def test_the_log_names_once_the_words_that_only_a_newer_release_knows(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The producer of this release refuses them, and a worker leaves them out."""
    engine, retry = Bridge().engine, {"max_attempts": 7, "zeal": 3, "b" * 200: {}}
    with pytest.raises(InvalidRetryPolicy, match="zeal: 3 is not a field of a retry policy"):
        engine.initial_header(JOB, engine.task(), retry)
    for _ in range(2):
        assert engine.task().of_job(retry).policy == RetryPolicy(max_attempts=7)
    assert caplog.messages == [
        "the policy of a message has words that this release of ojs-bridge does not know, "
        f"{'b' * 80!r}, 'zeal': they have no effect here, and its retries carry them on"
    ]


def test_precedence_of_error_maps() -> None:
    """A task's map wins over the app's, and the app's over the adapter's own."""
    bridge = Bridge(errors={OSError: "app", ValueError: "app"})
    task = bridge.engine.task(errors={OSError: "task"}, reserved={OSError: "own", KeyError: "own"})
    found = {cls: (task.errors.find(cls())[0] or ("",))[0] for cls in (OSError, ValueError, KeyError)}
    assert found == {OSError: "task", ValueError: "app", KeyError: "own"}


@pytest.mark.requirement("RET-16")
def test_the_header_of_a_job_with_its_own_policy() -> None:
    """The header has the job's own policy and no other field, in the spec's form."""
    bridge = Bridge(retry={"max_attempts": 9})
    header = bridge.engine.initial_header(
        JOB, bridge.engine.task(), {"initial_interval": timedelta(seconds=2)}
    )
    assert header.state.pop("created_at")
    assert header.state == {"v": 1, "attempt": 1, "retry": {"initial_interval": "PT2S"}}


HUGE = ["some.error.type"] * 1000
REFUSED_POLICIES: list[tuple[Any, str]] = [
    ({"max_attempts": "3"}, 'max_attempts: "3" must be a non-negative integer'),
    ({"non_retryable_errors": HUGE}, "the job's retry state needs"),
    ({"backoff_strategy": Intervals("PT1M")}, "backoff_strategy: "),
    ([], "[]: must be an object of retry policy fields"),
]


@pytest.mark.requirement("RET-16")
@pytest.mark.parametrize(("retry", "message"), REFUSED_POLICIES, ids=lambda value: str(value)[:30])
def test_a_policy_that_no_message_can_carry(retry: Any, message: str) -> None:
    """The producer gets an InvalidRetryPolicy, whatever the reason."""
    bridge = Bridge()
    with pytest.raises(InvalidRetryPolicy) as error:
        bridge.engine.initial_header(JOB, bridge.engine.task(), retry)
    assert str(error.value).startswith(f"invalid retry policy: {message}")


def test_an_early_delivery_is_postponed() -> None:
    """A delivery is postponed to the time at which it is due; a delivery that is due runs."""
    bridge = Bridge()
    due = bridge.engine.now() + timedelta(seconds=60)
    assert bridge.engine.begin(JOB._replace(next_retry_at=due), JOB, bridge.engine.task()) == Postpone(
        JOB._replace(next_retry_at=due), due
    )
    due = bridge.engine.now()
    assert isinstance(bridge.engine.begin(JOB._replace(next_retry_at=due), JOB, bridge.engine.task()), Run)


@pytest.mark.parametrize(
    ("job", "type_"),
    [
        (InvalidState("damaged"), "validation.state_invalid"),
        (JOB._replace(retry={"max_attempts": -1}), "validation.retry_policy_invalid"),
    ],
)
def test_what_nobody_can_read_is_kept(job: Any, type_: str) -> None:
    """The job is a dead letter without having run, whatever `on_exhaustion` says."""
    bridge = Bridge()
    refused = bridge.engine.begin(job, JOB, bridge.engine.task())
    assert isinstance(refused, Refuse)
    assert (refused.decision.cause, refused.decision.failure.type) == ("invalid", type_)
    assert refused.decision.reason.startswith("attempt 1 was not run: ")


def test_without_a_store_nothing_is_buried() -> None:
    """The adapter uses the broker's own dead queue."""
    bridge = Bridge()
    with pytest.raises(StoreError):
        decision = DeadLettered("handler", Failure("a.b"), "why")
        bridge.engine.storing.bury(Refuse(JOB, decision), JOB, decision, "x", {})


# A message with this many errors of this size: some are dropped, some carried in part, some whole.
BIG = "é" * 1500


def state_after(bridge: Bridge, failures: int, message: str) -> tuple[Job, str]:
    """Return the job as it is delivered after so many failures, and its header."""
    job, text = JOB, ""
    for n in range(1, failures + 1):
        job, _, _ = attempt(bridge, job, ConnectionError(f"{message} {n}"))
        text = bridge.engine.storing.header(job).text
        job = decode(text, JOB._replace(attempt=job.attempt))
    return job, text


@pytest.mark.requirement("RET-15")
def test_an_entry_that_is_cut_is_marked_and_kept_whole(url: str) -> None:
    """The message has a part of the entry, marked; the store has all of it, once."""
    bridge, _ = bridge_with_outbox(url, retry={**KEEP, "max_attempts": 50})
    _, text = state_after(bridge, 4, BIG)
    carried = json.loads(text)["errors"]
    assert len(text) <= 16 * 1024
    assert [entry.get("cut") for entry in carried] == [True] * 4
    assert all(len(entry["message"]) < len(BIG) for entry in carried)
    assert bridge.store is not None
    kept = bridge.store.letters.kept_errors("j-1")
    assert [(place, entry["message"]) for place, entry in kept] == [(n, f"{BIG} {n + 1}") for n in range(4)]


def test_what_fits_is_neither_marked_nor_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bridge does not even ask the store."""
    bridge = Bridge(url, {**KEEP, "max_attempts": 50})
    assert bridge.store is not None
    for name in ("keep_errors", "kept_errors", "forget_errors"):
        monkeypatch.setattr(bridge.store.letters, name, pytest.fail)
    job, text = state_after(bridge, 10, "small")
    assert "cut" not in text
    run = bridge.engine.admit(job, job, bridge.engine.task())
    assert isinstance(run, Run)
    bridge.engine.settling.settle(run, Complete())
    bridge.engine.settling.settle(run, bridge.engine.judge(run, Discard("a.b")))


@pytest.mark.requirement("DLQ-002")
@pytest.mark.parametrize("failures", [1, 4, 11, 25])
@pytest.mark.parametrize("message", ["small", BIG])
def test_a_dead_letter_has_every_entry_whole(url: str, failures: int, message: str) -> None:
    """The letter has the dropped, the cut and the last entries in order; the store keeps no other copy."""
    bridge, _ = bridge_with_outbox(url, retry={**KEEP, "max_attempts": failures})
    live_and_die(bridge, "j-1", message)
    errors = bridge.dead_letters.get("j-1").errors
    assert [(e["attempt"], e["message"]) for e in errors] == [
        (n, f"{message} {n}") for n in range(1, failures + 1)
    ]
    assert not any("cut" in entry for entry in errors)
    assert bridge.store is not None
    assert bridge.store.letters.kept_errors("j-1") == []


@pytest.mark.requirement("DLQ-002")
@pytest.mark.parametrize("message", ["small", BIG])
def test_a_job_that_is_buried_twice_keeps_its_history(url: str, message: str) -> None:
    """A worker died between the dead letter and the acknowledgement, and the job was delivered again."""
    bridge, _ = bridge_with_outbox(url, retry={**KEEP, "max_attempts": 15})
    last = live_and_die(bridge, "j-1", message)
    before = bridge.dead_letters.get("j-1").errors
    job, run, decision = attempt(bridge, decode(last, JOB._replace(attempt=15)), OSError("again"))
    assert isinstance(decision, DeadLettered)
    bridge.engine.storing.bury(run, job, decision, FRAMEWORK, {})
    after = bridge.dead_letters.get("j-1").errors
    assert after[:-1] == before[:-1]
    assert (len(after), after[-1]["message"]) == (15, "again")


@pytest.mark.requirement("DLQ-002")
def test_a_job_that_starts_afresh_keeps_its_history(url: str) -> None:
    """A foreign dashboard sent the job again: attempts repeat, and the entries still differ."""
    bridge, _ = bridge_with_outbox(url, retry={**KEEP, "max_attempts": 50})
    _, text = state_after(bridge, 12, "first")
    job = decode(text, JOB)
    for n in range(1, 13):
        job, run, _ = attempt(bridge, job, OSError(f"second {n}"))
        job = decode(bridge.engine.storing.header(job).text, JOB._replace(attempt=job.attempt))
    last = DeadLettered("handler", Failure("a.b"), "why")
    bridge.engine.storing.bury(run, bridge.engine.carrying.after(job, last), last, FRAMEWORK, {})
    messages = [entry["message"] for entry in bridge.dead_letters.get("j-1").errors]
    assert messages == [*(f"first {n}" for n in range(1, 13)), *(f"second {n}" for n in range(1, 13)), ""]


ENDINGS = {"succeeds": None, "is discarded": Discard("a.b")}


@pytest.mark.parametrize("raised", ENDINGS.values(), ids=ENDINGS)
@pytest.mark.parametrize(("failures", "message"), [(12, "small"), (4, BIG)], ids=["dropped", "cut"])
def test_a_job_that_ends_leaves_nothing_in_the_store(
    url: str, raised: BaseException | None, failures: int, message: str
) -> None:
    """The store forgets the entries of this job, and of no other."""
    bridge, _ = bridge_with_outbox(url, retry={**KEEP, "max_attempts": 50})
    job, _ = state_after(bridge, failures, message)
    assert bridge.store is not None
    assert bridge.store.letters.kept_errors("j-1")
    bridge.store.letters.keep_errors("j-2", [(0, {})])
    run = bridge.engine.admit(job, job, bridge.engine.task())
    assert isinstance(run, Run)
    bridge.engine.settling.settle(run, bridge.engine.judge(run, raised))
    assert bridge.store.letters.kept_errors("j-1") == []
    assert bridge.store.letters.kept_errors("j-2") == [(0, {})]


def test_a_store_out_of_reach_stops_no_retry(url: str, caplog: pytest.LogCaptureFixture) -> None:
    """The header holds as many entries as fit; the log names the entries that are not kept."""
    bridge, _ = bridge_with_outbox(url, retry={**KEEP, "max_attempts": 50})
    assert bridge.store is not None
    bridge.store.prepare()
    with sa.create_engine(url).begin() as connection:
        connection.execute(sa.text("drop table ojs_error_history"))
    _, text = state_after(bridge, 11, "small")
    assert len(json.loads(text)["errors"]) == 10
    assert "job j-1: 1 entries of its error history are not kept" in caplog.text


HOSTILE: list[dict[str, Any]] = [
    {"errors": [{"attempt": "x", "replay": [1]}] * 20},
    {"errors": [{"attempt": 2**90, "message": {"m": "m" * 9000}}] * 20},
    {"errors": [{"cut": True}] * 3, "errors_dropped": 7},
    {"errors": [{}] * 20, "errors_dropped": MAX_COUNT - 99},
    {"errors": [], "errors_dropped": 2**40, "replay_count": MAX_COUNT - 1},
]


@pytest.mark.parametrize("state", HOSTILE, ids=lambda state: str(state)[:40])
def test_a_hostile_history_stops_nothing(url: str, state: dict[str, Any]) -> None:
    """The job goes on, and is buried with the entries that it has."""
    bridge, _ = bridge_with_outbox(url)
    job = decode({"v": 1, "attempt": 1, **state}, JOB)
    job, run, _ = attempt(bridge, job, OSError("down"))
    job = decode(bridge.engine.storing.header(job).text, JOB._replace(attempt=2))
    job, run, _ = attempt(bridge, job, OSError("down"))
    decision = DeadLettered("handler", Failure("a.b"), "why")
    bridge.engine.storing.bury(run, job, decision, FRAMEWORK, {})
    errors: tuple[ErrorEntry, ...] = bridge.dead_letters.get("j-1").errors
    assert len(errors) >= min(len(state["errors"]) + 2, 11)
    bridge.dead_letters.replay("j-1")
