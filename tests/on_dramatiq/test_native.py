"""Dramatiq's own features are unchanged: native options, results, callbacks, compositions, interrupts."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from decimal import Decimal
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import RateLimitExceeded
from dramatiq.errors import Retry as NativeRetry
from dramatiq.middleware import AsyncIO, GroupCallbacks, Middleware, Retries, ShutdownNotifications, TimeLimit
from dramatiq.rate_limits.backends import StubBackend as StubLimits
from dramatiq.results import ResultFailure, Results
from dramatiq.results.backends import StubBackend
from dramatiq.worker import WorkerThread

from ojs_bridge import Bridge, DeadLetter, Discard, Retry, RetryPolicy, Snooze
from ojs_bridge.dramatiq import OJSRetries, install, keeping
from ojs_bridge.dramatiq.actors import options_as_policy
from ojs_bridge.dramatiq.delivery import stock_logger
from ojs_bridge.engine.layers import NativeJitter
from ojs_bridge.rules.policy import LARGEST
from tests.instrumentation.failing import Lingering
from tests.on_dramatiq.fleet import QUICK, Fleet, Sent, dead_messages
from tests.servers import eventually


def fails(n: int) -> None:
    raise OSError("down")


def fails_once(n: int, *args: Any) -> str:
    if n == 1:
        raise OSError("down")
    return f"after {n}"


def raising(make: Callable[[], BaseException], *, times: int = 1000) -> Callable[[int], None]:
    def handler(n: int) -> None:
        if n <= times:
            raise make()

    return handler


PARTIALS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"max_retries": 5}, {"max_attempts": 6}),
    ({"max_retries": 0}, {"max_attempts": 1}),
    ({"max_retries": -3}, {"max_attempts": 1}),
    ({"max_retries": None}, {"max_attempts": LARGEST}),
    ({"max_retries": True}, {"max_attempts": 2}),
    ({"max_retries": 1.5}, {"max_attempts": 3}),
    ({"max_retries": Decimal(2)}, {"max_attempts": 3}),
    ({"max_retries": float("inf")}, {"max_attempts": LARGEST}),
    ({"retry_when": len, "max_retries": 5}, {"max_attempts": LARGEST}),
    ({"min_backoff": 500, "max_backoff": 2500}, {"initial_interval": "PT0.75S", "max_interval": "PT2.5S"}),
    ({"min_backoff": 0, "max_backoff": 0}, {"initial_interval": "PT0.001S", "max_interval": "PT0.001S"}),
    ({"min_backoff": 0}, {"initial_interval": "PT0.001S", "max_interval": "PT0.001S"}),
    ({"min_backoff": 0, "max_backoff": 5000}, {"initial_interval": "PT0.001S", "max_interval": "PT0.001S"}),
    ({"min_backoff": 100}, {"initial_interval": "PT0.15S", "max_interval": "PT168H"}),
    ({"min_backoff": 10**400}, {"initial_interval": "PT168H", "max_interval": "PT168H"}),
    ({"max_backoff": 1000}, {"initial_interval": "PT1S", "max_interval": "PT1S"}),
    ({"max_backoff": 10**30}, {"initial_interval": "PT22.5S", "max_interval": "PT168H"}),
    ({"min_backoff": -5}, {"initial_interval": "PT0.001S", "max_interval": "PT0.001S"}),
    (
        {"min_backoff": Decimal(100), "max_backoff": -5},
        {"initial_interval": "PT0.001S", "max_interval": "PT0.001S"},
    ),
    ({"min_backoff": timedelta(seconds=2)}, {"initial_interval": "PT3S", "max_interval": "PT168H"}),
    ({"min_backoff": True}, {"initial_interval": "PT0.0015S", "max_interval": "PT168H"}),
]


@pytest.mark.parametrize(("native", "partial"), PARTIALS)
def test_native_options_in_the_words_of_a_policy(native: dict[str, Any], partial: dict[str, Any]) -> None:
    found = options_as_policy(native)
    if isinstance(jitter := found.pop("jitter", None), NativeJitter):
        found["initial_interval"] = jitter.interval
    assert repr(found) == repr(partial)


# the handler, its actor's options, its message's options -> runs, the cause
NATIVE: dict[str, tuple[Any, dict[str, Any], dict[str, Any], int, str | None]] = {
    "max_retries on the actor": (fails, {"max_retries": 1}, {}, 2, "exhausted"),
    "max_retries 0": (fails, {"max_retries": 0}, {}, 1, "exhausted"),
    "max_retries on the message": (fails, {"max_retries": 1}, {"max_retries": 3}, 4, "exhausted"),
    "max_retries 0 on the message": (fails, {}, {"max_retries": 0}, 1, "exhausted"),
    "max_retries None": (raising(OSError, times=9), {"max_retries": None, "max_backoff": 10}, {}, 10, None),
    "ojs_retry wins over max_retries": (
        fails, {"max_retries": 9, "ojs_retry": {"max_attempts": 2}}, {}, 2, "exhausted",
    ),
    "an actor's ojs_retry wins over a message's max_retries": (
        fails, {"ojs_retry": {"max_attempts": 2}}, {"max_retries": 9}, 2, "exhausted",
    ),
    "an actor's ojs_retry that says nothing of attempts does not": (
        fails, {"ojs_retry": {"jitter": False}, "max_retries": 9}, {"max_retries": 1}, 2, "exhausted",
    ),
    "a message's ojs_retry wins over all": (
        fails, {"ojs_retry": {"max_attempts": 9}}, {"max_retries": 4, "ojs_retry": {"max_attempts": 2}}, 2,
        "exhausted",
    ),
    "throws a class": (fails, {"throws": OSError}, {}, 1, "non_retryable"),
    "throws a tuple": (fails, {"throws": (KeyError, OSError)}, {}, 1, "non_retryable"),
    "throws another": (fails, {"throws": KeyError}, {}, 3, "exhausted"),
    "retry_when by count": (fails, {"retry_when": lambda n, e: n < 4}, {}, 5, "non_retryable"),
    "retry_when by error": (fails, {"retry_when": lambda n, e: e is None}, {}, 1, "non_retryable"),
    "retry_when that fails": (
        raising(OSError, times=2), {"retry_when": lambda n, e: 1 / 0}, {}, 1, "non_retryable",
    ),
    "dramatiq.Retry": (raising(lambda: NativeRetry("again", delay=10), times=2), {}, {}, 3, None),
    "dramatiq.Retry is an attempt": (
        raising(lambda: NativeRetry(delay=10)), {"max_retries": 1}, {}, 2, "exhausted",
    ),
    "dramatiq.Retry with an odd delay": (raising(lambda: NativeRetry(delay="x"), times=1), {}, {}, 2, None),
    "RateLimitExceeded": (raising(lambda: RateLimitExceeded("slow"), times=2), {}, {}, 3, None),
    "a message's throws that names no class": (fails, {}, {"throws": ["OSError"]}, 3, "exhausted"),
}  # fmt: skip


@pytest.mark.requirement("RET-01")
def test_native_options_mean_what_they_meant(fleet: Fleet) -> None:
    sent = {
        name: fleet.send(fleet.actor(handler, **actor), **message)
        for name, (handler, actor, message, *_) in NATIVE.items()
    }
    for name, (*_, runs, cause) in NATIVE.items():
        event = fleet.end(sent[name])
        assert (len(sent[name].runs), event.data.get("cause")) == (runs, cause), name
        assert fleet.dead(sent[name]) == [], name


# the actor's options -> what the logger of `Retries` says, with the bridge and without
LINES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "throws": ({"throws": OSError}, ["INFO Aborting message"]),
    "max_retries": ({"max_retries": 0}, ["WARNING Retries exceeded for message"]),
    "retry_when": ({"retry_when": lambda n, e: False}, ["WARNING Retries exceeded for message"]),
    "a retry": (
        {"max_retries": 1, "max_backoff": 1},
        ["INFO Retrying message in N milliseconds", "WARNING Retries exceeded for message"],
    ),
}


@pytest.mark.parametrize("is_bridged", [True, False])
@pytest.mark.parametrize("name", LINES)
def test_the_log_has_the_lines_of_the_stock_retries(
    stub: StubBroker, caplog: pytest.LogCaptureFixture, name: str, is_bridged: bool
) -> None:
    caplog.set_level(logging.INFO)
    options, lines = LINES[name]
    if is_bridged:
        install(stub, Bridge())

    def run() -> None:
        raise OSError("down")

    actor = dramatiq.actor(run, broker=stub, **options)
    worker = dramatiq.Worker(stub, worker_timeout=20)
    worker.start()
    sent = actor.send()
    eventually(lambda: stub.dead_letters)
    worker.stop()
    said = [r for r in caplog.records if r.name.startswith("dramatiq.middleware.retries")]
    plain = [f"{r.levelname} {r.getMessage()}".replace(f" {sent.message_id!r}", "") for r in said]
    assert [re.sub(r"\d+", "N", line).rstrip(".") for line in plain] == lines


@pytest.mark.parametrize("name", LINES)
def test_a_log_that_raises_changes_no_end(
    stub: StubBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """A line of the stock logger comes after what it tells of: a retry gets no dead letter beside it."""
    options, lines = LINES[name]
    install(stub, Bridge())
    runs, raised = [], list[str]()

    def refuse(record: logging.LogRecord) -> bool:
        raised.append(record.getMessage())
        raise OSError("the disk of the log is full")

    def run() -> None:
        runs.append(1)
        raise OSError("down")

    caplog.set_level(logging.INFO, stock_logger.name)
    monkeypatch.setattr(stock_logger, "filters", [refuse])
    actor = dramatiq.actor(run, broker=stub, **options)
    worker = dramatiq.Worker(stub, worker_timeout=20)
    worker.start()
    actor.send()
    eventually(lambda: stub.dead_letters)
    stub.join(actor.queue_name, fail_fast=False)
    worker.stop()
    assert (len(stub.dead_letters), len(runs)) == (1, options.get("max_retries", 0) + 1)
    assert len(raised) == len(lines)


class Writing(Middleware):
    """A user's middleware that writes native options on every message that is sent."""

    def __init__(self, **options: Any) -> None:
        self._options = options

    def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        message.options.update(self._options)


