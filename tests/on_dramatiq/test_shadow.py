"""Shadow mode beside Dramatiq's own retries."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.errors import Retry as NativeRetry

from ojs_bridge import Bridge, ConfigurationError, DeadLetter, Snooze, open_store
from ojs_bridge.dramatiq import install
from ojs_bridge.migration import shadow
from ojs_bridge.migration.shadowing import bridge_of_shadow
from ojs_bridge.migration.shadowing.comparing import TaskReport, reports
from tests.on_dramatiq.application import Application
from tests.servers import Valkey, eventually

#: Retries so quick that a test can wait for them.
QUICK = {"max_retries": 2, "min_backoff": 10, "max_backoff": 10}


class Hostile(Exception):
    """An error whose text and repr raise."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    __str__ = __repr__


class Exits(Exception):
    """An error whose text raises SystemExit."""

    def __str__(self) -> str:
        return sys.exit(3)


#: actor options, what it raises, its partial policy -> what its failed runs came to
COMPARED: dict[str, tuple[dict[str, Any], Callable[[], BaseException], dict[str, Any], dict[str, int]]] = {
    "alike": (QUICK, OSError, {"on_exhaustion": "dead_letter"}, {"same": 3}),
    "untouched": (QUICK, OSError, {}, {"same": 3}),
    "kept": (QUICK, OSError, {"on_exhaustion": "discard"}, {"same": 2, "end": 1}),
    "slower": (QUICK, OSError, {"initial_interval": "PT1M", "max_interval": "PT1M"}, {"delay": 2, "same": 1}),
    "earlier": (QUICK, OSError, {"max_attempts": 2}, {"same": 2, "ends_earlier": 1}),
    "asked": (QUICK, OSError, {"retry_on": "asked"}, {"non_retryable": 2, "same": 1}),
    "longer": (QUICK, OSError, {"max_attempts": 9}, {"same": 2, "retries_longer": 1}),
    "ruled_out": (QUICK, OSError, {"non_retryable_errors": ["OSError"]}, {"non_retryable": 2, "same": 1}),
    "throws": ({**QUICK, "throws": OSError}, OSError, {"on_exhaustion": "dead_letter"}, {"same": 1}),
    "hint": (QUICK, lambda: NativeRetry("later", delay=7), {}, {"same": 3}),
    "response": ({**QUICK, "max_retries": 1}, lambda: DeadLetter("a.b"), {}, {"handler": 1, "same": 1}),
    "pause": ({**QUICK, "max_retries": 1}, lambda: Snooze("PT1S"), {}, {"snoozes": 2}),
    "hostile": (QUICK, Hostile, {}, {"same": 3}),
    "exits": (QUICK, Exits, {}, {}),
}


@pytest.fixture(autouse=True)
def switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the switch of shadow mode from the environment of the tests."""
    monkeypatch.delenv("OJS_BRIDGE_SHADOW", raising=False)


@pytest.fixture
def bridge(tmp_path: Path) -> Bridge:
    """The bridge that decides beside."""
    return Bridge(f"sqlite:///{tmp_path}/ojs.db")


def declare(broker: StubBroker, name: str, handler: Callable[[], Any], **options: Any) -> list[int]:
    """Declare an actor and send it one job; returns its runs."""
    runs: list[int] = []

    def act() -> None:
        runs.append(len(runs) + 1)
        handler()

    dramatiq.actor(act, broker=broker, actor_name=name, **options).send()
    return runs


def raises(make: Callable[[], BaseException]) -> Callable[[], None]:
    def handler() -> None:
        raise make()

    return handler


def work(broker: StubBroker) -> None:
    """Have a worker end all jobs."""
    worker = dramatiq.Worker(broker, worker_timeout=20, worker_threads=4)
    worker.start()
    broker.join("default", fail_fast=False, timeout=40_000)
    worker.stop()


def names(broker: StubBroker) -> list[str]:
    """The class names of a broker's middleware."""
    return [type(middleware).__name__ for middleware in broker.middleware]


