"""Instruments that fail or take long, and need no library."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ojs_bridge import Bridge
from ojs_bridge.engine.instruments import Instrument
from ojs_bridge.engine.runs import Refuse, Run
from ojs_bridge.rules.decision import Decision
from tests.contract.notes import Noting, Settings


class Panic(BaseException):
    """An error of an exporter that is no Exception, as those of libraries in Rust are not."""


class Panicking(Instrument):
    """Panics whenever it is called, or where its contexts are entered or left."""

    def __init__(self, where: str) -> None:
        self._where = where

    @contextmanager
    def _within(self) -> Iterator[None]:
        if self._where == "entered":
            raise Panic
        yield
        raise Panic

    def _called(self, *_: Any) -> Any:
        if self._where == "called":
            raise Panic
        return self._within()

    def _told(self, *_: Any) -> None:
        raise Panic

    sending = running = step = _called
    started = stopped = concluded = heard = traceparent = _told


class Concluded(Instrument):
    """Notes what it is told of the ends of runs, and that it was active around them."""

    def __init__(self, noting: Noting) -> None:
        self._noting = noting

    @contextmanager
    def running(self, framework: str, run: Run, carrier: Any) -> Iterator[None]:
        """Note a run when it has ended."""
        try:
            yield
        finally:
            self._noting.note("told", run.job.id, "ran")

    def concluded(self, run: Run | Refuse, decision: Decision, seconds: float) -> None:
        """Note a decision."""
        self._noting.note("told", run.job.id, type(decision).__name__)


def panicking(bridge: Bridge, settings: Settings) -> None:
    """Have instruments that panic, and one after them that notes."""
    for where in ("called", "entered", "left"):
        bridge.engine.instrument(Panicking(where))
    bridge.engine.instrument(Concluded(Noting(settings.backend)))


class Lingering(Instrument):
    """Takes so long at the first attempt of a job that its time limit strikes."""

    @contextmanager
    def running(self, framework: str, run: Run, carrier: Any) -> Iterator[None]:
        """Linger before the run."""
        ends = time.monotonic() + 60
        while run.job.attempt == 1 and time.monotonic() < ends:
            time.sleep(0.01)
        yield


def lingering(bridge: Bridge, settings: Settings) -> None:
    """Have an instrument that lingers."""
    bridge.engine.instrument(Lingering())
