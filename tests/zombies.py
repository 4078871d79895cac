"""Workers that are stopped while they run jobs, and what those jobs say when they are woken."""

from __future__ import annotations

import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing

#: What a run that lost its reservation says in the end, as Python.
LAST_WORDS = {
    "dead letter": "DeadLetter('a', 'b')",
    "retry": "OSError()",
    "parked retry": "Retry('a', after='PT5M')",
    "no attempt left": "ValueError()",
    "snooze": "Snooze('PT0.2S')",
    "success": "'first'",
}
POLICY = {"max_attempts": 4, "on_exhaustion": "dead_letter", "non_retryable_errors": ["ValueError"]}
STORES = ("sqlite", "postgres", "valkey")
#: What a worker logs of such a run.
DROPPED = "was taken for lost before it ended; what it says now is dropped"


def stop(processes: Sequence[int], store: str) -> None:
    """Stop processes, none of which has SQLite's lock."""
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