def test_a_policy_wins_over_what_a_middleware_writes_on_messages_and_says_so_once(
    stubbed: Callable[..., Fleet], caplog: pytest.LogCaptureFixture
) -> None:
    fleet = stubbed(retry=RetryPolicy(jitter=False, max_attempts=5))
    fleet.broker.add_middleware(Writing(max_retries=2, max_backoff=1))
    named = fleet.actor(fails, name="named", ojs_retry={"max_attempts": 2})
    open_ = fleet.actor(fails, name="open")
    waits = fleet.actor(fails, name="waits", ojs_retry={"initial_interval": "PT0.2S"})
    jobs = {actor: [fleet.send(actor), fleet.send(actor)] for actor in (named, open_, waits)}
    with fleet.working():
        for actor, runs in ((named, 2), (open_, 3), (waits, 3)):
            for job in jobs[actor]:
                fleet.end(job)
                assert len(job.runs) == runs, actor.actor_name
    assert fleet.planned(jobs[named][0])[0] < 0.2 <= jobs[waits][0].gaps[0]
    said = [r.getMessage() for r in caplog.records if "of its messages" in r.getMessage()]
    assert sorted(said) == [
        "actor named: max_retries=2 of its messages does not count, where a policy says max_attempts=2",
        "actor open: max_retries=2 of its messages counts, where a policy says max_attempts=5",
        "actor waits: max_backoff=1 of its messages does not count, where a policy says max_interval='PT5M'",
        "actor waits: max_retries=2 of its messages counts, where a policy says max_attempts=5",
    ]


