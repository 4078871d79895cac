"""Children that are forked while a thread of their parent's is busy."""

from __future__ import annotations

import io
import logging
import os
import signal
import threading
import time

import pytest

from ojs_bridge import Bridge, Event
from ojs_bridge.engine.runs import Run
from ojs_bridge.rules.decision import Complete
from ojs_bridge.rules.job import Job
from tests.servers import eventually

JOB = Job("j-1", "billing.charge", "default")
logger = logging.getLogger("ojs_bridge")


class Slow(io.StringIO):
    """A stream with a lock, as a process's own have, that is slow to write its first line."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.entered = threading.Event()

    def write(self, text: str) -> int:
        """Write a line."""
        with self.lock:
            if not self.entered.is_set():
                self.entered.set()
                threading.Event().wait(0.5)
            return super().write(text)


def end_of(child: int) -> int:
    """Await the end of a child, and return its exit code."""
    ended: list[int] = []
    try:
        eventually(lambda: ended.extend(os.waitpid(child, os.WNOHANG)) or ended[-2], what="the child's end")
    except TimeoutError:
        os.kill(child, signal.SIGKILL)
        raise
    return os.waitstatus_to_exitcode(ended[-1])


def test_a_child_that_is_forked_while_a_thread_logs_can_log() -> None:
    """Otherwise the child would wait for ever for a lock that only a thread of its parent can release."""
    Bridge()
    stream = Slow()
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    try:
        thread = threading.Thread(target=logger.error, args=("a listener failed",))
        thread.start()
        assert stream.entered.wait(90)
        child = os.fork()
        if not child:
            logger.error("a job died")
            os._exit(7)
        assert end_of(child) == 7
        thread.join()
        assert stream.getvalue() == "a listener failed\n"
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize("seconds", [0.5, 60])
def test_a_child_that_is_forked_while_a_listener_runs_has_what_the_listener_uses(seconds: float) -> None:
    """The fork waits for the listener, so the child finds its lock free; the fork does not wait for ever."""
    lock, entered = threading.Lock(), threading.Event()
    ends = threading.Event()

    def listen(_: Event) -> None:
        with lock:
            entered.set()
            ends.wait(seconds)

    bridge = Bridge(listeners=[listen])
    begun = bridge.engine.begin(JOB, JOB, bridge.engine.task())
    assert isinstance(begun, Run)
    bridge.engine.settling.settle(begun, Complete())
    assert entered.wait(90)
    asked = time.monotonic()
    child = os.fork()
    if not child:
        os._exit(7 if lock.acquire(blocking=False) else 8)
    assert end_of(child) == (7 if seconds < 1 else 8)
    assert time.monotonic() - asked < 30
    ends.set()
    bridge.stop()
