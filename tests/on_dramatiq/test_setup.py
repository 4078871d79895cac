"""Putting the bridge in the place of the stock retries, and set-ups that are refused."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import AgeLimit, Middleware, Pipelines, Retries, default_middleware

from ojs_bridge import Bridge, ConfigurationError, InvalidRetryPolicy
from ojs_bridge.dramatiq import OJSRetries, install
from tests.on_dramatiq.fleet import QUICK, Fleet
from tests.servers import eventually


def noop(*args: Any) -> None:
    pass


def boot(broker: dramatiq.Broker) -> None:
    worker = dramatiq.Worker(broker, worker_timeout=20)
    worker.start()
    worker.stop()


class Watcher(Middleware):
    """A user's middleware that looks at a message after Retries."""

    def __init__(self) -> None:
        self.seen: list[tuple[bool, int]] = []

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: Any = None
    ) -> None:
        self.seen.append((message.failed, message.options.get("retries", 0)))


def test_it_takes_the_stock_retries_place_and_says_so(
    stub: StubBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ojs_bridge")
    middleware = OJSRetries(Bridge())
    stub.add_middleware(middleware)
    dramatiq.actor(noop, broker=stub)
    stock = [type(m) for m in stub.middleware]
    assert stock == [OJSRetries if m is Retries else m for m in default_middleware]
    assert "position 5" in caplog.text


@pytest.mark.parametrize("first", ["actor", "middleware"])
def test_actors_may_be_declared_before_or_after(stub: StubBroker, unique: str, first: str) -> None:
    runs: list[int] = []

    def fails() -> None:
        runs.append(1)
        raise OSError("down")

    middleware = OJSRetries(Bridge(retry={**QUICK, "max_attempts": 2}))
    if first == "middleware":
        stub.add_middleware(middleware)
    actor = dramatiq.actor(fails, broker=stub, queue_name=unique)
    if first == "actor":
        stub.add_middleware(middleware)
    worker = dramatiq.Worker(stub, worker_timeout=20)
    worker.start()
    actor.send()
    eventually(lambda: len(runs) >= 2)
    stub.join(unique, timeout=10_000, fail_fast=False)
    worker.stop()
    assert len(runs) == 2


def test_a_broker_may_be_built_with_it(unique: str) -> None:
    chosen = [AgeLimit(), Pipelines(), OJSRetries(Bridge())]
    broker = StubBroker(middleware=chosen)
    dramatiq.actor(noop, broker=broker, queue_name=unique)
    boot(broker)
    assert broker.middleware[:3] == chosen


@pytest.mark.parametrize("when", ["before it is added", "after"])
def test_others_may_still_say_before_retries(
    stub: StubBroker, stubbed: Callable[..., Fleet], when: str
) -> None:
    watcher = Watcher()
    if when == "before it is added":
        stub.add_middleware(watcher, before=Retries)
    fleet = stubbed()

    def fails(n: int) -> None:
        raise OSError("down")

    actor = fleet.actor(fails, ojs_retry={"max_attempts": 2, "on_exhaustion": "discard"})
    if when == "after":
        stub.add_middleware(watcher, before=Retries)
    job = fleet.send(actor)
    # One thread only: an attempt is seen after its retry was published, and another thread might run that.
    with fleet.working(threads=1):
        fleet.end(job)
        eventually(lambda: len(watcher.seen) == 2)
    assert watcher.seen == [(False, 1), (True, 2)]


class OtherRetries(Retries):
    pass


@pytest.mark.parametrize("other", [OJSRetries, OtherRetries, Retries])
def test_two_middlewares_that_fight_are_refused(stub: StubBroker, unique: str, other: type[Retries]) -> None:
    stub.add_middleware(OJSRetries(Bridge()))
    dramatiq.actor(noop, broker=stub, queue_name=unique)
    stub.add_middleware(other())
    with pytest.raises(ConfigurationError, match=f"OJSRetries and .*{other.__name__}"):
        boot(stub)


def test_a_policy_for_no_actor_is_refused(stub: StubBroker, unique: str) -> None:
    dramatiq.actor(noop, broker=stub, queue_name=unique)
    install(stub, policies={"bill.*": QUICK})
    with pytest.raises(ConfigurationError, match=r"'bill\.\*'.* no actor"):
        boot(stub)


def test_an_invalid_policy_for_a_pattern_is_refused(stub: StubBroker) -> None:
    with pytest.raises(InvalidRetryPolicy, match=r"policies\['bill\.\*'\]: max_attempts"):
        install(stub, policies={"bill.*": {"max_attempts": -1}})


# an actor's options -> the error, what it says
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"ojs_retry": {"max_attempts": -1}}, InvalidRetryPolicy, "actor noop: max_attempts: -1"),
    ({"ojs_retry": {"tries": 3}}, InvalidRetryPolicy, "tries"),
    ({"ojs_retry": "often"}, InvalidRetryPolicy, "often"),
    ({"ojs_retry": {}, "max_retries": "many"}, InvalidRetryPolicy, "actor noop: max_retries='many'"),
    ({"ojs_retry_on": "asked", "min_backoff": "1"}, InvalidRetryPolicy, "actor noop: min_backoff='1'"),
    ({"ojs_errors": {"Timeout": "x"}}, ConfigurationError, "actor noop: errors: the key 'Timeout'"),
    ({"ojs_errors": {OSError: 7}}, ConfigurationError, "actor noop: errors"),
    ({"ojs_retry": {}, "throws": ["OSError"]}, InvalidRetryPolicy, "actor noop: throws"),
]


