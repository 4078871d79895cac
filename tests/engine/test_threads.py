"""Whatever is raised in a thread of the bridge, and whatever breaks its log, the thread goes on."""

from __future__ import annotations

import functools
import logging
import os
import pkgutil
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

import ojs_bridge
from ojs_bridge import Bridge, Event
from ojs_bridge.adapters.presence import Presence
from ojs_bridge.engine import threads
from ojs_bridge.engine.heartbeat import Heartbeat
from ojs_bridge.engine.rates import Sums
from ojs_bridge.engine.scheduler import Scheduler
from tests.servers import eventually

logger = logging.getLogger("ojs_bridge")


class Aimed(BaseException):
    """An interrupt of a framework."""


class GreenletExit(BaseException):
    """What ends a greenlet."""


class Unsayable:
    """Has no text."""

    def __str__(self) -> str:
        raise OSError("no text")

    __repr__ = __str__


def fails(*_: Any, **__: Any) -> Any:
    """Raise."""
    raise ValueError("a fault of the test's")


class Raising(logging.Handler):
    """A handler that does not catch its own errors."""

    def emit(self, record: logging.LogRecord) -> None:
        """Raise."""
        record.getMessage()
        fails()


class Closed:
    """A stream that refuses each word."""

    write = flush = fails


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the log and the stream that tells its errors raise."""
    handler = Raising()
    logger.addHandler(handler)
    monkeypatch.setattr(sys, "stderr", Closed())
    yield
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "AGAIN", 0.01)


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    "error", [ValueError, SystemExit, KeyboardInterrupt, MemoryError, RecursionError, Aimed]
)
def test_a_thread_outlives_whatever_is_raised_in_it(error: type[BaseException]) -> None:
    rounds: list[int] = []

    def round_() -> bool:
        rounds.append(len(rounds))
        if len(rounds) < 4:
            raise error
        return len(rounds) < 6

    thread = threads.keep_going("ojs-test", round_)
    thread.join(30)
    assert (rounds, thread.is_alive()) == ([0, 1, 2, 3, 4, 5], False)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_greenlet_that_is_ended_ends() -> None:
    def round_() -> bool:
        raise GreenletExit

    thread = threads.keep_going("ojs-test", round_)
    thread.join(30)
    assert not thread.is_alive()


def refuse(record: Any) -> bool:
    return bool(fails())


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize(
    "say",
    [
        pytest.param(lambda: logger.error("job %s", Unsayable()), id="an argument without a text"),
        pytest.param(lambda: logger.error("%d", "x"), id="a wrong format"),
        pytest.param(lambda: logger.warning("job %s", "x", extra={"name": 1}), id="a field of the record's"),
        pytest.param(lambda: logger.error("x", exc_info=OSError("down")), id="an error"),
    ],
)
def test_no_line_of_the_log_raises(say: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    say()
    logger.addFilter(refuse)
    say()
    logger.removeFilter(refuse)
    with monkeypatch.context() as factory:
        factory.setattr(logging, "_logRecordFactory", fails)
        say()


def test_an_interrupt_that_strikes_in_the_log_is_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    class Limit(Exception):
        pass

    def strike(record: Any) -> bool:
        raise Limit

    monkeypatch.setattr(threads, "_aimed", [lambda error: isinstance(error, Limit)])
    logger.addFilter(strike)
    with pytest.raises(Limit):
        logger.error("x")
    logger.removeFilter(strike)


def test_a_line_tells_where_it_comes_from(caplog: pytest.LogCaptureFixture) -> None:
    logger.error("here")
    assert caplog.records[-1].filename == Path(__file__).name


PAUSES = (
    "engine.heartbeat.CLEAR_SECONDS",
    "engine.rates.PERIOD",
    "engine.scheduler.SWEEP_SECONDS",
    "adapters.presence.LOOK_SECONDS",
)
#: A step of each thread, by the name of the thread.
STEPS: dict[str, tuple[Any, str]] = {
    "ojs-heartbeat": (Heartbeat, "_lose_orphans"),
    "ojs-rates": (Sums, "_add_up"),
    "ojs-scheduler": (Scheduler, "_sweep"),
    "ojs-presence": (Presence, "look"),
}


@pytest.mark.usefixtures("broken")
@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("name", STEPS)
def test_each_thread_goes_on_after_an_error(
    name: str, error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, step = STEPS[name]
    passed, original = threading.Semaphore(0), getattr(owner, step)
    times = [0]

    def strange(*args: Any) -> Any:
        times[0] += 1
        if times[0] == 1:
            raise error("a fault of the test's")
        passed.release()
        return original(*args) if owner is not Presence else None

    monkeypatch.setattr(owner, step, strange)
    for place in PAUSES:
        monkeypatch.setattr(f"ojs_bridge.{place}", 0.05)
    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db")
    bridge.start()
    bridge.engine.start_threads()
    presence = Presence("test:", "worker", "family", suspect=fails, give_back=fails)
    presence.start(lambda: None)
    assert passed.acquire(timeout=60), f"{name} has not gone on"
    assert name in {thread.name for thread in threading.enumerate()}
    presence.stop()
    bridge.stop()


@pytest.mark.usefixtures("broken")
def test_a_listener_that_exits_keeps_no_other_from_hearing(tmp_path: Path) -> None:
    heard: list[Any] = []

    def leaves(event: Any) -> None:
        sys.exit(1)

    bridge = Bridge(f"sqlite:///{tmp_path}/ojs.db", listeners=[leaves, fails, heard.append])
    events = [Event("test", str(n), datetime.now(timezone.utc), {}) for n in range(3)]
    for event in events:
        bridge.engine.context.events.emit([event])
    eventually(lambda: heard == events)
    bridge.stop()


class Slow:
    """Has a value that takes a while to make."""

    def __init__(self, begun: threading.Event, goes_on: threading.Event) -> None:
        self.begun, self.goes_on = begun, goes_on

    @threads.cached
    def value(self) -> int:
        self.begun.set()
        self.goes_on.wait()
        return 7


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_waits_for_no_value_that_another_thread_makes_as_the_process_forks() -> None:
    begun, goes_on, at_once = threading.Event(), threading.Event(), threading.Event()
    at_once.set()
    made = list[int]()
    slow = Slow(begun, goes_on)
    thread = threading.Thread(target=lambda: made.append(slow.value))
    thread.start()
    begun.wait()
    child = os.fork()
    if not child:
        os._exit(Slow(begun, at_once).value)
    ended = list[tuple[int, int]]()
    try:
        eventually(
            lambda: ended.append(os.waitpid(child, os.WNOHANG)) or ended[-1][0], what="the child's end"
        )
        assert os.waitstatus_to_exitcode(ended[-1][1]) == 7
    finally:
        if not ended[-1][0]:
            os.kill(child, 9)
        goes_on.set()
        thread.join()
    assert made == [slow.value] == [7]


def test_what_workers_run_has_no_value_with_a_lock() -> None:
    """The command line and the plan fork no process."""
    rooms = [f"ojs_bridge.{room}." for room in ("rules", "store", "engine", "adapters", "celery", "dramatiq")]
    found = pkgutil.walk_packages(ojs_bridge.__path__, "ojs_bridge.")
    names = [each.name for each in found if each.name.startswith(tuple(rooms))]
    assert len(names) > 50
    locked = [
        f"{name}:{owner.__name__}.{attribute}"
        for name in names
        for owner in vars(pkgutil.resolve_name(name)).values()
        if isinstance(owner, type) and owner.__module__ == name
        for attribute, value in vars(owner).items()
        if isinstance(value, functools.cached_property) and not isinstance(value, threads.cached)
    ]
    assert locked == []
