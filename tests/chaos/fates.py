"""The fates of jobs, the number of jobs of each fate, and their retry policy."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tests.chaos.ledger import Ledger

#: Seconds: the first retry's delay, the longest one, and how long a slow job takes.
FIRST_DELAY, LONGEST_DELAY = 0.3, 1.0
RESERVATION, SLOW = 2.0, 3.0
#: How long a long job takes, by its number.
LONG = (8, 9, 10, 11, 12)
#: The seconds by which two readings of a clock may differ: `next_retry_at` has milliseconds.
READING = 0.001


class Unlucky(Exception):
    """The exception of a job that is to fail."""


class BankDown(Exception):
    """The exception of a job that needs the bank while the bank is down."""


#: While a reader has released this, the bank is down.
BANK = "bank-is-down"


@dataclass(frozen=True)
class Fate:
    """A kind of job: its share of the load in percent, and whether it is meant to end as a dead letter."""

    name: str
    percent: int
    max_attempts: int
    dies: bool = False

    @property
    def policy(self) -> dict[str, object]:
        """The retry policy; without jitter, so that every delay is known."""
        return {
            "max_attempts": self.max_attempts,
            "initial_interval": f"PT{FIRST_DELAY}S",
            "max_interval": f"PT{LONGEST_DELAY}S",
            "jitter": False,
            "on_exhaustion": "dead_letter",
        }


#: The innocent have attempts to spare for what kills their workers.
FATES = {
    fate.name: fate
    for fate in (
        Fate("instant", 60, 12),
        Fate("flaky", 20, 15),
        Fate("slow", 5, 15),
        Fate("doomed", 12, 3, dies=True),
        Fate("poison", 3, 3, dies=True),
        Fate("held", 0, 2),
        Fate("bank", 0, 12),
        Fate("long", 0, 100),
    )
}


def load(jobs: int, seed: int) -> list[str]:
    """Return so many job ids in random order; an id begins with its fate."""
    ids = [
        f"{fate.name}-{seed}-{n}"
        for fate in FATES.values()
        for n in range(max(jobs * fate.percent // 100, 1) if fate.percent else 0)
    ]
    random.Random(seed).shuffle(ids)
    return ids


def fate_of(job: str) -> Fate:
    """Return a job's fate."""
    return FATES[job.partition("-")[0]]


def delay_before(attempt: int) -> float:
    """Return the seconds that lie at least between the attempt before this one and this one."""
    return min(FIRST_DELAY * 2.0 ** (attempt - 2), LONGEST_DELAY)


def play(ledger: Ledger, job: str, attempt: int, processes: Callable[[int], Iterable[int]]) -> None:
    """Do as a job's fate says, and note it; `processes` names the victims of the n-th poison."""
    ledger.note("start", job, attempt)
    number = int(job.rpartition("-")[2])
    match fate_of(job).name:
        case "instant":
            time.sleep(0.1)
        case "slow":
            time.sleep(SLOW)
        case "long":
            time.sleep(LONG[number % len(LONG)])
        case "held":
            ledger.await_release(job)
        case "bank" if ledger.is_released(BANK):
            ledger.note("failed", job, attempt)
            raise BankDown(f"attempt {attempt}")
        case "flaky" if attempt <= 1 + number % 3:
            _fail(ledger, job, attempt)
        case "doomed":
            _fail(ledger, job, attempt)
        case "poison":
            time.sleep(0.1)
            ledger.note("dying", job, attempt)
            for process in processes(number):
                os.kill(process, signal.SIGKILL)
    ledger.note("done", job, attempt)


def _fail(ledger: Ledger, job: str, attempt: int) -> None:
    ledger.note("failed", job, attempt)
    raise Unlucky(f"attempt {attempt}")
