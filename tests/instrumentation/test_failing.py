"""Instruments that fail: no job is touched, and the instruments after them are told."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.engine.instruments import Instrument
from ojs_bridge.engine.runs import Run
from ojs_bridge.rules.decision import Complete, Discarded
from ojs_bridge.rules.failures import Failure
from ojs_bridge.rules.job import Job
from tests.contract.fleet import Fleet, attempts, end
from tests.contract.notes import Noting
from tests.contract.steps import raises
from tests.servers import eventually


@pytest.mark.parametrize("kind", ["celery-valkey", "celery-rabbitmq", "dramatiq-valkey", "dramatiq-rabbitmq"])
def test_an_instrument_that_panics_touches_no_job(kind: str, made: Callable[..., Fleet]) -> None:
    """Handlers run, failures are retried, and a message that has ended leaves its queue."""
    fleet = made(kind, instruments=("failing.panicking",))
    fleet.start().await_ready()
    good, bad = (
        fleet.send("act", raises(OSError, "down"), "ok"),
        fleet.send("act_kept", raises(OSError, "down")),
    )
    assert end(fleet, good).type == "job.completed"
    end(fleet, bad)
    assert (attempts(fleet, good), attempts(fleet, bad)) == ([1, 2], [1, 2])
    noting = Noting(fleet.settings.backend)
    for job, last in ((good, "Complete"), (bad, "DeadLettered")):
        ends = sorted(["ran", "ran", "RetryAt", last])
        eventually(
            lambda job=job, ends=ends: sorted(noting.read("told", job)) == ends, what="the last instrument"
        )
    eventually(lambda: fleet.left() == 0, what="an empty queue")
    assert fleet.worker.stop() == 0


class Told(Instrument):
    """Keeps the names of the decisions."""

    def __init__(self) -> None:
        self.decisions: list[str] = []

    def concluded(self, run: Any, decision: Any, seconds: float) -> None:
        """Keep a name."""
        self.decisions.append(type(decision).__name__)


@pytest.mark.skipif(sys.platform == "darwin", reason="where stacks are not reserved")
def test_instruments_are_told_where_no_thread_can_start_for_the_rates(tmp_path: Path) -> None:
    bridge, told, job = Bridge(f"sqlite:///{tmp_path}/ojs.db"), Told(), Job("j-1", "a", "q")
    bridge.engine.instrument(told)
    run = bridge.engine.admit(job, job, bridge.engine.task())
    assert isinstance(run, Run)
    usual = threading.stack_size(2**46)
    try:
        bridge.engine.settling.settle(run, Complete())
        bridge.engine.settling.settle(run, Discarded("handler", Failure("a.b"), "why"))
    finally:
        threading.stack_size(usual)
    assert told.decisions == ["Complete", "Discarded"]
