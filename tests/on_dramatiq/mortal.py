"""Jobs that take their worker with them, or outlive what others expect of them."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import dramatiq
from dramatiq.middleware import Middleware, Retries, ShutdownNotifications

from ojs_bridge.dramatiq.acknowledging import Acknowledging, RedisAcknowledging
from ojs_bridge.store import Parked
from tests.on_dramatiq.app import FAULT, QUEUE, bridge, broker, note, run

ONCE_A_SECOND = {"initial_interval": "PT1S", "backoff_strategy": "none", "on_exhaustion": "dead_letter"}
#: So long that a worker which dies once it has published a retry does so before the retry runs.
SELDOM = {
    "max_attempts": 4,
    "initial_interval": "PT3S",
    "backoff_strategy": "none",
    "on_exhaustion": "dead_letter",
}


def die() -> None:
    """Kill the worker and its master, as a machine dies."""
    os.killpg(0, signal.SIGKILL)


class DiesBeforeAcknowledging(Middleware):
    """Ends the process when what follows a job is safe and its message is not acknowledged."""

    def __init__(self) -> None:
        self.ran: set[int] = set()

    def after_process_message(self, broker: Any, message: Any, **outcome: Any) -> None:
        """Take note that a job has run."""
        self.ran.add(threading.get_ident())

    def before_ack(self, broker: Any, message: Any) -> None:
        """Die, unless the message only changes its queue, or was put aside."""
        if threading.get_ident() in self.ran:
            die()

    before_nack = before_ack


class DiesBeforeTheNext(Middleware):
    """Ends the process, once, when the next step of a pipeline is to be sent."""

    def before_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        """Die."""
        if message.actor_name == "second" and run("death") == 1:
            die()


class NotesDeliveries(Middleware):
    """Writes down when a job comes, just before its turn is taken."""

    def before_process_message(self, broker: Any, message: Any) -> None:
        """Note it beside the runs."""
        note(f"delivered-{message.args[0]}")


if FAULT == "delivered":
    broker.add_middleware(NotesDeliveries(), before=Retries)
if FAULT == "next":
    broker.add_middleware(DiesBeforeTheNext())
if FAULT == "settled":  # and not acknowledged yet
    for how in (Acknowledging, RedisAcknowledging):
        how.acknowledge = lambda *_: die()  # type: ignore[method-assign, assignment]
if FAULT == "unacknowledged":
    broker.add_middleware(DiesBeforeAcknowledging())


@dramatiq.actor(queue_name=QUEUE, ojs_retry=ONCE_A_SECOND)
def kills(word: str, times: int) -> None:
    """Kill the worker, the first so many times."""
    if run(word) <= times:
        die()


@dramatiq.actor(queue_name=QUEUE, ojs_retry=SELDOM)
def hopeless_there(word: str) -> None:
    """Always fail."""
    run(word)
    raise OSError("down")


@dramatiq.actor(queue_name=QUEUE)
def first(word: str) -> str:
    """Succeed."""
    run(word)
    return f"{word}-next"


@dramatiq.actor(queue_name=QUEUE)
def second(word: str) -> None:
    """Succeed, too."""
    run(word)


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
    # Interrupted between noting its end and coming to it, it would rightly run once more.
    next(m for m in broker.middleware if isinstance(m, ShutdownNotifications)).manager.remove_notification()
    run(f"{word}-end")


@dramatiq.actor(queue_name=QUEUE)
def many(word: str) -> None:
    """Run."""
    run(word)


def park_many(count: int) -> None:
    """Park so many jobs that are due now."""
    store, now = bridge.store, bridge.engine.now()
    assert store is not None
    for _ in range(count):
        message = many.message("many")
        key = message.message_id
        store.park(
            Parked(
                id=key,
                key=key,
                fence=1,
                type=message.actor_name,
                queue=QUEUE,
                framework="dramatiq",
                attempt=2,
                max_attempts=3,
                next_retry_at=now,
                parked_at=now,
                reason="",
                state={"v": 1, "attempt": 2},
                message={"encoded": message.encode().decode(), "encoding": "utf-8"},
            )
        )


class NotesPublications(Middleware):
    """Writes down what this process puts on its queue."""

    def after_enqueue(self, broker: Any, message: Any, delay: int | None) -> None:
        """Note it beside the runs."""
        note(f"published-{message.message_id}")


if FAULT == "published":
    broker.add_middleware(NotesPublications())