def test_native_backoff_on_actor_and_message(fleet: Fleet) -> None:
    actor = fleet.actor(fails_once, min_backoff=300, max_backoff=1000)
    slow, quick = fleet.send(actor), fleet.send(actor, min_backoff=10, max_backoff=10)
    for job in (slow, quick):
        assert fleet.end(job).type == "job.completed"
    assert slow.gaps[0] >= 0.3
    assert quick.gaps[0] >= 0.01
    assert fleet.planned(quick)[0] < 0.29


def test_a_native_delay_is_the_delay(fleet: Fleet) -> None:
    job = fleet.send(fleet.actor(raising(lambda: NativeRetry(delay=400), times=1)))
    fleet.end(job)
    assert job.gaps[0] >= 0.4


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"max_retries": 1}, {"retries": 1, "max_retries": 1}),
        ({"retry_when": lambda n, e: n < 1}, {"retries": 1, "max_retries": None}),
    ],
)
def test_on_retry_exhausted_hears_of_it(
    fleet: Fleet, options: dict[str, Any], counts: dict[str, Any]
) -> None:
    told: list[Any] = []
    fleet.declare(
        lambda message, numbers: told.append((message, numbers)), name=f"told{len(fleet.broker.actors)}"
    )
    listener = f"told{len(fleet.broker.actors) - 1}"
    job = fleet.send(fleet.actor(fails, on_retry_exhausted=listener, **options))
    fleet.end(job)
    eventually(lambda: told)
    message, numbers = told[0]
    assert (message["message_id"], message["options"]["retries"]) == (job.id, 2)
    assert "OSError: down" in message["options"]["traceback"]
    assert numbers == counts