def found(bridge: Bridge) -> dict[str, TaskReport]:
    """The store's report of each actor."""
    assert bridge.store is not None
    return {report.task: report for report in reports(bridge.store.shadows())}


def kinds(bridge: Bridge) -> dict[str, dict[str, int]]:
    """The count of each kind, by actor."""
    assert bridge.store is not None
    counts: dict[str, dict[str, int]] = {}
    for tally in bridge.store.shadows():
        counts.setdefault(tally.task, {})[tally.kind] = tally.count
    return counts


def test_comparing(stub: StubBroker, bridge: Bridge) -> None:
    """Shadow mode compares what Dramatiq did about each failed run with the policy's decision."""
    shadow(stub, bridge, policies={name: policy for name, (_, _, policy, _) in COMPARED.items()})
    runs = {
        name: declare(stub, name, raises(raised), **options)
        for name, (options, raised, _, _) in COMPARED.items()
    }
    runs["succeeds"] = declare(stub, "succeeds", lambda: None)
    runs["unnamed"] = declare(stub, "unnamed", raises(OSError), **QUICK)
    work(stub)
    assert kinds(bridge) == {name: counts for name, (*_, counts) in COMPARED.items() if counts}
    natively = {name: 1 if "throws" in options else options["max_retries"] + 1
                for name, (options, *_) in COMPARED.items()}  # fmt: skip
    assert {name: len(r) for name, r in runs.items()} == {**natively, "succeeds": 1, "unnamed": 3}
    (end,) = found(bridge)["kept"].differences
    (example,) = end.examples
    assert (example["attempt"], example["error_type"], example["message"]) == (3, "builtins.OSError", "")
    assert (example["native"], example["ojs"]) == ("ended, kept", "discarded (exhausted)")


def test_retry_when_is_asked_once_a_run(stub: StubBroker, bridge: Bridge) -> None:
    """`retry_when` is the user's code. Its answer shows in what Dramatiq did."""
    asked: list[int] = []

    def wanted(retries: int, exception: BaseException) -> bool:
        asked.append(retries)
        return retries < 2

    shadow(stub, bridge)
    declare(stub, "picky", raises(OSError), retry_when=wanted, min_backoff=10, max_backoff=10)
    work(stub)
    assert asked == [0, 1, 2]
    assert kinds(bridge) == {"picky": {"same": 3}}


def test_messages_are_as_without(stub: StubBroker, bridge: Bridge) -> None:
    """Shadow mode puts nothing into a message."""
    other = StubBroker()
    shadow(stub, bridge)
    for broker in (stub, other):
        declare(broker, "dies", raises(OSError), **QUICK)
        work(broker)
    (dead,), (native,) = stub.dead_letters_by_queue["default"], other.dead_letters_by_queue["default"]
    assert set(dead.options) == set(native.options)
    assert found(bridge)["dies"].failed == 3


@pytest.mark.parametrize("switch", ["off", "0", "FALSE"])
def test_off(stub: StubBroker, monkeypatch: pytest.MonkeyPatch, switch: str) -> None:
    """Shadow mode that is off leaves the worker, and reads neither its policies nor the URL of a store."""
    monkeypatch.setenv("OJS_BRIDGE_SHADOW", switch)
    monkeypatch.setenv("OJS_BRIDGE_STORE", "nonsense")
    shadow(stub, policies="no-such-file.toml")
    runs = declare(stub, "dies", raises(OSError), **QUICK)
    work(stub)
    assert len(runs) == 3
    assert "BrokerShadow" not in names(stub)


