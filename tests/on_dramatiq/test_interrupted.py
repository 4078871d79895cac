"""An interrupt strikes in another middleware, after the actor: no job is lost, no success runs again."""

from __future__ import annotations

from typing import Any

import pytest
from dramatiq.brokers.stub import StubBroker
from dramatiq.middleware import Interrupt, Middleware

from ojs_bridge import Bridge
from ojs_bridge.dramatiq import OJSRetries, consumer
from tests.on_dramatiq.fleet import QUICK, Fleet, Heard, left_in
from tests.servers import eventually


class Striking(Middleware):
    """Is interrupted each time it hears of the first run's outcome, so many times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.heard: list[Any] = []

    def after_process_message(
        self, broker: Any, message: Any, *, result: Any = None, exception: BaseException | None = None
    ) -> None:
        self.heard.append(exception)
        if len(self.heard) <= self.times:
            raise Interrupt


@pytest.fixture(params=["silent", "told"])
def bridge(request: pytest.FixtureRequest) -> Bridge:
    """A bridge that begins a job only when it fails, and one that begins it before it runs."""
    return Bridge(None, QUICK, listeners=[] if request.param == "silent" else [Heard()])


@pytest.mark.requirement("RET-01")
@pytest.mark.parametrize(
    ("before", "times", "runs"),
    [
        pytest.param(True, 1, 1, id="after the bridge has heard of the success"),
        pytest.param(False, 1, 2, id="before: a failed attempt"),
        pytest.param(False, 2, 2, id="before, and again: given back"),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_interrupt_after_the_actor(
    stub: StubBroker,
    unique: str,
    bridge: Bridge,
    before: bool,
    times: int,
    runs: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumer, "HOLD_SECONDS", 0.1)
    fleet = Fleet(stub, unique, bridge)
    # The first actor brings OJSRetries to its place. What stands before it hears of an outcome after it.
    actor, striking = fleet.actor(lambda n: None), Striking(times)
    stub.add_middleware(striking, **{"before" if before else "after": OJSRetries})
    job = fleet.send(actor)
    with fleet.working(threads=2):
        eventually(lambda: len(striking.heard) == runs + 1 and left_in(stub, unique) == 0)
    assert len(job.runs) == runs
    assert [type(e) for e in striking.heard] == [type(None), Interrupt, type(None)][: runs + 1]