def test_callbacks_run_as_before(fleet: Fleet) -> None:
    failures: list[Any] = []
    successes: list[Any] = []
    on_failure = fleet.declare(lambda message, error: failures.append((message["message_id"], error)))
    on_success = fleet.declare(lambda message, result: successes.append((message["message_id"], result)))
    job = fleet.send(
        fleet.actor(fails_once), on_failure=on_failure.actor_name, on_success=on_success.actor_name
    )
    fleet.end(job)
    eventually(lambda: successes and failures)
    assert failures == [(job.id, {"type": "OSError", "message": "down"})]
    assert successes == [(job.id, "after 2")]


def test_a_middle_member_of_a_pipeline_is_retried_and_the_pipeline_goes_on(fleet: Fleet) -> None:
    got: list[Any] = []
    first, last = fleet.declare(lambda: "first"), fleet.declare(got.append)
    retried = fleet.actor(fails_once)
    middle = retried.message("key")
    dramatiq.pipeline([first.message(), middle, last.message()], broker=fleet.broker).run()
    # The event of the retry comes after its publishing; the pipeline may have gone on by then.
    eventually(lambda: got and "job.retrying" in fleet.heard.types(middle.message_id))
    assert got == ["after 2"]
    assert fleet.heard.types(middle.message_id).count("job.retrying") == 1


@pytest.mark.parametrize("failure", [OSError("down"), Discard("a.b"), DeadLetter("a.b")])
def test_a_failing_member_stops_its_pipeline(fleet: Fleet, failure: Exception) -> None:
    got: list[Any] = []
    failing = fleet.actor(raising(lambda: failure), max_retries=0)
    message = failing.message("key")
    dramatiq.pipeline([message, fleet.declare(got.append).message()], broker=fleet.broker).run()
    fleet.end(Sent(message.message_id))
    after = fleet.send(fleet.actor(lambda n: None))
    fleet.end(after)
    assert got == []


def test_priorities_and_custom_options_travel_with_the_retry(fleet: Fleet) -> None:
    job = fleet.send(fleet.actor(fails_once), broker_priority=5, tenant="t1")
    fleet.end(job)
    for run in job.runs:
        assert (run.options["broker_priority"], run.options["tenant"]) == (5, "t1")


def test_the_native_options_are_kept_in_step(fleet: Fleet) -> None:
    job = fleet.send(fleet.actor(fails, max_retries=2))
    fleet.end(job)
    assert [run.options.get("retries", 0) for run in job.runs] == [0, 1, 2]
    assert all("requeue_timestamp" in run.options for run in job.runs[1:])
    assert all("OSError: down" in run.options["traceback"] for run in job.runs[1:])


def test_on_the_day_of_the_roll_out_the_native_count_goes_on(fleet: Fleet) -> None:
    job = fleet.send(fleet.actor(fails, max_retries=3), retries=2, traceback="old")
    assert fleet.end(job).data["total_attempts"] == 4
    assert len(job.runs) == 2


def test_a_foreign_requeue_that_resets_the_native_count_starts_afresh(fleet: Fleet) -> None:
    state = {"v": 1, "attempt": 3, "next_retry_at": "2999-01-01T00:00:00.000Z", "errors": [{"attempt": 1}]}
    job = fleet.send(fleet.actor(fails), ojs=state, retries=0)
    fleet.end(job)
    assert [run.ojs["attempt"] for run in job.runs[1:]] == [2, 3]
    assert len(job.runs[1].ojs["errors"]) == 2