@pytest.mark.requirement("RET-20")
@pytest.mark.parametrize(("options", "error", "said"), REFUSED)
def test_an_actor_s_invalid_options_are_refused_where_it_is_declared(
    stub: StubBroker, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    stub.add_middleware(OJSRetries(Bridge()))
    with pytest.raises(error, match=said):
        dramatiq.actor(noop, broker=stub, **options)
    assert not stub.actors


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"max_retries": "many"}, {"min_backoff": "1"}, {"max_backoff": [1]}, {"min_backoff": float("nan")},
     {"throws": ["OSError"]}, {"throws": (OSError, "KeyError")}],
    ids=str,
)  # fmt: skip
def test_an_actor_with_native_options_that_cannot_be_read_stays_native(
    stub: StubBroker, options: dict[str, Any], is_there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """It harms no other actor; its own `ojs_retry` for a job is refused with the reason."""
    if is_there:
        odd = dramatiq.actor(noop, broker=stub, **options)
    retries = install(stub, policies={"*": {"max_attempts": 5}})
    if not is_there:
        odd = dramatiq.actor(noop, broker=stub, **options)
    dramatiq.actor(noop, broker=stub, actor_name="other")
    assert retries.actors.tasks["noop"] is None
    assert retries.actors.tasks["other"] is not None
    (name,) = options
    assert f"actor noop: it keeps the native retries, for {name}=" in caplog.text
    with pytest.raises(InvalidRetryPolicy, match=f"keeps the native retries, for {name}="):
        odd.send_with_options(ojs_retry={"max_attempts": 2})


@pytest.mark.parametrize("url", ["ojs.db", "nothing://x", "sqlite:/x", "redis+what://"])
def test_a_bad_store_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="store"):
        OJSRetries(Bridge(store=url))


def test_a_broker_without_any_retries_gets_them(unique: str) -> None:
    broker = StubBroker(middleware=[])
    fleet = Fleet(broker, unique)
    job = fleet.send(fleet.actor(lambda n: 1 / (n - 1)))
    with fleet.working():
        assert fleet.end(job).type == "job.completed"


def test_a_worker_may_start_twice(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed()
    actor = fleet.actor(lambda n: 1 / (n - 1))
    for _ in range(2):
        with fleet.working():
            assert fleet.end(fleet.send(actor)).type == "job.completed"


def always_fails(n: int) -> None:
    raise OSError("down")


@pytest.mark.requirement("RET-09")
def test_without_any_policy_the_default_of_the_spec_applies(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed(retry={})
    job = fleet.send(fleet.actor(always_fails, ojs_retry={}))
    with fleet.working():
        event = fleet.end(job)
    assert (len(job.runs), event.data["dead_lettered"]) == (3, False)
    assert 0.5 <= fleet.planned(job)[0] < 2
    assert 1.0 <= fleet.planned(job)[1] < 3.5


def test_the_header_s_history_can_be_longer_than_ten(stubbed: Callable[..., Fleet]) -> None:
    fleet = stubbed(history=12)
    policy = {**QUICK, "max_attempts": 13, "initial_interval": "PT0.001S", "backoff_strategy": "none"}
    job = fleet.send(fleet.actor(always_fails, ojs_retry=policy))
    with fleet.working():
        fleet.end(job)
    assert len(job.runs[12].ojs["errors"]) == 12
