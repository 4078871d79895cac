"""A Ctrl-C at any line of an operation sends no job twice, loses none, and leaves each one counted."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import count, takewhile
from types import FrameType
from typing import Any

import pytest

from ojs_bridge import Bridge
from ojs_bridge.operations import audit, operation
from ojs_bridge.operations.audit import uninterrupted
from tests.operations.test_draining import Fleet
from tests.operations.test_operating import bury

JOBS = [f"j-{n}" for n in range(2)]
#: The functions that hold a Ctrl-C back; before they do, it ends what has not begun.
HOLDING = ("uninterrupted", "__init__", "__call__", "release")


def press_ctrl_c(work: Callable[[], object], line: int) -> bool:
    """Press Ctrl-C before so many lines of `ojs_bridge.operations` have run; False if there are fewer."""
    left = line

    def trace(frame: FrameType, event: str, _value: object) -> Any:
        nonlocal left
        file = frame.f_code.co_filename
        holds = file == audit.__file__ and frame.f_code.co_name in HOLDING
        if "ojs_bridge/operations" not in file or holds:
            return None
        left -= event == "line"
        if not left:
            left = -1
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        assert left < 0
    else:
        assert left > 0
    finally:
        sys.settrace(None)
    return left < 0


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Let Ctrl-C end the work, as in a terminal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet whose operations may go on at once, even if nothing has been heard of them."""
    monkeypatch.setattr(operation, "STALE", timedelta(0))
    found = Fleet("memory://")
    yield found
    found.bridge.stop()


def at_each_line(fleet: Fleet, prepare: Callable[[], Callable[[], object]]) -> Iterator[int]:
    """Prepare some work and do it, again and again, with a Ctrl-C one line later each time."""

    def interrupted(line: int) -> bool:
        fleet.outbox.published.clear()
        fleet.outbox.retried.clear()
        return press_ctrl_c(prepare(), line)

    line = 0
    for line in takewhile(interrupted, count(1)):
        yield line
    assert line > 50


@pytest.fixture
def park(fleet: Fleet) -> Callable[[str], object]:
    """Park a job's retry under a new fence each time: what was cancelled under an earlier one has ended."""
    fences = count(1)
    return lambda job: fleet.park(job, fence=next(fences))


@pytest.mark.parametrize("action", ["replay", "purge", "run", "cancel"])
def test_an_operation_goes_on_where_ctrl_c_ended_it(
    action: Any, fleet: Fleet, park: Callable[[str], object]
) -> None:
    operations = fleet.bridge.operations

    def prepare() -> Callable[[], object]:
        for job in JOBS:
            if action in ("replay", "purge"):
                bury(fleet.bridge, job)
            else:
                park(job)
        return partial(operations.run, operations.begin(action))

    for line in at_each_line(fleet, prepare):
        found = operations.list()[0]
        if action == "replay":
            # Each letter is left, or its job was sent.
            left = len(fleet.bridge.dead_letters.list().letters)
            assert len(fleet.outbox.published) == len(JOBS) - left, line
        ended = found if found.state == "done" else operations.run(operations.resume(found.id))
        assert (ended.state, ended.succeeded, ended.failed) == ("done", len(JOBS), 0), line
        sent = [letter.id for letter, _ in fleet.outbox.published]
        assert sorted(sent) == (JOBS if action == "replay" else []), line
        assert not fleet.left or action == "run", line


ALONE: dict[str, Callable[[Bridge], object]] = {
    "dead_letter.replay": lambda bridge: bridge.dead_letters.replay(JOBS[0]),
    "dead_letter.delete": lambda bridge: bridge.dead_letters.delete(JOBS[0]),
    "waiting.run": lambda bridge: bridge.retries.run(JOBS[0]),
    "waiting.move": lambda bridge: bridge.retries.move(JOBS[0], bridge.engine.now()),
    "waiting.cancel": lambda bridge: bridge.retries.cancel(JOBS[0]),
}


@pytest.mark.parametrize("action", ALONE)
def test_one_letter_or_retry(action: str, fleet: Fleet, park: Callable[[str], object]) -> None:
    """What has begun comes to its end, and its record says so."""

    def prepare() -> Callable[[], object]:
        bury(fleet.bridge, JOBS[0]) if action.startswith("dead") else park(JOBS[0])
        return partial(ALONE[action], fleet.bridge)

    for line in at_each_line(fleet, prepare):
        [record] = fleet.bridge.audit.list(limit=1).records
        assert (record.action, record.outcome) == (action, "done"), line
        assert not fleet.bridge.dead_letters.list().letters, line
        assert len(fleet.outbox.published) == (action == "dead_letter.replay"), line


def test_a_drain(fleet: Fleet) -> None:
    """The parked retries that are left are those that were not published.

    Its record has the number of the published ones, or says that the end is not known.
    """

    def prepare() -> Callable[[], object]:
        for job in JOBS:
            fleet.park(job)
        return fleet.bridge.retries.drain

    for line in at_each_line(fleet, prepare):
        assert sorted([*fleet.published, *fleet.left]) == JOBS, line
        for record in fleet.bridge.audit.list(limit=1).records:
            assert record.outcome == "begun" or (record.count or 0) == len(fleet.published), line


def test_a_second_ctrl_c_strikes_at_once() -> None:
    lines = list[int]()
    with pytest.raises(KeyboardInterrupt), uninterrupted(), uninterrupted():
        for line in range(3):
            signal.raise_signal(signal.SIGINT)
            lines.append(line)
    assert lines == [0]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_the_step_sets_stays() -> None:
    """Such as that of a program that has its own idea of Ctrl-C."""
    with uninterrupted():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_a_process_that_ignores_ctrl_c_goes_on_to_ignore_it() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with uninterrupted():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_another_thread_leaves_the_handler_alone() -> None:
    """Python would refuse to set one there."""
    with ThreadPoolExecutor() as threads:
        seen = threads.submit(uninterrupted()(partial(signal.getsignal, signal.SIGINT))).result(90)
    assert seen is signal.default_int_handler