def test_a_worker_rolled_back_to_the_stock_retries_carries_on(stub: StubBroker, unique: str) -> None:
    fleet = Fleet(stub, unique)
    actor = fleet.actor(fails, max_retries=3, max_backoff=10)
    job = fleet.send(actor)
    with fleet.working():
        fleet.end(job)
    old = StubBroker()
    runs: list[int] = []

    def run(key: str) -> None:
        runs.append(1)
        raise OSError("down")

    dramatiq.actor(
        run, broker=old, actor_name=actor.actor_name, queue_name=unique, max_retries=3, max_backoff=10
    )
    options = {k: v for k, v in job.runs[1].options.items() if k != "eta"}
    old.enqueue(dramatiq.Message(unique, actor.actor_name, ("key",), {}, options))
    worker = dramatiq.Worker(old, worker_timeout=20)
    worker.start()
    eventually(lambda: old.dead_letters)
    worker.stop()
    assert (options["retries"], len(runs)) == (1, 3)


# --- results ---


@pytest.fixture
def results(stubbed: Callable[..., Fleet]) -> Iterator[tuple[Fleet, StubBackend]]:
    """A working fleet that stores results."""
    backend = StubBackend()
    fleet = stubbed()
    fleet.broker.add_middleware(Results(backend=backend, store_results=True))
    fleet.declare(lambda: None)
    with fleet.working():
        yield fleet, backend


def result_of(fleet: Fleet, backend: StubBackend, job: Sent, actor: dramatiq.Actor[..., Any]) -> Any:
    message = dramatiq.Message(fleet.queue, actor.actor_name, (), {}, {}, message_id=job.id)
    return backend.get_result(message, block=True, timeout=10_000)


@pytest.mark.parametrize(
    ("failure", "policy"),
    [
        (OSError("down"), {"max_attempts": 1}),
        (OSError("down"), {"max_attempts": 1, "on_exhaustion": "dead_letter"}),
        (Discard("a.b", "no"), {}),
        (DeadLetter("a.b", "no"), {}),
    ],
)
def test_the_error_is_stored_as_the_result(
    results: tuple[Fleet, StubBackend], failure: Exception, policy: dict[str, Any]
) -> None:
    fleet, backend = results
    actor = fleet.actor(raising(lambda: failure), ojs_retry=policy)
    job = fleet.send(actor)
    with pytest.raises(ResultFailure, match=type(failure).__name__):
        result_of(fleet, backend, job, actor)
    assert fleet.dead(job) == []


def test_the_result_of_a_retried_job_is_stored(results: tuple[Fleet, StubBackend]) -> None:
    fleet, backend = results
    actor = fleet.actor(fails_once)
    assert result_of(fleet, backend, fleet.send(actor), actor) == "after 2"


def test_a_postponed_copy_leaves_the_result_alone(results: tuple[Fleet, StubBackend]) -> None:
    fleet, backend = results
    actor = fleet.actor(lambda n: f"run {n}")
    job = fleet.send(actor, ojs={"v": 1, "attempt": 1, "next_retry_at": "2999-01-01T00:00:00.000Z"})
    probe = fleet.send(actor)
    assert result_of(fleet, backend, probe, actor) == "run 1"
    time.sleep(0.1)
    assert not backend.results.get(backend.build_message_key(job_message(fleet, actor, job)))


def job_message(fleet: Fleet, actor: dramatiq.Actor[..., Any], job: Sent) -> dramatiq.Message[Any]:
    return dramatiq.Message(fleet.queue, actor.actor_name, (), {}, {}, message_id=job.id)


@pytest.mark.parametrize("own", [True, False])
def test_a_postponed_message_keeps_its_own_store_results(
    results: tuple[Fleet, StubBackend], own: bool
) -> None:
    from ojs_bridge.rules.job import format_time

    fleet, _ = results
    later = fleet.bridge.engine.now().fromtimestamp(time.time() + 0.2, tz=fleet.bridge.engine.now().tzinfo)
    state = {"v": 1, "attempt": 1, "next_retry_at": format_time(later)}
    job = fleet.send(fleet.actor(lambda n: None), ojs=state, store_results=own)
    fleet.end(job)
    assert job.runs[0].options["store_results"] is own


