"""Outages of a broker, a store or this process: an operation is tried again, and a worker's threads wait."""

from __future__ import annotations

import logging
import math
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

from ..errors import ConfigurationError, StoreError, Unstorable
from ..rules.backoff import Rng
from ..rules.failures import nests_deeper
from ..rules.job import MAX_DEPTH
from ..rules.notations import read_duration

logger = logging.getLogger("ojs_bridge")

T = TypeVar("T")

#: A wait is this many seconds at a time: an exception can interrupt it, and a worker may stop meanwhile.
_SLICE = 0.05
#: The shortest and the longest pause of a thread in an outage, in seconds; it grows with the outage.
LEAST, MOST = 0.25, 3.0
#: For how many seconds after an outage the log does not tell of another outage.
CALM = 5.0


#: What Python says when the process has no room for a thread, ends, or two threads met at one object.
_LACKS = (
    *("can't start new thread", "can't create new thread", "cannot schedule new futures"),
    *("dictionary changed size", "dictionary keys changed", "Set changed size", "deque mutated"),
)


def is_of_process(error: BaseException, *parts: object) -> bool:
    """Return whether an error comes of what this process lacks, and says nothing of the job that met it.

    It lacks memory, stack, descriptors, threads, or time, since it ends. A job whose `parts` nest too deeply
    has used the stack up by itself; a part may be the bytes of a message.
    """
    if isinstance(error, RecursionError):
        texts = [part for part in parts if isinstance(part, bytes)]
        deep = nests_deeper(parts, MAX_DEPTH) or any(_brackets_nest_deeper(text, MAX_DEPTH) for text in texts)
        return not deep
    if isinstance(error, RuntimeError) and str(error).startswith(_LACKS):
        return True
    return isinstance(error, (MemoryError, OSError)) or sys.is_finalizing()


class _Hurry(threading.local):
    on = False


_hurry = _Hurry()


@contextmanager
def at_once() -> Iterator[None]:
    """Let this thread try each operation once, because it must not wait."""
    _hurry.on = True
    try:
        yield
    finally:
        _hurry.on = False


def pause(seconds: float) -> None:
    """Sleep, but let an exception for this thread in at once, and not at the end."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(left, _SLICE))


@dataclass(frozen=True, slots=True)
class StorageRetry:
    """The number of tries of an operation on a broker or a store, and the pauses between them.

    Each argument may be given alone. Intervals are ISO 8601 durations or timedeltas. A pause is longer or
    shorter by the fraction `jitter` at most. A job's attempts do not count here. Raises ConfigurationError.
    """

    max_attempts: int = 5
    initial_interval: str | timedelta = timedelta(milliseconds=100)
    multiplier: float = 2.0
    max_interval: str | timedelta = timedelta(seconds=5)
    jitter: float = 0.1

    def __post_init__(self) -> None:
        _check("max_attempts", self.max_attempts, type(self.max_attempts) is int and self.max_attempts >= 1)
        for name, least in (("multiplier", 1), ("jitter", 0)):
            value = getattr(self, name)
            number = type(value) in (int, float) and math.isfinite(value)
            _check(name, value, number and value >= least and (name != "jitter" or value <= 1))
        for name in ("initial_interval", "max_interval"):
            object.__setattr__(self, name, _interval(name, getattr(self, name)))

    @classmethod
    def disabled(cls) -> StorageRetry:
        """Return a StorageRetry that tries each operation once."""
        return cls(max_attempts=1)

    def delay(self, n: int, rng: Rng) -> float:
        """Return the seconds to wait after the n-th attempt failed; the cap comes before the jitter."""
        first, most = read_duration(self.initial_interval), read_duration(self.max_interval)
        try:
            raw = first.total_seconds() * math.pow(self.multiplier, n - 1)
        except OverflowError:
            raw = math.inf
        return min(raw, most.total_seconds()) * (1 + self.jitter * (2 * rng.random() - 1))

    def run(
        self,
        operation: Callable[..., T],
        *args: Any,
        retry_on: tuple[type[Exception], ...] = (StoreError,),
        wait: Callable[[float], object] = pause,
    ) -> T:
        """Return what the operation returns; try again after errors of `retry_on`, and raise the last error.

        Unstorable is raised at once. An exception that ends the thread or the process, such as a time limit,
        ends the wait at once.
        """
        for n in range(1, 1 if _hurry.on else self.max_attempts):
            try:
                return operation(*args)
            except Unstorable:
                raise
            except retry_on as error:
                # An outage has lines of its own, once each. These are many: each try of each thread.
                logger.debug("%r failed, %d of %d: %r", operation, n, self.max_attempts, error)
                wait(self.delay(n, random))
        return operation(*args)


def _check(name: str, value: object, holds: bool) -> None:
    rules = {"max_attempts": "an integer of at least 1", "multiplier": "a number of at least 1"}
    if not holds:
        raise ConfigurationError(
            f"StorageRetry: {name}: {value!r} must be {rules.get(name, 'a number from 0 to 1')}"
        )


def _interval(name: str, value: str | timedelta) -> timedelta:
    try:
        return read_duration(value)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"StorageRetry: {name}: {error}") from None


#: For operations that settle a job.
INSISTING = StorageRetry()
#: For the scheduler: less eager, because it comes again anyway.
POLLING = StorageRetry(3, timedelta(milliseconds=500), 2.0, timedelta(seconds=10), 0.2)


class Outage:
    """What all threads of a worker know of an outage of its store or broker.

    It lasts from the first thread that meets it to the first thread that finds it over. The log gets one
    line at its begin, with the first error, and one at its end, with its length.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: When it began, by the monotonic clock; None while there is none.
        self.since: float | None = None
        self._said = False
        self._calm_from = 0.0

    def wait(self, error: BaseException, stops: Callable[[], bool]) -> bool:
        """Pause before the next try; return False at once if the worker stops."""
        seconds = min(LEAST + self.meet(error) / 4, MOST) * random.uniform(0.8, 1.2)
        until = time.monotonic() + seconds
        while not stops():
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, _SLICE))
        return False

    def over(self) -> None:
        """Note that a try has succeeded."""
        with self._lock:
            since, said = self.since, self._said
            self.since, self._said = None, False
            if since is not None:
                self._calm_from = time.monotonic() + CALM
        if said and since is not None:
            logger.warning("jobs and retries go on, after %.1f s", time.monotonic() - since)

    def meet(self, error: BaseException) -> float:
        """Return for how many seconds the outage has lasted; the first thread tells the log."""
        now = time.monotonic()
        with self._lock:
            since = self.since = now if self.since is None else self.since
            # A thread may meet the last error of an outage after another thread has found it over.
            first = not self._said and now >= self._calm_from
            self._said = self._said or first
        if first:
            logger.error(
                "jobs and retries wait for the store or the broker (%s)", str(error) or type(error).__name__
            )
        return now - since


def _brackets_nest_deeper(text: bytes, levels: int) -> bool:
    """Return whether the brackets of a text nest deeper than some levels, those in its strings among them."""
    depth = 0
    for byte in text:
        depth += (byte in b"[{") - (byte in b"]}")
        if depth > levels:
            return True
    return False