@pytest.mark.parametrize(
    ("policies", "why"),
    [
        ("no-such-file.toml", "cannot be read"),
        ({"dies": {"max_attempts": -1}}, "max_attempts: -1 must be >= 0"),
        ({"nobody": {}}, "names no actor of this broker"),
    ],
)
def test_what_is_wrong_with_it_stops_no_worker(
    stub: StubBroker, bridge: Bridge, caplog: pytest.LogCaptureFixture, policies: Any, why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Shadow mode stays off, and the log says why."""
    monkeypatch.setattr("ojs_bridge.migration.shadowing.recording._said", {})
    shadow(stub, bridge, policies=policies)
    runs = declare(stub, "dies", raises(OSError), **QUICK)
    assert "BrokerShadow" in names(stub)
    work(stub)
    assert len(runs) == 3
    assert "BrokerShadow" not in names(stub)
    (said,) = [record.message for record in caplog.records if record.message.startswith("shadow mode")]
    assert said.startswith("shadow mode: it stays off: ")
    assert why in said


def test_without_a_store(stub: StubBroker, caplog: pytest.LogCaptureFixture) -> None:
    """Shadow mode has no place for its tallies; the jobs run as ever."""
    shadow(stub, Bridge())
    runs = declare(stub, "dies", raises(OSError), **QUICK)
    work(stub)
    assert len(runs) == 3
    assert bridge_of_shadow(stub) is None


def test_a_store_that_is_down(stub: StubBroker, tmp_path: Path) -> None:
    """The jobs end as ever."""
    shadow(stub, Bridge(f"sqlite:///{tmp_path}/nowhere/ojs.db"))
    runs = declare(stub, "dies", raises(OSError), **QUICK)
    work(stub)
    assert (len(runs), len(stub.dead_letters_by_queue["default"])) == (3, 1)


def test_some_actors_only(stub: StubBroker, bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's environment names the actors."""
    monkeypatch.setenv("OJS_BRIDGE_SHADOW", "mail.*,other")
    shadow(stub, bridge)
    for name in ("mail.send", "billing.charge"):
        declare(stub, name, raises(OSError), **QUICK)
    work(stub)
    assert {name: report.failed for name, report in found(bridge).items()} == {"mail.send": 3}


def test_beside_a_canary(stub: StubBroker, bridge: Bridge) -> None:
    """A run under the bridge is counted, and not compared."""
    install(
        stub,
        bridge,
        policies={"moved": {"max_attempts": 2}, "partly": {}},
        canary={"moved": 100, "partly": 0},
    )
    shadow(stub, bridge)
    for name in ("moved", "partly", "native"):
        declare(stub, name, raises(OSError), **QUICK)
    work(stub)
    numbers = {name: (report.failed, report.bridged) for name, report in found(bridge).items()}
    assert numbers == {"moved": (0, 2), "partly": (3, 0), "native": (3, 0)}


def test_the_canary_of_the_environment_keeps_no_shadow_off(
    stub: StubBroker, bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment's canary is for a fleet's own bridge, and means nothing to shadow mode."""
    monkeypatch.setenv("OJS_BRIDGE_CANARY", '{"charge": 0}')
    shadow(stub, bridge)
    declare(stub, "charge", raises(OSError), **QUICK)
    work(stub)
    assert found(bridge)["charge"].failed == 3


def test_once(stub: StubBroker, bridge: Bridge) -> None:
    """A second shadow is a mistake."""
    shadow(stub, bridge)
    assert bridge_of_shadow(stub) is bridge
    with pytest.raises(ConfigurationError, match="already"):
        shadow(stub)


def test_in_real_processes(valkey: Valkey, unique: str, tmp_path: Path) -> None:
    """A worker that is told to stop writes its pending runs."""
    application = Application(valkey.url, unique, tmp_path, "tests.on_dramatiq.shadowed")
    application.produce("for n in range(5): hopeless.send(f'j{n}')")
    with application.working() as worker:
        eventually(lambda: sum(application.counts().values()) >= 15, seconds=30)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(30) == 0
    (report,) = reports(open_store(application.store_url, namespace=unique).shadows())
    assert (report.framework, report.task, report.failed, report.compared) == ("dramatiq", "hopeless", 15, 15)
    assert {tally.kind: tally.count for tally in report.differences} == {"ends_earlier": 5}