def test_a_group_completes_once_its_retried_member_has(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed()
    fleet.broker.add_middleware(GroupCallbacks(StubLimits()))
    got: list[Any] = []
    done = fleet.declare(lambda: got.append("done"))
    retried, plain = fleet.actor(fails_once), fleet.actor(lambda n: None)
    group = dramatiq.group([retried.message("a"), plain.message("b")], broker=fleet.broker)
    group.add_completion_callback(done.message())
    with fleet.working():
        group.run()
        eventually(lambda: got)
    assert (got, len(fleet.runs["a"]), len(fleet.runs["b"])) == (["done"], 2, 1)


# --- interrupts ---


def busy(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(0.01)


@pytest.fixture
def limited(unique: str) -> Fleet:
    """A fleet whose time limits are checked often."""
    from dramatiq.middleware import Callbacks, Pipelines

    chosen = [TimeLimit(interval=20), ShutdownNotifications(), Callbacks(), Pipelines(), AsyncIO(), Retries()]
    broker = StubBroker(middleware=chosen)
    return Fleet(broker, unique)


@pytest.fixture
def timing(limited: Fleet) -> Iterator[Fleet]:
    """The same, working."""
    limited.broker.emit_after("process_boot")
    limited.declare(lambda: None)
    with limited.working():
        yield limited
    limited.broker.emit_after("worker_shutdown", None)


def types_of(fleet: Fleet, job: Sent) -> list[str]:
    return [e.data["error"]["type"] for e in fleet.heard.events[job.id] if e.type == "job.failed"]


def test_a_time_limit_is_an_attempt_of_the_reserved_type(timing: Fleet) -> None:
    job = timing.send(timing.actor(lambda n: busy(10), time_limit=50, max_retries=1))
    timing.end(job)
    # The event of a failure comes after the publishing of its retry; the job may have ended by then.
    eventually(lambda: len(types_of(timing, job)) == 2)
    assert types_of(timing, job) == ["timeout", "timeout"]


def test_a_job_starts_no_thread(stubbed: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to Python 3.11 a time limit may strike the thread that its job starts: both would hang."""
    started: list[tuple[threading.Thread, str]] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append((threading.current_thread(), thread.name))
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    fleet = stubbed(settle_behind=True)
    actor = fleet.actor(fails_once)
    with fleet.working():
        assert fleet.end(fleet.send(actor)).type == "job.completed"
    assert {"ojs-events", "ojs-heartbeat", "ojs-rates", "ojs-settling"} <= {name for _, name in started}
    assert [name for by, name in started if isinstance(by, WorkerThread)] == []


def test_a_time_limit_that_strikes_in_an_instrument_is_the_jobs(timing: Fleet) -> None:
    timing.bridge.engine.instrument(Lingering())
    job = timing.send(timing.actor(lambda n: "done", time_limit=50, max_retries=1))
    assert timing.end(job).type == "job.completed"
    assert types_of(timing, job) == ["timeout"]


def test_a_time_limit_can_be_ruled_out(timing: Fleet) -> None:
    job = timing.send(
        timing.actor(lambda n: busy(10), time_limit=50, ojs_retry={"non_retryable_errors": ["timeout"]})
    )
    assert timing.end(job).data["cause"] == "non_retryable"


@pytest.mark.parametrize("stubborn", [False, True])
def test_a_time_limit_of_an_async_actor(timing: Fleet, stubborn: bool) -> None:
    async def run() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            if stubborn:
                await asyncio.sleep(1.3)

    actor = timing.declare(run, time_limit=50, max_retries=0)
    job = Sent(actor.send().message_id)
    timing.end(job)
    assert types_of(timing, job) == ["timeout"]


def test_an_async_actor_is_retried(timing: Fleet) -> None:
    runs = []

    async def run() -> None:
        runs.append(1)
        raise Retry("a.b")

    job = Sent(timing.declare(run, max_retries=1).send().message_id)
    timing.end(job)
    eventually(lambda: len(types_of(timing, job)) == 2)
    assert (len(runs), types_of(timing, job)) == (2, ["a.b", "a.b"])


@pytest.mark.parametrize("outcome", ["succeeds", "fails"])
def test_a_time_limit_that_strikes_as_the_actor_ends_loses_nothing(
    limited: Fleet, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "ARRIVAL_SECONDS", 30.0)
    strikes: list[threading.Timer] = []

    def run(n: int) -> None:
        # The middleware has chosen this thread, and its exception comes a moment later.
        manager = next(m for m in limited.broker.middleware if isinstance(m, TimeLimit)).manager
        from dramatiq.middleware.threading import raise_thread_exception

        me = threading.get_ident()
        manager.deadlines[me] = None
        strike = dramatiq.middleware.TimeLimitExceeded
        # The actor has ended by then, even if a loaded machine holds up its thread.
        strikes.append(threading.Timer(2, raise_thread_exception, (me, strike)))
        strikes[-1].start()
        if outcome == "fails":
            raise OSError("down")

    job = limited.send(limited.actor(run, max_retries=1))
    with limited.working(threads=1):
        event = limited.end(job)
        for timer in strikes:
            timer.join()
        probe = limited.send(limited.actor(lambda n: None))
        assert limited.end(probe).type == "job.completed"  # its only thread lives
    assert event.type == {"succeeds": "job.completed", "fails": "job.discarded"}[outcome]
    assert len(job.runs) == {"succeeds": 1, "fails": 2}[outcome]


def test_a_retry_past_the_age_limit_is_exhausted(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed()
    retry = {"initial_interval": "PT30S", "jitter": False, "on_exhaustion": "dead_letter"}
    job = fleet.send(fleet.actor(fails, max_age=20_000, ojs_retry=retry))
    with fleet.working():
        end = fleet.end(job)
    assert (len(job.runs), end.data["cause"], end.data["dead_lettered"]) == (1, "expired", True)


# --- a fleet in part ---


def test_unmatched_actors_keep_the_native_retries(stub: StubBroker, unique: str) -> None:
    stub.middleware = [m for m in stub.middleware if not isinstance(m, Retries)]
    stub.add_middleware(Retries(max_retries=1, min_backoff=1, max_backoff=1))
    runs: list[str] = []

    def run(name: str) -> None:
        runs.append(name)
        raise OSError("down")

    for name in ("billing.charge", "mail.send", "mail.own"):
        dramatiq.actor(run, broker=stub, actor_name=name, queue_name=unique)
    middleware = install(stub, policies={"billing.*": {**QUICK, "max_attempts": 4}})
    assert isinstance(middleware, OJSRetries)
    worker = dramatiq.Worker(stub, worker_timeout=20)
    worker.start()
    for name in ("billing.charge", "mail.send"):
        stub.get_actor(name).send(name)
    eventually(lambda: len(runs) >= 6)
    stub.join(unique, timeout=10_000, fail_fast=False)
    worker.stop()
    assert (runs.count("billing.charge"), runs.count("mail.send")) == (4, 2)
    assert [m.actor_name for m in dead_messages(stub, unique)] == ["mail.send"]


def test_a_snoozed_member_of_a_pipeline_goes_on_later(fleet: Fleet) -> None:
    got: list[Any] = []
    snoozing = fleet.actor(raising(lambda: Snooze("PT0.05S"), times=1))
    message = snoozing.message("key-of-a-snooze")
    dramatiq.pipeline([message, fleet.declare(got.append).message()], broker=fleet.broker).run()
    eventually(lambda: got and "job.snoozed" in fleet.heard.types(message.message_id))
    assert fleet.heard.types(message.message_id).count("job.snoozed") == 1


class Later(Snooze):
    """A Snooze of one's own, with a class and an argument of its own."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        super().__init__("PT0.05S")
        self.why = why


class Full(Snooze, OSError):
    """A Snooze that is another error, too."""


class Last(Snooze):
    """A Snooze that allows no class below it."""

    def __init_subclass__(cls) -> None:
        raise TypeError("no more")


@pytest.mark.parametrize("kind", [Snooze, Later, Full, Last])
def test_a_snooze_of_any_class_is_no_error_in_the_log(
    fleet: Fleet, kind: type[Snooze], caplog: pytest.LogCaptureFixture
) -> None:
    raised: list[BaseException] = []

    def snooze() -> BaseException:
        raised.append(kind("PT0.05S"))
        return raised[-1]

    job = fleet.actor(raising(snooze, times=1)).send(f"key-of-{kind.__name__}").message_id
    eventually(lambda: "job.completed" in fleet.heard.types(job))
    assert fleet.heard.types(job).count("job.snoozed") == 1
    assert isinstance(raised[0], kind)
    assert ("Failed to process" in caplog.text) is (kind is Last)
