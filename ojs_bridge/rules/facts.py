"""What is known of a fleet at a moment, as far as the verdict needs it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["ok", "unknown", "degraded", "away"]

#: The minutes that are looked at. The last one runs now, and is not whole.
MINUTES = 60
#: One number for each of these minutes.
Minutes: TypeAlias = tuple[int, ...]
NONE: Minutes = (0,) * MINUTES


@dataclass(frozen=True, slots=True)
class Part:
    """Whether the store or the broker answers, and since when it is away.

    Where only some of the brokers are away, `of` names their frameworks.
    """

    status: Status
    message: str = ""
    since: datetime | None = None
    of: str = ""


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """An error of a job type; `retrying` is how many jobs retry with it now."""

    fingerprint: str
    error_type: str
    message: str
    retrying: int = 0


@dataclass(frozen=True, slots=True)
class TypeFacts:
    """How many runs of a job type ended in each minute, how many died and how many were retried.

    What is usual is a number a minute, and None where it is not known. `depends` names the dependencies.
    `error` is that of which most died lately, `retry_error` that with which most retry now.
    """

    type: str
    runs: Minutes
    deaths: Minutes = NONE
    retried: Minutes = NONE
    usual_deaths: float | None = None
    usual_retried: float | None = None
    depends: tuple[str, ...] = ()
    error: ErrorFacts | None = None
    retry_error: ErrorFacts | None = None


@dataclass(frozen=True, slots=True)
class HoldFacts:
    """A hold that is on, how many jobs of its types it holds, and the types of them that are known.

    `of` is what it holds, in words. `forgotten` says that it is on for long, if it is.
    """

    id: str
    of: str
    since: datetime
    held: int
    types: tuple[str, ...] = ()
    dependency: str | None = None
    queue: str | None = None
    by: str = ""
    why: str = ""
    forgotten: str = ""

    @property
    def is_breaker(self) -> bool:
        """Whether a breaker has opened."""
        return self.dependency is not None and self.id == f"breaker:{self.dependency}"


@dataclass(frozen=True, slots=True)
class QueueFacts:
    """A queue: what waits in the broker, what comes in and goes out, and whether its workers keep up.

    What is not known is None.
    """

    framework: str
    queue: str
    depth: int | None
    oldest_at: datetime | None = None
    in_per_second: float | None = None
    out_per_second: float = 0.0
    keeps_up: bool | None = None
    paused: bool = False
    workers: int = 0


@dataclass(frozen=True, slots=True)
class HostFacts:
    """How many workers of a framework were seen on a host lately, and how many are silent.

    A silent worker has not said that it ends, and no other one has begun in its place. The host is silent
    when no worker was seen there lately.
    """

    framework: str
    host: str
    seen: int
    silent: int = 0
    silent_since: datetime | None = None
    queues: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MarkFacts:
    """A mark, such as a deploy."""

    at: datetime
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known at a moment. `deaths` and `runs` are those of all types; what is usual is by the minute.

    `last_seen_at` is when a worker wrote last. `overdue` says that parked jobs are late, if they are.
    """

    at: datetime
    store: Part
    broker: Part
    deaths: Minutes = NONE
    runs: Minutes = NONE
    usual_deaths: tuple[float, ...] | None = None
    usual_runs: float | None = None
    types: tuple[TypeFacts, ...] = ()
    holds: tuple[HoldFacts, ...] = ()
    queues: tuple[QueueFacts, ...] = ()
    hosts: tuple[HostFacts, ...] = ()
    marks: tuple[MarkFacts, ...] = ()
    last_seen_at: datetime | None = None
    overdue: str = ""
    fail_open: bool = False
