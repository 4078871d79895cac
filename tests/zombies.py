"""Workers are stopped while they run jobs; the tests look at what those jobs do after they wake."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime, timedelta, timezone

from ojs_bridge import DeadLetter, Retry, Snooze
from ojs_bridge.store import Grant, Reservation, Store
from tests.contract.steps import Step, raises

#: The last step of a run that lost its reservation.
LAST_WORDS: dict[str, Step] = {
    "dead letter": raises(DeadLetter, "a", "b"),
    "retry": raises(OSError),
    "parked retry": raises(Retry, "a", after="PT5M"),
    "no attempt left": raises(ValueError),
    "snooze": raises(Snooze, "PT0.2S"),
    "success": "first",
}
POLICY = {"max_attempts": 4, "on_exhaustion": "dead_letter", "non_retryable_errors": ["ValueError"]}
STORES = ("sqlite", "postgres", "valkey")
#: The log line of such a run.
DROPPED = "was taken for lost before it ended; what it says now is dropped"


def take_over(store: Store, job_id: str) -> None:
    """Take the first run of a job over, as a worker that is killed at once."""
    now = datetime.now(timezone.utc)
    answer = store.reservations.reserve(
        Reservation(job_id, 0),
        publication="",
        holder="a worker that is gone",
        mark="taken over",
        now=now + timedelta(days=1),
        until=now + timedelta(seconds=2),
    )
    assert answer.grant is Grant.LOST


def stop(processes: Sequence[int], store: str) -> None:
    """Stop processes of which none has SQLite's lock."""
    while True:
        send(processes, signal.SIGSTOP)
        if not store.startswith("sqlite") or _is_free(store.removeprefix("sqlite:///")):
            return
        wake(processes)
        time.sleep(0.05)


def wake(processes: Sequence[int]) -> None:
    """Have processes go on."""
    send(processes, signal.SIGCONT)


def send(processes: Sequence[int], sent: signal.Signals) -> None:
    """Send processes, or groups by a negative number, a signal."""
    for process in processes:
        os.kill(process, sent)


def _is_free(file: str) -> bool:
    time.sleep(0.1)  # what had been sent when they were stopped has arrived
    with closing(sqlite3.connect(file, timeout=0.5, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
    return True
