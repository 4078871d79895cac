"""Jobs that were on their way when the bridge came, and have more native retries than their policy allows."""

from __future__ import annotations

from typing import Any, Literal

import dramatiq
import pytest
from dramatiq.brokers.stub import StubBroker

from ojs_bridge import Bridge, ConfigurationError, Event
from ojs_bridge.celery import install
from ojs_bridge.dramatiq import install as install_dramatiq
from tests.contract.steps import raises
from tests.on_celery.by_hand import ByHand
from tests.servers import eventually

POLICY = {"max_attempts": 3, "initial_interval": "PT0.01S", "max_interval": "PT0.01S"}
ENDS = {"job.completed", "job.discarded"}
#: in_flight, the native retries a job comes with -> the attempts of its runs
RUNS: list[tuple[Literal["counted", "afresh"], int, list[int]]] = [
    ("counted", 7, [8]),
    ("afresh", 7, [1, 2, 3]),
    ("afresh", 3, [1, 2, 3]),
    ("afresh", 2, [3]),
    ("afresh", 1, [2, 3]),
    ("counted", 1, [2, 3]),
]


def attempts(heard: list[Event]) -> list[int]:
    """Return the attempts that have failed."""
    return [event.data["attempt"] for event in heard if event.type == "job.failed"]


@pytest.mark.parametrize(("in_flight", "retries", "runs"), RUNS)
def test_on_celery(
    in_flight: Any, retries: int, runs: list[int], unique: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A job goes on with the attempts it has left; without any it ends, or begins afresh if asked to."""
    heard: list[Event] = []
    bridge = Bridge(listeners=[heard.append])
    hand = ByHand(unique, lambda app: install(app, bridge, policies={"c*": POLICY}, in_flight=in_flight))
    hand.define("charge")
    hand.send("charge", raises(OSError), retries=retries)
    hand.deliver_all()
    bridge.flush()
    assert attempts(heard) == runs
    assert ("attempt 8 (the policy allows 3) failed with builtins.OSError" in caplog.text) == (runs == [8])


@pytest.mark.parametrize(("in_flight", "retries", "runs"), RUNS)
@pytest.mark.parametrize("listens", [True, False])
def test_on_dramatiq(in_flight: Any, retries: int, runs: list[int], listens: bool, unique: str) -> None:
    heard: list[Event] = []
    broker = StubBroker()
    bridge = Bridge(listeners=[heard.append] if listens else [])
    install_dramatiq(broker, bridge, policies={"c*": POLICY}, in_flight=in_flight)
    ran: list[int] = []

    def charge() -> None:
        ran.append(1)
        raise OSError("down")

    actor = dramatiq.actor(charge, broker=broker, queue_name=unique)
    actor.send_with_options(retries=retries)
    worker = dramatiq.Worker(broker, worker_timeout=20)
    worker.start()
    eventually(lambda: broker.dead_letters)
    worker.stop()
    assert len(ran) == len(runs)
    # A thread may tell of its attempt when another thread has run the next.
    assert sorted(attempts(heard)) == (runs if listens else [])


def test_a_crash_of_its_first_run_is_attempt_1(tmp_path: Any, unique: str) -> None:
    """The same message comes again, without a header, and its attempt is lost."""
    heard: list[Event] = []
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", listeners=[heard.append])
    hand = ByHand(unique, lambda app: install(app, bridge, policies={"c*": POLICY}, in_flight="afresh"))
    hand.define("charge")
    hand.send("charge", "ok", retries=7, headers={"dies": "killed"})
    hand.deliver()
    bridge.flush()
    assert [event.data["attempt"] for event in heard if event.type == "job.failed"] == [1]


@pytest.mark.parametrize("framework", ["celery", "dramatiq"])
def test_another_word_is_refused(framework: str, unique: str) -> None:
    """The error names the argument and the rule."""
    with pytest.raises(ConfigurationError, match="in_flight: 'anew' must be 'counted' or 'afresh'"):
        if framework == "celery":
            ByHand(unique, lambda app: install(app, Bridge(), in_flight="anew"))  # type: ignore[arg-type]
        else:
            install_dramatiq(StubBroker(), Bridge(), in_flight="anew")  # type: ignore[arg-type]
