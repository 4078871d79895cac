"""Jobs that take their worker with them, or outlive what others expect of them."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import dramatiq
from dramatiq.middleware import Middleware

from tests.on_dramatiq.app import FAULT, QUEUE, broker, run

ONCE_A_SECOND = {"initial_interval": "PT1S", "backoff_strategy": "none", "on_exhaustion": "dead_letter"}


def die() -> None:
    """Kill the worker and its master, as a machine dies."""
    os.killpg(0, signal.SIGKILL)


class DiesBeforeAcknowledging(Middleware):
    """Ends the process when the outcome of a job is settled and its message is not acknowledged."""

    ran = False

    def after_process_message(self, broker: Any, message: Any, **outcome: Any) -> None:
        """Take note that a job has run."""
        self.ran = True

    def before_ack(self, broker: Any, message: Any) -> None:
        """Die, unless the message only changes its queue, or was put aside."""
        if self.ran:
            die()

    before_nack = before_ack


if FAULT == "unacknowledged":
    broker.add_middleware(DiesBeforeAcknowledging())


@dramatiq.actor(queue_name=QUEUE, ojs_retry=ONCE_A_SECOND)
def kills(word: str, times: int) -> None:
    """Kill the worker, the first so many times."""
    if run(word) <= times:
        die()


@dramatiq.actor(queue_name=QUEUE, ojs_retry={"max_attempts": 4, "on_exhaustion": "dead_letter"})
def hopeless_there(word: str) -> None:
    """Always fail."""
    run(word)
    raise OSError("down")


@dramatiq.actor(queue_name=QUEUE)
def slow(word: str, seconds: float) -> None:
    """Take a while."""
    run(word)
    time.sleep(seconds)
    run(f"{word}-end")


@dramatiq.actor(queue_name=QUEUE, notify_shutdown=True)
def notified(word: str, seconds: float) -> None:
    """Take a while, the first time, unless the worker shuts down."""
    if run(word) == 1:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.01)
    run(f"{word}-end")
